"""Journeys in the Chrome trace event format, which Perfetto and chrome://tracing open.

One lane an actor and request; the stages of each request as slices, the steps as instants with their values, and arrows
where something travels from one process to another.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from pdlab.trace.event import ACTORS
from pdlab.trace.journey import Journey
from pdlab.trace.steps import Step

# What travels: (event where it leaves, event where it arrives).
ARROWS = (("pull.encoded", "pull.received"), ("answer.sent", "answer.received"))
LANES = {actor: number for number, actor in enumerate(ACTORS, start=1)}


def as_chrome_trace(journeys: Iterable[Journey]) -> dict[str, Any]:
    """{"traceEvents": […]}, times in microseconds since the first of them began."""
    journeys = list(journeys)
    began = min((journey.start for journey in journeys), default=0.0)  # a time below 0 would be dropped
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": actor}}
        for actor, pid in LANES.items()
    ]
    for row, journey in enumerate(journeys, start=1):
        found = (*_slices(journey), *_instants(journey), *_arrows(journey, row))
        # Of two slices that begin together the longer holds the shorter; an arrow hangs on one that is open.
        for event in sorted(found, key=lambda event: (event["ts"], -event.get("dur", 0))):
            events.append({**event, "tid": row, "ts": (event["ts"] - began) * 1e6})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _slices(journey: Journey) -> Iterator[dict[str, Any]]:
    for stage, began, ended in journey.stages():
        yield {
            "ph": "X", "name": stage, "cat": "stage", "pid": LANES[began.actor], "ts": began.time,
            "dur": (ended.time - began.time) * 1e6, "args": {"transfer_id": journey.transfer_id},
        }  # fmt: skip


def _instants(journey: Journey) -> Iterator[dict[str, Any]]:
    for step in journey.steps:
        yield {
            "ph": "i", "s": "t", "name": f"{step.number} {step.title}", "cat": "step", "pid": LANES[step.actor],
            "ts": journey.start + step.time, "args": _args(step),
        }  # fmt: skip


def _args(step: Step) -> dict[str, Any]:
    """What it did and its small values: a message or a plan holds those of all requests in it."""
    small = {key: value for key, value in step.facts.items() if isinstance(value, str | int | float | None)}
    return {"says": step.says, **small}


def _arrows(journey: Journey, row: int) -> Iterator[dict[str, Any]]:
    for number, names in enumerate(ARROWS):
        ends = [event for name in names for event in journey.of(name)[:1]]
        for phase, event in zip("sf", ends, strict=True) if len(ends) == 2 else ():
            end = {"cat": "message", "pid": LANES[event.actor], "ts": event.time}
            yield {**end, "ph": "X", "name": event.name, "dur": 1.0}
            yield {**end, "ph": phase, "bp": "e", "name": names[0], "id": row * len(ARROWS) + number}
