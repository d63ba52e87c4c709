"""A live lab whose calls are noted, each with what came of it, and kept on a tape.

The tape is written after every call and once more at the interpreter's end: a journey that was submitted fills up
later, and whatever kills a notebook's kernel takes no more than the call under way.
"""

import atexit
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

from pdlab.errors import PdlabError
from pdlab.lab.lab import Lab
from pdlab.recorded.calls import Arguments, named
from pdlab.recorded.codec import Encoder, Made
from pdlab.recorded.machine import about
from pdlab.recorded.tape import Call, Tape, path_of

INSTANCE = (
    "bootstrap_query",
    "metric",
    "complete",
    "kv",
    "kv_digests",
    "reset_prefix_cache",
    "usage",
    "alive",
    "healthy",
    "__repr__",
)
# What is noted, by the path before its name; all else goes to the live object, and is not on the tape.
NOTED = {
    "": (
        "send",
        "submit",
        "trace",
        "hold",
        "compare",
        "reset",
        "heal",
        "usage",
        "fault",
        "status",
        "processes",
        "__repr__",
    ),
    "prefill.": INSTANCE,
    "decode.": INSTANCE,
    "proxy.": ("alive", "__repr__"),
    "compare().": ("rewritten",),
}
FILLS_UP = "submit"  # after it has returned its result
PARTS = ("prefill", "decode", "proxy")
# What a player has without anybody having asked for it: what does not change, and what a reader looks at first.
CONSTANT = {
    "": ("name", "settings"),
    "prefill.": ("role", "url", "bootstrap", "command", "facts"),
    "decode.": ("role", "url", "bootstrap", "command", "facts"),
    "proxy.": ("url",),
}
SPARE = {
    "": ("status", "processes", "usage", "__repr__"),
    "prefill.": ("bootstrap_query", "usage", "alive", "healthy", "__repr__"),
    "decode.": ("usage", "alive", "healthy", "__repr__"),
    "proxy.": ("alive", "__repr__"),
}


class Recorder:
    """The calls of one run, as far as they were made.

    Args:
        path: of the tape.
        said: what the tape says of itself.
    """

    def __init__(self, path: Path, said: dict[str, Any]) -> None:
        self.path, self.about = path, said
        self.calls: list[Call] = []  # journeys that fill up, and errors, which have one, are not encoded yet
        self._encoder, self._lock = Encoder(), threading.RLock()

    def take(self, lab: Lab, name: str = "default") -> "Recording":
        """The lab, with its calls noted from here on.

        Args:
            name: of the lab.
        """
        place = self.note(Call("up", None, {} if name == "default" else {"name": name}, Made("lab")))
        recording = Recording(lab, self, place)
        recording.note_all()
        self.keep()
        return recording

    def note(self, call: Call) -> int:
        """Add a call; return its index.

        Raises:
            PdlabError: what it returned cannot be recorded.
        """
        with self._lock:
            result = call.result if call.path == FILLS_UP else self._encoder.encode(call.result)
            self.calls.append(replace(call, result=result))
            return len(self.calls) - 1

    def keep(self) -> Path:
        """Write the tape, with all journeys as they are now."""
        with self._lock:
            calls = [replace(call, error=self._encoder.encode(call.error)) for call in self.calls]
            for call in calls:
                if call.path == FILLS_UP:
                    call.result = self._encoder.encode(call.result)
            return Tape(self.about, calls, self._encoder.pool).save(self.path)


class Recording:
    """A live object whose calls are noted; what it is else, it is as before.

    Args:
        live: a `Lab`, an `Instance`, a `ProxyServer` or a `Comparison`.
        of, path: as in `pdlab.recorded.tape.Call`; `path` ends where the call's name begins.
    """

    def __init__(self, live: Any, recorder: Recorder, of: int, path: str = "") -> None:
        self._live, self._recorder, self._of, self._path = live, recorder, of, path

    def keep(self) -> Path:
        """Write the tape now; see `Recorder.keep`."""
        return self._recorder.keep()

    def note_all(self) -> None:
        """Note what does not change, and what answers readers who look around."""
        for table, spare in ((CONSTANT, False), (SPARE, True)):
            for path, names in table.items():
                owner = getattr(self._live, path[:-1]) if path else self._live
                for name in names:
                    value = getattr(owner, name)
                    value = value() if callable(value) else value
                    self._recorder.note(Call(path + name, self._of, result=value, spare=spare))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of a copy that is being made, or of a display that tries what there is
            raise AttributeError(name)
        value = getattr(self._live, name)
        if not self._path and name in PARTS:
            return Recording(value, self._recorder, self._of, f"{name}.")
        if name not in NOTED[self._path]:
            return value
        return wraps(value)(partial(self._call, name, value)) if callable(value) else self._noted(name, {}, value)

    def _call(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        arguments = named(method, args, kwargs)
        try:
            result = method(*args, **kwargs)
        except PdlabError as error:
            self._noted(name, arguments, error=error)
            raise
        return self._noted(name, arguments, result)

    def _noted(self, name: str, arguments: Arguments, result: Any = None, error: PdlabError | None = None) -> Any:
        """Note a call; return its result, or a recording of it."""
        beneath = f"{name}()."
        place = self._recorder.note(Call(self._path + name, self._of, arguments, result, error))
        self._recorder.keep()
        return Recording(result, self._recorder, place, beneath) if beneath in NOTED and error is None else result

    def __enter__(self) -> "Recording":
        return self

    def __exit__(self, *_: object) -> None:
        self._live.down()

    def __repr__(self) -> str:
        text = repr(self._live)
        return self._noted("__repr__", {}, text) if "__repr__" in NOTED[self._path] else text

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """So that isinstance says of it what it says of the live object."""
        return type(self._live)

    def __dir__(self) -> list[str]:
        return sorted({*dir(self._live), "keep"})


_recorders: dict[Path, Recorder] = {}
_last: list[str] = ["journey"]


def record(lab: Lab, run: str | None, name: str) -> Recording:
    """The lab, with a tape that takes up its calls.

    Args:
        run: the tape's name; None: the last one's.
        name: of the lab.
    """
    _last[0] = run or _last[0]
    path = path_of(_last[0])
    if path not in _recorders:
        _recorders[path] = Recorder(path, about(lab))
        atexit.register(_recorders[path].keep)
    return _recorders[path].take(lab, name)
