"""Holds and the journeys they hold, played back: while a hold stands, a journey shows what it had come to by then."""

import warnings
from typing import NamedTuple

from pdlab.checks import seconds as checked
from pdlab.checks import whole
from pdlab.errors import PdlabError
from pdlab.lab.hold import HeldTooLong, Hold
from pdlab.recorded.codec import Held
from pdlab.trace.event import Event
from pdlab.trace.journey import Journey

# Why a request goes on that was let go (as in pdlab.inside.holds, which not every system can import).
LET_GO = ("released", "given up")


class Stay(NamedTuple):
    """How long a hold had a request: the events at which it began and ended; None: it never did while noted."""

    began: Event
    ended: Event | None

    @property
    def name(self) -> str:
        return str(self.began.facts["hold"])


class Stage:
    """What stands and what is under way in one recorded lab.

    Attributes:
        journeys: all that were sent.
    """

    def __init__(self) -> None:
        self.journeys: list[Journey] = []
        self._standing: set[str] = set()  # names of holds, as the events of their journeys have them
        self._over: set[tuple[str, str]] = set()  # (hold, request_id): this hold has let this one go by itself

    def sent(self, journey: Journey) -> Journey:
        """Remember a journey that is whole."""
        self.journeys.append(journey)
        return journey

    def submitted(self, whole: Journey) -> "RecordedJourney":
        """The same journey as it is seen while holds stand."""
        journey = RecordedJourney(whole, self)
        self.journeys.append(journey)
        journey.refresh()
        return journey

    def hold(self, name: str) -> None:
        """From now on this hold stands."""
        self._standing.add(name)

    def stands(self, name: str) -> bool:
        """Whether this hold was not released yet."""
        return name in self._standing

    def release(self, name: str | None = None) -> None:
        """It stands no more; None: none does. What it held has gone on."""
        self._standing -= {name} if name else self._standing.copy()
        self._go_on()

    def held(self) -> dict[str, str]:
        """What is held now: the point, by transfer_id."""
        return {str(journey.transfer_id): journey.held for journey in self.journeys if journey.held}

    def seen(self, whole: Journey) -> list[Event]:
        """Its events until a hold that stands let it go. What went on beside it meanwhile is among them."""
        stay = self._stay(whole)
        if stay is None:
            return whole.events
        end = whole.events.index(stay.ended or stay.began)
        return whole.events[: end if stay.ended else end + 1]

    def time_passes(self, whole: Journey) -> None:
        """Who waits for a journey waits for holds too that ended by themselves when it was recorded."""
        while (stay := self._stay(whole)) and stay.ended and stay.ended.facts["why"] not in LET_GO:
            self._over.add((stay.name, whole.request_id))
        self._go_on()

    def _go_on(self) -> None:
        for journey in self.journeys:
            journey.refresh()

    def _stay(self, whole: Journey) -> Stay | None:
        """Where it is held now."""
        for place, event in enumerate(whole.events):
            if event.name == "gate.held" and event.facts["hold"] in self._standing:
                later = (e for e in whole.events[place:] if e.name == "gate.released")
                stay = Stay(event, next((e for e in later if e.facts["hold"] == event.facts["hold"]), None))
                if (stay.name, whole.request_id) not in self._over:
                    return stay
        return None


class RecordedJourney(Journey):
    """A journey that was submitted, played back."""

    def __init__(self, whole: Journey, stage: Stage) -> None:
        super().__init__(whole.request_id, about=whole.about, feed=lambda _: self._look())
        self._whole, self._stage = whole, stage

    def wait(self, seconds: float = 60) -> Journey:
        """Return at once, complete; raise at once where a live one would be held for all of `seconds`."""
        checked(seconds)
        self._stage.time_passes(self._whole)
        if not self.done and self.held:
            raise PdlabError(
                f"the journey is not complete after {seconds:g} s; it is held at {self.held}", "see journey.missing"
            )
        self.close()
        return super().wait(0)

    def _look(self) -> None:
        whole, seen = self._whole, self._stage.seen(self._whole)
        self.fill(seen, whole.transfer_id)
        if len(seen) == len(whole.events):
            self.answered(whole.answer if whole.has_text else None, whole.error)
            self.close()


class RecordedHold(Hold):
    """A hold, played back: it holds what it held."""

    def __init__(self, held: Held, stage: Stage) -> None:
        self.point, self.match, self.seconds, self.name = held.point, held.match, held.seconds, held.name
        self._stage = stage
        stage.hold(self.name)

    @property
    def stands(self) -> bool:
        """Whether it was not released yet."""
        return self._stage.stands(self.name)

    @property
    def notes(self) -> list[str]:
        """Why requests went on that it should have held."""
        told = [(e.request_id, e.facts["why"]) for e in self._events() if e.name in ("gate.released", "gate.passed")]
        return [f"{request_id} went on: {why}" for request_id, why in told if why not in LET_GO]

    def wait(self, count: int = 1, seconds: float = 10.0) -> list[str]:
        """Return what it holds; raise at once where that is less than `count` requests."""
        checked(seconds)
        if len(held := self.held) < whole("count", count):
            raise PdlabError(
                f"after {seconds:g} s {self.point} holds {len(held)} requests, not {count}",
                "was one sent that matches, and has it passed this point already?",
            )
        return held

    def release(self) -> None:
        """Let them go. Warns of those that it had to let go before."""
        self._stage.release(self.name)
        for note in self.notes:
            warnings.warn(f"{self.point}: {note}", HeldTooLong, stacklevel=2)

    def _events(self) -> list[Event]:
        events = (event for journey in self._stage.journeys for event in journey.events)
        return [event for event in events if event.name.startswith("gate.") and event.facts.get("hold") == self.name]
