"""Gates: points at which matching requests wait while a reader holds them there.

A hold is a file, so that nothing listens and any process can see it: `POINT.ID.json` in the lab's folder, with the
match and a deadline, locked by its holder for as long as that lives. It ends when the file goes, when its deadline
passes, or when its holder dies. Standard library only: engines, proxy and notebook share it.
"""

import contextlib
import fcntl
import json
import os
import re
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

LIMIT = 8  # requests held at once at one point of a process; P has 10 sender threads
LOOK = 0.02  # seconds between two looks at a hold
RELEASED, GIVEN_UP = "released", "given up"  # why a request waits no more: its holder let it go; it was cancelled
# vLLM's internal ids: the X-Request-Id between a prefix and 8 random hex digits; in a completion's, the number of the
# prompt stands before these.
INTERNAL_ID = re.compile(r"(?:cmpl-(.+)-\d+|chatcmpl-(.+))-[0-9a-f]{8}")


@dataclass(frozen=True)
class Hold:
    """A hold as its file says it.

    Attributes:
        point: one of POINTS.
        match: a glob pattern for request ids.
        deadline: by this host's monotonic clock, in seconds.
    """

    path: Path
    point: str
    match: str
    deadline: float

    def takes(self, request_id: str) -> bool:
        """Whether it is for the request of this internal id, X-Request-Id or transfer_id."""
        internal = INTERNAL_ID.fullmatch(request_id)
        names = [request_id, *(name for name in (internal.groups() if internal else ()) if name)]
        return any(fnmatchcase(name, self.match) for name in names)

    def over(self) -> str | None:
        """Why it holds no longer; None while it does."""
        if time.monotonic() > self.deadline:
            return "its time was up"
        try:
            with self.path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return RELEASED
        except BlockingIOError:  # its holder lives
            return None
        except OSError as error:  # no request waits for what nobody can see
            return f"its file cannot be read ({error.strerror})"
        return "its holder died"


def find(folder: Path, point: str, request_id: str) -> Hold | None:
    """The hold that takes this request at this point now."""
    return next((hold for hold in holds(folder, point) if hold.takes(request_id) and hold.over() is None), None)


def holds(folder: Path, point: str = "*") -> Iterator[Hold]:
    """Every hold at `point`, over or not."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):  # noqa: PTH208  # in the engines' path: a Path for each would cost more
            if name.endswith(".json") and (point == "*" or name.startswith(f"{point}.")):
                with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
                    fields = json.loads((folder / name).read_text())
                    match, deadline = str(fields["match"]), float(fields["deadline"])
                    yield Hold(folder / name, name.partition(".")[0], match, deadline)


class Holder:
    """One's own hold: it stands from here until `release`, or until this process ends."""

    def __init__(self, folder: Path, point: str, match: str, seconds: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{point}.{uuid.uuid4().hex[:8]}.json"
        self.hold = Hold(path, point, match, time.monotonic() + seconds)
        draft = path.with_suffix(".tmp")
        self._file = draft.open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        json.dump({"match": match, "deadline": self.hold.deadline}, self._file)
        self._file.flush()
        draft.rename(path)

    def release(self) -> None:
        self.hold.path.unlink(missing_ok=True)
        self._file.close()


def release_all(folder: Path) -> None:
    """End every hold in `folder`, whoever holds it."""
    for hold in list(holds(folder)):
        hold.path.unlink(missing_ok=True)
