"""The supervisor of one server: `python -I nanny.py OPTIONS -- COMMAND`.  Standard library only; one per instance.

It outlives interrupts of the notebook that started it, and lets nothing outlive it: when the server ends, when its
owner dies, when it is told to end (SIGTERM), or when it is itself killed, every process beneath it goes, with its
shared-memory segments and its scratch folder. It only ever touches its own descendants.
"""

import argparse
import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
STARTING = 60.0  # seconds in which a server may still be starting
OWN_SEGMENTS = ("psm_", "sem.", "vllm", "torch_")


def main() -> int:
    args = options()
    wake = signals()
    libc = ctypes.CDLL(None, use_errno=True)
    # Orphans (an EngineCore whose API server was killed) become our children, in whatever session they are.
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    owners = [fd for owner in (args.starter, args.owner) if owner and (fd := owner_fd(owner)) is not None]
    if len(owners) < bool(args.starter) + bool(args.owner):  # gone already
        return finish(args, "owner ended", None)

    def before_exec() -> None:
        if args.cores:
            os.sched_setaffinity(0, args.cores)
        # SIGTERM: the server can still end in good order when we are killed.
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        # An ignored signal stays ignored in what is started: Ctrl-C would do nothing in a terminal of JupyterLab.
        for ignored in (signal.SIGINT, signal.SIGHUP):
            signal.signal(ignored, signal.SIG_DFL)
        if os.getppid() != nanny:
            os._exit(1)

    nanny = os.getpid()
    child = subprocess.Popen(args.command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=before_exec)
    ended = os.pidfd_open(child.pid)
    segments: set[Path] = set()
    why = wait_for_end(owners, ended, wake, bool(args.starter), segments)
    tear_down(child, args.grace, segments)
    return finish(args, why, child.returncode)


def finish(args: argparse.Namespace, why: str, code: int | None) -> int:
    Path(args.ended).write_text(json.dumps({"why": why, "code": code}))
    shutil.rmtree(args.scratch, ignore_errors=True)
    return 0


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--starter", help="PID:START of the process that starts it: an owner until SIGUSR1")
    parser.add_argument("--owner", help="PID:START of the process with which the server goes; none: it stays")
    parser.add_argument("--cores", type=lambda text: {int(c) for c in text.split(",")}, help="cores to run on: 0,1")
    parser.add_argument("--grace", type=float, default=8.0, help="seconds between SIGTERM and SIGKILL")
    parser.add_argument("--scratch", required=True, help="the server's TMPDIR, removed at the end")
    parser.add_argument("--ended", required=True, help="file to write at the end: why, exit code")
    parser.add_argument("command", nargs="+")
    return parser.parse_args()


def wait_for_end(owners: list[int], ended: int, wake: int, has_starter: bool, segments: set[Path]) -> str:
    """Sleep until there is a reason to end; return it. `segments` gets the /dev/shm files seen meanwhile."""
    began, pause = time.monotonic(), 0.25
    while True:
        ready, _, _ = select.select([*owners, ended, wake], [], [], pause)
        if not ready:
            segments |= own_segments()  # of a killed server they could no longer be told
            starts = time.monotonic() - began < STARTING  # when they are made
            pause = min(2 * pause, 1 if starts else 60)
            continue
        if ended in ready:
            return "server ended"
        received = os.read(wake, 64) if wake in ready else b""
        if signal.SIGTERM in received:
            return "told to end"
        if signal.SIGUSR1 in received and has_starter:  # it is up: from now on it may outlive its starter
            os.close(owners.pop(0))
            segments |= own_segments()
            has_starter = False
        elif any(owner in ready for owner in owners):
            return "owner ended"


def signals() -> int:
    """Turn SIGTERM and SIGUSR1 into a readable file descriptor; ignore what a terminal sends."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    for caught in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(caught, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return read


def owner_fd(owner: str | None) -> int | None:
    """A pidfd of the owner, or None if it is gone (or its pid is another process by now)."""
    if not owner:
        return None
    pid, start = (int(part) for part in owner.split(":"))
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return None
    return fd if start_time(pid) == start else None


def start_time(pid: int) -> int | None:
    """Clock ticks after boot at which `pid` started: with the pid, the identity of a process. None if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")  # a name may be any bytes
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])


def tear_down(child: subprocess.Popen[bytes], grace: float, segments: set[Path]) -> None:
    """End every descendant, then its /dev/shm files.

    SIGTERM to the server, which may end its own; once it is gone, SIGTERM to what is left; in the end, SIGKILL.
    """
    segments = segments | own_segments()
    if child.poll() is None:
        child.terminate()
    deadline, told = time.monotonic() + grace, False
    while time.monotonic() < deadline and any_left(child):
        if child.returncode is not None and not told:
            told = True
            kill_all(signal.SIGTERM)
        time.sleep(0.02)
    while any_left(child):
        kill_all(signal.SIGKILL)
        time.sleep(0.02)
    for path in segments:
        path.unlink(missing_ok=True)


def any_left(child: subprocess.Popen[bytes]) -> bool:
    """Reap what ended, and say whether a descendant is left: then we have a child, for orphans become ours."""
    try:
        while dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if dead.si_pid == child.pid:
                child.poll()  # keeps its exit code
            else:
                os.waitpid(dead.si_pid, 0)
    except ChildProcessError:
        return False
    return True


def kill_all(sig: int) -> None:
    for pid in list(descendants()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sig)


def descendants(root: int | None = None) -> Iterator[int]:
    """Pids of the living processes beneath this one, nearest first."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                text = (entry / "stat").read_text(errors="replace")
                state, parent = text[text.rindex(")") + 2 :].split()[:2]
                if state not in "ZX":
                    parents.setdefault(int(parent), []).append(int(entry.name))
    queue = parents.get(os.getpid() if root is None else root, [])
    while queue:
        yield from queue
        queue = [child for pid in queue for child in parents.get(pid, [])]


def own_segments() -> set[Path]:
    return {path for pid in descendants() for path in shared_memory(pid)}


def shared_memory(pid: int) -> set[Path]:
    """The files of /dev/shm that `pid` has mapped and that only an engine makes."""
    try:
        text = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return set()
    # By inode: a semaphore's file is renamed after it was mapped.
    inodes = {int(line.split()[4]) for line in text.split("\n") if "/dev/shm/" in line}
    return {path for path in Path("/dev/shm").iterdir() if path.name.startswith(OWN_SEGMENTS) and inode(path) in inodes}


def inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


if __name__ == "__main__":
    raise SystemExit(main())
