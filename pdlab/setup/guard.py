"""One set-up at a time."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pdlab.setup.console import say


@contextmanager
def guard(file: Path, waiting: str) -> Iterator[int]:
    """Hold the lock file `file`; while another process holds it, say `waiting` and wait. Gives its descriptor."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(waiting)
            fcntl.flock(held, fcntl.LOCK_EX)
        yield held.fileno()
