"""What several test files need."""

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from pdlab.inside.tracer import Tracer
from pdlab.lab import nanny
from pdlab.trace.event import Event, read_line

RECORDED = Path(__file__).parent / "recorded"
PATIENCE = 20.0  # only how long a test that fails takes to fail


def recorded(name: str) -> str:
    """The text of a recorded engine log."""
    return (RECORDED / f"{name}.log").read_text()


def wait_until(condition: Callable[[], object], what: str = "") -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what or condition}"
        time.sleep(0.01)


def wait_for_words(capsys: pytest.CaptureFixture[str], words: str) -> SimpleNamespace:
    """What a thread has printed, `out` and `err`, once `words` are among what it says on stderr."""
    said = SimpleNamespace(out="", err="")

    def there() -> bool:
        new = capsys.readouterr()
        said.out, said.err = said.out + new.out, said.err + new.err
        return words in said.err

    wait_until(there, words)
    return said


def minute_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the time of every hold be up that was to stand for less than a minute from now."""
    monkeypatch.setattr("pdlab.inside.holds.time", SimpleNamespace(monotonic=lambda: time.monotonic() + 60))


def gone(pid: int) -> bool:
    """Whether no living process has this pid (a zombie has died)."""
    return nanny.start_time(pid) is None


def identity(pid: int) -> str:
    """PID:START, as the nanny takes it."""
    return f"{pid}:{nanny.start_time(pid)}"


def read_pid(path: Path) -> int:
    """The pid that a process writes to `path` (whole, with a newline at its end)."""
    wait_until(lambda: path.exists() and path.read_text().endswith("\n"), f"a pid in {path.name}")
    return int(path.read_text())


class Noted:
    """A writer that keeps the events: each as its line said it at once."""

    def __init__(self) -> None:
        self.lines: list[tuple[Event, str]] = []

    def note(self, event: Event) -> None:
        self.lines.append((event, event.as_line()))

    def close(self) -> None:
        # The real one turns events into lines later: they must not have changed since.
        assert [event.as_line() for event, _ in self.lines] == [line for _, line in self.lines]

    @property
    def events(self) -> list[Event]:
        return [read_line(line) for _, line in self.lines]

    @property
    def names(self) -> list[str]:
        return [event.name for event in self.events]

    def named(self, name: str) -> list[Event]:
        return [event for event in self.events if event.name == name]

    def facts(self, name: str) -> dict[str, Any]:
        """The facts of the only event of that name."""
        (event,) = self.named(name)
        return event.facts


def tracer(side: str, folder: Path) -> tuple[Tracer, Noted]:
    """A tracer whose events stay here."""
    trace, noted = Tracer(side, folder), Noted()
    trace.writer.close()
    trace.writer = noted  # type: ignore[assignment]
    return trace, noted


def engine_module() -> Any:
    """tests.engine, which imports vLLM. What that sets in the environment is not for processes of later tests."""
    with mock.patch.dict(os.environ):
        return importlib.import_module("tests.engine")


class Zoo:
    """Processes of a test; `clean` ends whatever is left of them."""

    def __init__(self) -> None:
        self._popens: list[subprocess.Popen[bytes]] = []
        self._others: list[tuple[int, int | None]] = []

    def python(self, code: str, *, isolated: bool = True) -> subprocess.Popen[bytes]:
        """A process of our own that runs `code`."""
        options = ["-I", "-S"] if isolated else []
        return self.run([sys.executable, *options, "-c", code])

    def run(self, argv: list[str]) -> subprocess.Popen[bytes]:
        started = subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True)
        self._popens.append(started)
        return started

    def watch(self, pid: int) -> int:
        """Have a process that is not a child of ours cleaned away too."""
        self._others.append((pid, nanny.start_time(pid)))
        return pid

    def clean(self) -> None:
        for started in self._popens:
            started.kill()
            started.wait()
        for pid, start in self._others:
            if start is not None and nanny.start_time(pid) == start:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
