"""Helpers of the live tests: what of ours is on this machine."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from pdlab.lab.instance import Instance

ROOT = Path(__file__).parent.parent
WORDS = ("vllm", "VLLM", "nanny.py", "pdlab.lab.proxy", "jupyterlab", "resource_tracker")
MARK = "PDLAB_TEST_SESSION"  # set by conftest.py, inherited by all that it starts


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
    """Everything that this test session's engines could leave: processes, ports, shared memory, scratch folders."""
    processes, ports = set(), set()
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # a zombie counts as ended
            line = " ".join(process.cmdline())
            if any(word in line for word in WORDS) and is_ours(process, line):
                listening = [c.laddr for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
                processes.add(f"{process.pid} {line[:80]}")
                ports |= {f"{address.ip}:{address.port}" for address in listening}
    return {
        "processes": processes,
        "ports": ports,
        "shared memory": {path.name for path in Path("/dev/shm").iterdir()},
        "scratch": {path.name for path in Path("/tmp").glob("pdlab-*")},
    }


def is_ours(process: psutil.Process, line: str) -> bool:
    """Whether this session started it. EngineCore cannot be told: to set its title it overwrites its environment."""
    return line.startswith("VLLM::") or process.environ().get(MARK) == os.environ[MARK]


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
