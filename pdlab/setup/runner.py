"""Running a command whose output goes to a log file, while one line on screen says how far it is."""

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pdlab.setup.console import Progress

TICK = 0.2  # seconds between two looks at a running command


@dataclass(frozen=True)
class Result:
    """How a command ended, and what it printed."""

    code: int
    output: str

    @property
    def ok(self) -> bool:
        """True if it exited 0."""
        return self.code == 0

    @property
    def error(self) -> str:
        """Its last error line, else its last line."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        marked = [line.removeprefix("ERROR: ") for line in lines if line.startswith(("ERROR: ", "E: "))]
        return (marked or lines or [f"exit status {self.code}"])[-1]


def run(
    command: Sequence[str],
    log: Path,
    progress: Progress,
    note: Callable[[str], str] = lambda output: "",
    env: Mapping[str, str] | None = None,
    held: int | None = None,
) -> Result:
    """Run `command` to its end, its output appended to `log`; `note` turns what it printed so far into progress.

    `held`: a lock's descriptor that the command holds too, so that killing pdlab alone doesn't open the lock under
    an installer that is still at work.
    """
    with log.open("ab") as out:
        start = out.tell()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, pass_fds=() if held is None else (held,)
        )
        try:
            while process.poll() is None:
                progress.update(note(_since(log, start)))
                _wait(process)
        finally:
            _stop(process)
    return Result(process.returncode, _since(log, start))


def _since(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(TICK)
    except subprocess.TimeoutExpired:
        return


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a command that was left behind (Ctrl-C): pip needs a moment to put a half-replaced package back."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
