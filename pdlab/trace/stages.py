"""The stages of a journey: what its time went into."""

import math
from collections.abc import Iterator, Sequence

from pdlab.trace.event import Event

# From the first event of the one name to the first after it of the other. "P" and "D" stand
# for their schedulers.
STAGES = {
    "wait for P to schedule it": (("P", "request.added"), ("P", "scheduled")),
    "P computes the prompt": (("P", "scheduled"), ("P", "token.first")),
    "P gets ready to send": (("P", "request.finished"), ("P worker", "transfer.planned")),
    "D waits for the KV": (("D", "metadata.built"), ("D", "request.promoted")),
    "P writes": (("P worker", "transfer.started"), ("P worker", "transfer.written")),
    "D hears of it": (("P worker", "transfer.written"), ("D", "request.promoted")),
    "D computes the last prompt token": (("D", "request.promoted"), ("D", "token.first")),
    "time to first token": (("proxy", "half.sent"), ("D", "token.first")),
    "D decodes": (("D", "token.first"), ("D", "request.finished")),
    "P keeps the blocks after its answer": (("P", "request.finished"), ("P", "blocks.freed")),
}


def stages_of(events: Sequence[Event]) -> Iterator[tuple[str, Event, Event]]:
    """The stages that have ended: each with the events, of `events` by time, at which it began and ended."""
    for stage, (first, last) in STAGES.items():
        began = _first(events, *first)
        ended = began and _first(events, *last, after=began.time)
        if began and ended:
            yield stage, began, ended


def _first(events: Sequence[Event], actor: str, name: str, after: float = -math.inf) -> Event | None:
    whose = f"{actor} scheduler" if actor in ("P", "D") else actor
    return next((e for e in events if e.name == name and e.actor == whose and e.time >= after), None)
