"""What set-up says on screen. It goes to standard error: standard output belongs to the command that follows."""

import shutil
import sys
import time
from typing import Self

from pdlab.errors import PdlabError

PLAIN_INTERVAL = 15.0  # seconds between two signs of life where the screen is not a terminal
CLEAR = "\r\x1b[K"  # back to the start of the terminal's line, and the rest of it blank


class SetupError(PdlabError):
    """Set-up can't go on. Its text is one line: what is wrong and what to do about it."""


def say(line: str) -> None:
    """Print one line, in place of a step's line that was being rewritten."""
    print(f"{CLEAR if sys.stderr.isatty() else ''}pdlab: {line}", file=sys.stderr, flush=True)


class Progress:
    """One step, from `with` to its end: its title, how far it is, its seconds. A terminal gets one rewritten line."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.live = sys.stderr.isatty()
        self.start = self.shown = time.monotonic()
        if not self.live:
            self._write(f"pdlab: {title}\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._write(f"{CLEAR if self.live else ''}pdlab: {self.title}: done ({self._seconds()})\n")

    def update(self, note: str = "") -> None:
        """Show that the step is still at work, and `note`: how far it is."""
        text = f"pdlab: {self.title} … {self._seconds()}" + (f", {note}" if note else "")
        if self.live:
            # Cut to the terminal's width: a line that wraps can't be rewritten.
            self._write(CLEAR + text[: shutil.get_terminal_size().columns - 1])
        elif time.monotonic() - self.shown >= PLAIN_INTERVAL:
            self.shown = time.monotonic()
            self._write(f"{text}\n")

    def _seconds(self) -> str:
        return f"{time.monotonic() - self.start:.0f} s"

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
