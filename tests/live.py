"""Helpers of the live tests: what of ours is on this machine."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from pdlab.lab import nanny
from pdlab.lab.instance import Instance

ROOT = Path(__file__).parent.parent
WORDS = ("vllm", "VLLM", "nanny.py", "pdlab.lab.proxy", "jupyterlab", "resource_tracker")
MARK = "PDLAB_TEST_SESSION"  # set by conftest.py, inherited by all that it starts
SESSION = "pdlab-test-"  # of the folder that conftest.py makes and removes; of another session nothing may name it


def until(condition: Callable[[], object], seconds: float = 60) -> bool:
    """Whether `condition` came true within `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return bool(condition())


def left_of(pids: Iterable[int]) -> list[str]:
    """Command lines of those that still run."""
    found = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{pid}: {' '.join(process.cmdline())[:100]}")
        except psutil.NoSuchProcess:
            continue
    return found


def traces() -> dict[str, set[str]]:
    """Everything that this test session's engines could leave: processes, ports, shared memory, scratch folders.

    Another session, or a reader's lab, may run beside it. Of files and folders, those are another's that a living
    process of another's uses; what nobody uses (any more) counts as ours, for what leaked has nobody that uses it.
    """
    processes, ports, segments, words = set(), set(), set(), []
    # First: of what is there now, whoever made it is still there later, or it is nobody's.
    memory = {path.name for path in Path("/dev/shm").iterdir()}
    scratch = {path.name for path in Path("/tmp").glob("pdlab-*")}
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # a zombie counts as ended
            line = " ".join(process.cmdline())
            if not is_ours(process):
                segments |= {path.name for path in nanny.shared_memory(process.pid)}
                words += [line, *process.environ().values()]
            elif any(word in line for word in WORDS):
                listening = [c.laddr for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
                processes.add(f"{process.pid} {line[:80]}")
                ports |= {f"{address.ip}:{address.port}" for address in listening}
    said = "\n".join(words)
    return {
        "processes": processes,
        "ports": ports,
        "shared memory": memory - segments,
        "scratch": {name for name in scratch if f"/tmp/{name}" not in said and not name.startswith(SESSION)},
    }


def is_ours(process: psutil.Process) -> bool:
    """Whether this session started it; also where nobody can tell, so that nothing of ours is overlooked."""
    if " ".join(process.cmdline()).startswith("VLLM::"):
        # To set its title it overwrites its environment: its parent tells, unless that is who adopts our orphans.
        parent, here = process.parent(), psutil.Process()
        with suppress(psutil.NoSuchProcess):
            return parent is None or parent == here or parent in here.parents() or is_ours(parent)
        return True
    environment = process.environ()  # of one that is just ending, empty
    return not environment or environment.get(MARK) == os.environ[MARK]


def new_since(before: dict[str, set[str]]) -> dict[str, set[str]]:
    """What is there now and was not before; empty where nothing is."""
    now = traces()
    return {kind: now[kind] - before[kind] for kind in now if now[kind] - before[kind]}


def command(*words: str, **env: str) -> subprocess.Popen[str]:
    """`python -m pdlab WORDS`, as a reader types it, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "pdlab", *words], cwd=ROOT, env={**os.environ, **env}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def in_flight(instance: Instance) -> float:
    """Requests that the engine says are running or waiting in it."""
    return instance.metric("vllm:num_requests_running") + instance.metric("vllm:num_requests_waiting")
