"""What every display of something recorded says: when, and on what."""

import functools
from typing import Any


def note(about: dict[str, Any]) -> str:
    """As a `Journey` says it (pdlab.trace.text); notebooks/sanitize.cfg knows it by this form."""
    return f"; recorded {about['when']} on {about['where']}"


def with_note(text: str, said: str) -> str:
    """The display of one thing with its note: within its brackets, where it has such."""
    return f"{text[:-1]}{said}>" if text.endswith(">") else text + said


@functools.cache
def noted(kind: type, said: str) -> Any:
    """The class whose objects are those of `kind`, but that their repr says the note."""

    def shown(self: object) -> str:
        return with_note(super(same, self).__repr__(), said)

    same: Any = type(kind.__name__, (kind,), {"__repr__": shown, "__doc__": kind.__doc__})
    return same
