"""One finding, and the little that every check needs to make one."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

GIB = 1024**3
MIB = 1024**2

Status = Literal["ok", "info", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One finding: what was looked at, what was found, what that means, what to do about it."""

    name: str
    status: Status
    found: str
    meaning: str
    remedy: str | None = None


def safely(name: str, look: Callable[[], Check]) -> Check:
    """What `look` finds; where it raises, a warning that says so."""
    try:
        return look()
    except Exception as error:
        return Check(name, "warn", f"{type(error).__name__}: {error}", "This could not be looked at; the rest stands.")


def read_text(path: Path) -> str:
    """The file's text; "" where it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def size(count: float) -> str:
    """Bytes, for reading: 64 KiB, 1.5 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
