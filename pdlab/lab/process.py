"""Starting a server under a nanny, recognising it later from any process, and ending it."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdlab.checks import make_folder
from pdlab.lab import nanny
from pdlab.lab.ports import Ports

GRACE = 8.0  # seconds between SIGTERM and SIGKILL

# Popen objects of nannies that this process started: kept, so that an ended one is reaped and is no zombie.
_started: dict[int, subprocess.Popen[bytes]] = {}


@dataclass(frozen=True)
class Process:
    """A supervised server: enough to find it again after this Python process is gone.

    Attributes:
        name: which server of the lab.
        pid: of its nanny. `start` is the clock tick at which that started: a pid alone may be somebody else by now.
        log: what the server prints.
        ended: where the nanny writes why it ended.
        scratch: the server's TMPDIR, removed when it ends.
    """

    name: str
    pid: int
    start: int
    log: str
    ended: str
    scratch: str

    @property
    def alive(self) -> bool:
        if self.pid in _started:
            _started[self.pid].poll()
        return nanny.start_time(self.pid) == self.start

    def why_ended(self) -> str:
        """One line on how it ended; "killed" where the nanny could not write it."""
        end = self._end()
        return f"{end['why']} (exit code {end['code']})" if end else "killed"

    @property
    def exit_code(self) -> int | None:
        """The server's; None before it has ended, or where the nanny could not write it."""
        return self._end().get("code")

    def _end(self) -> dict[str, Any]:
        try:
            return dict(json.loads(Path(self.ended).read_text()))
        except (OSError, ValueError):
            return {}

    def server_pid(self) -> int | None:
        """Pid of the server itself; None if it is gone."""
        return next(iter(self.pids()[1:]), None)

    def pids(self) -> list[int]:
        """Pids of the nanny, the server and all beneath them."""
        return [self.pid, *nanny.descendants(self.pid)] if self.alive else []

    def wait(self) -> None:
        """Return when it has ended."""
        while self.alive:
            time.sleep(0.2)

    def keep(self) -> None:
        """Let it outlive the process that started it (not its owner)."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)

    def kill(self) -> None:
        """SIGKILL to the server and all beneath it; its nanny notices, and ends by itself. Does not wait."""
        for pid in self.pids()[1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def tell_to_end(self) -> None:
        """Have its nanny end it; does not wait."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def stop(self) -> None:
        """End the server and all beneath it; returns when they are gone. No error if they are."""
        self.tell_to_end()
        while self.alive:
            time.sleep(0.02)
        self._end_orphans()
        _started.pop(self.pid, None)
        shutil.rmtree(self.scratch, ignore_errors=True)  # a killed nanny could not

    def _end_orphans(self) -> None:
        """End what a killed nanny could not: the processes whose TMPDIR is ours."""
        deadline = time.monotonic() + GRACE
        while orphans := list(_with_tmpdir(self.scratch)):
            for pid in orphans:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL)
            time.sleep(0.1)


def _with_tmpdir(folder: str) -> Iterator[int]:
    """Pids of the living processes that were started with this TMPDIR. It is unique: nobody else's have it.

    EngineCore is not among them (it overwrites its environment with its title), but ends with its API server.
    """
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and nanny.start_time(int(entry.name)) is not None:
            with contextlib.suppress(OSError):
                if f"TMPDIR={folder}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)


def owner_of_lab() -> str | None:
    """The process with which servers started from here go, as PID:START; None: they stay until `down`.

    `pdlab lab` and the test session name themselves in PDLAB_OWNER for all that runs beneath them.
    """
    return os.environ.get("PDLAB_OWNER") or None


def myself() -> str:
    """This process as an owner."""
    return f"{os.getpid()}:{nanny.start_time(os.getpid())}"


def spawn(
    name: str,
    argv: Sequence[str],
    *,
    folder: Path,
    env: dict[str, str],
    ports: Ports | None = None,
    owner: str | None = None,
    cores: Sequence[int] = (),
) -> Process:
    """Start `argv` under a nanny in a session of its own, with log file and scratch folder; does not wait for it.

    It ends with this process, until `Process.keep` is called.

    Args:
        owner: PID:START with which it ends; None: with nobody.
        cores: to run on; empty: any.

    Raises:
        PdlabError: there can be no such folder.
    """
    make_folder(folder, name)
    scratch = make_scratch(name)
    log, ended = folder / f"{name}.log", folder / f"{name}.ended.json"
    ended.unlink(missing_ok=True)
    options = ["--scratch", str(scratch), "--ended", str(ended), "--starter", myself()]
    options += ["--owner", owner] if owner else []
    options += ["--cores", ",".join(map(str, cores))] if cores else []
    with log.open("wb") as out:
        started = subprocess.Popen(
            [sys.executable, "-I", "-S", nanny.__file__, *options, "--", *argv],
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            env={**env, "TMPDIR": str(scratch)}, pass_fds=ports.fds() if ports else (),
        )  # fmt: skip
    start = nanny.start_time(started.pid)
    _started[started.pid] = started
    return Process(name, started.pid, start or -1, str(log), str(ended), str(scratch))


def make_scratch(name: str) -> Path:
    """A TMPDIR of a server's own. Short: vLLM puts Unix sockets there, whose paths may have 107 characters."""
    return Path(tempfile.mkdtemp(prefix=f"pdlab-{name}-", dir="/tmp"))
