"""What a reader gave, or one line that says what it should have been. Shared by the calls of a notebook."""

import errno
import os
import reprlib
from operator import index
from pathlib import Path
from typing import Any, TypeVar

from pdlab.errors import PdlabError

Kind = TypeVar("Kind")


def of_kind(value: Any, kind: type[Kind], hint: str) -> Kind:
    """The value, which is one of `kind`. PdlabError with this hint if it is not."""
    if not isinstance(value, kind):
        raise PdlabError(f"this is no {kind.__name__} but {reprlib.repr(value)}", hint)
    return value


def whole(name: str, value: Any, least: int = 0) -> int:
    """A whole number of at least `least`; numpy's too. PdlabError if it is none."""
    try:
        if not isinstance(value, bool) and (number := index(value)) >= least:
            return number
    except TypeError:
        pass
    raise PdlabError(f"{name} is {reprlib.repr(value)}", f"give a whole number, at least {least}")


def wholes(name: str, values: Any) -> list[int]:
    """A list of whole numbers. PdlabError if it is none."""
    if not isinstance(values, list | tuple | range):
        raise PdlabError(f"{name} is {reprlib.repr(values)}", "give a list of whole numbers")
    return [whole(f"one of {name}", value) for value in values]


def seconds(value: Any, name: str = "seconds") -> float:
    """A time in seconds. PdlabError if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise PdlabError(f"{name} is {reprlib.repr(value)}", "give a number of seconds")
    return value


def write(path: str | os.PathLike[str], data: bytes) -> Path:
    """Write a file. PdlabError if it cannot be written there."""
    try:
        Path(path).write_bytes(data)
    except (OSError, TypeError, ValueError) as error:
        raise PdlabError(f"cannot write {reprlib.repr(path)} ({error})", "give the path of a file") from None
    return Path(path)


def make_folder(path: Path, what: str) -> Path:
    """Make a folder under $PDLAB_STATE, for `what`; it may be there. PdlabError if nothing can be written there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    except OSError as error:
        raise PdlabError(f"cannot make a folder for {what} ({error})", "PDLAB_STATE says where: set it") from None
    return path
