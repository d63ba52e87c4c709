"""What set-up says on screen. It goes to standard error: standard output belongs to the command that follows."""

import shutil
import sys
import time
from typing import TextIO

from pdlab.errors import PdlabError

PLAIN_INTERVAL = 15.0  # seconds between two signs of life where the screen is not a terminal


class SetupError(PdlabError):
    """Set-up can't go on. Its text is one line: what is wrong and what to do about it."""


CLEAR = "\r\x1b[K"  # back to the start of the terminal's line, and the rest of it blank


def say(line: str) -> None:
    """Print one line, in place of a step's line that was being rewritten."""
    print(f"{CLEAR if sys.stderr.isatty() else ''}pdlab: {line}", file=sys.stderr, flush=True)


class Progress:
    """One step: its title, how far it is, its seconds. A terminal gets one line that is rewritten."""

    def __init__(self, title: str, stream: TextIO | None = None) -> None:
        self.title = title
        self.stream = stream or sys.stderr
        self.live = self.stream.isatty()
        self.start = self.shown = time.monotonic()
        if not self.live:
            self._line(self.title)

    @property
    def seconds(self) -> float:
        """Seconds since the step began."""
        return time.monotonic() - self.start

    def update(self, note: str = "") -> None:
        """Show that the step is still at work, and `note`: how far it is."""
        text = f"{self.title} … {self.seconds:.0f} s" + (f", {note}" if note else "")
        if self.live:
            # Cut to the terminal's width: a line that wraps can't be rewritten.
            self.stream.write(CLEAR + f"pdlab: {text}"[: shutil.get_terminal_size().columns - 1])
            self.stream.flush()
        elif time.monotonic() - self.shown >= PLAIN_INTERVAL:
            self.shown = time.monotonic()
            self._line(text)

    def end(self, note: str = "done") -> None:
        """Close the step's line."""
        start = CLEAR if self.live else ""
        self._line(f"{self.title}: {note} ({self.seconds:.0f} s)", start)

    def _line(self, text: str, start: str = "") -> None:
        self.stream.write(f"{start}pdlab: {text}\n")
        self.stream.flush()
