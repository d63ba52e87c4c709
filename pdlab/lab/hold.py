"""`with lab.hold("before_write"):` stops matching requests at that point, until the block is left."""

import time
import warnings
from pathlib import Path

from pdlab.checks import seconds as checked
from pdlab.checks import whole
from pdlab.errors import PdlabError
from pdlab.trace.event import Event
from pdlab.trace.reader import Reader

# While P writes, nothing expires on P, and D waits for its answer 60 s longer than P would keep the blocks.
PATIENT = ("before_write", "before_answer")
PATIENT_SECONDS = 60.0
MARGIN = 3.0  # seconds before an engine's own timeout


class HeldTooLong(UserWarning):
    """A hold let a request go by itself."""


class Hold:
    """A hold that stands; made by `Lab.hold`.

    Attributes:
        point: where it holds; match: which request ids (a glob pattern); seconds: how long at most.
    """

    def __init__(self, folder: Path, point: str, match: str, seconds: float) -> None:
        from pdlab.inside.holds import Holder  # locks files, which not every system can that plays recorded runs

        if not isinstance(match, str) or not match:
            raise PdlabError(f"a hold cannot match {match!r}", "give a request id, or a pattern: * stands for anything")
        self.point, self.match, self.seconds = point, match, seconds
        self._reader = Reader(folder, from_now=True)
        self._holder = Holder(folder / "gates", point, match, seconds)
        self.name = self._holder.hold.path.stem

    @property
    def stands(self) -> bool:
        """Whether it holds who comes: it was not released, and its time is not up."""
        return self._holder.hold.over() is None

    @property
    def held(self) -> list[str]:
        """The request ids that it holds now, as the process that holds them knows them."""
        events = self._events()
        gone = {event.transfers for event in events if event.name == "gate.released"}
        return [str(e.request_id) for e in events if e.name == "gate.held" and e.transfers not in gone]

    @property
    def notes(self) -> list[str]:
        """Why requests went on that it should have held: its time was up, or it held as many as it may."""
        from pdlab.inside.holds import GIVEN_UP, RELEASED

        events = [e for e in self._events() if e.name in ("gate.released", "gate.passed")]
        told = [(e.request_id, e.facts["why"]) for e in events]
        return [f"{request_id} went on: {why}" for request_id, why in told if why not in (RELEASED, GIVEN_UP)]

    def wait(self, count: int = 1, seconds: float = 10.0) -> list[str]:
        """Return what it holds, once that is `count` requests.

        Raises:
            PdlabError: it does not come to that in `seconds`.
        """
        deadline = time.monotonic() + checked(seconds)
        whole("count", count)
        while len(held := self.held) < count:
            if time.monotonic() > deadline:
                raise PdlabError(
                    f"after {seconds:g} s {self.point} holds {len(held)} requests, not {count}",
                    "was one sent that matches, and has it passed this point already?",
                )
            time.sleep(0.01)
        return held

    def release(self) -> None:
        """Let them go. Warns of those that it had to let go before."""
        self._holder.release()
        for note in self.notes:
            warnings.warn(f"{self.point}: {note}", HeldTooLong, stacklevel=2)

    def _events(self) -> list[Event]:
        self._reader.poll()
        events = (event for events in list(self._reader.of_transfer.values()) for event in list(events))
        return [event for event in events if event.name.startswith("gate.") and event.facts["hold"] == self.name]

    def __enter__(self) -> "Hold":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<hold {self.point}: {len(self.held)} held>"


def seconds_for(point: str, asked: float | None, abort_timeout: int) -> float:
    """How long a hold at `point` may stand: as asked, or so long that no engine gives the request up.

    Raises:
        PdlabError: there is no such point, or the time is none.
    """
    from pdlab.inside.points import POINTS

    if not isinstance(point, str) or point not in POINTS:
        raise PdlabError(f"there is no gate {point!r}", f"choose one of {', '.join(POINTS)}")
    if asked is None:
        return PATIENT_SECONDS if point in PATIENT else max(1.0, abort_timeout - MARGIN)
    if not isinstance(asked, int | float) or not 0 < asked <= 3600:
        raise PdlabError(f"a hold cannot last {asked!r} s", "give seconds, more than 0 and at most 3600")
    return float(asked)
