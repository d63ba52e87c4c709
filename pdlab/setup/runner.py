"""Running a command whose output goes to a log file, while one line on screen says how far it is; one at a time."""

import fcntl
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pdlab.setup.console import Progress, say

TICK = 0.2  # seconds between two looks at a running command


@dataclass(frozen=True)
class Result:
    """How a command ended, and what it printed."""

    code: int
    output: str

    @property
    def error(self) -> str:
        """Its last error line, else its last line; "" if it exited 0."""
        if self.code == 0:
            return ""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        marked = [line.removeprefix("ERROR: ") for line in lines if line.startswith(("ERROR: ", "E: "))]
        return (marked or lines or [f"exit status {self.code}"])[-1]


def run(
    command: Sequence[str],
    log: Path,
    progress: Progress,
    note: Callable[[str], str] = lambda output: "",
    env: Mapping[str, str] | None = None,
) -> Result:
    """Run `command` to its end, its output appended to `log`; `note` turns what it printed so far into progress."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        start = out.tell()
        # close_fds: the command holds our lock too. Killing pdlab alone doesn't open it under a pip still at work.
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, close_fds=False)
        try:
            while process.poll() is None:
                progress.update(note(_since(log, start)))
                with suppress(subprocess.TimeoutExpired):
                    process.wait(TICK)
        finally:
            process.terminate()  # left behind by Ctrl-C; nothing where it has ended
            process.wait()
    return Result(process.returncode, _since(log, start))


def _since(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")


@contextmanager
def guard(file: Path, waiting: str) -> Iterator[None]:
    """Hold the lock file `file`; while another process holds it, say `waiting` and wait."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as held:
        os.set_inheritable(held.fileno(), True)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(waiting)
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
