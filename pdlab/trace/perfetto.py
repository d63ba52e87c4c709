"""Journeys in the Chrome trace event format, which Perfetto and chrome://tracing open.

One lane an actor and thread; the stages of each request as slices, the steps as instants with their facts, and arrows
where something travels from one process to another.
"""

from collections.abc import Iterable
from typing import Any

from pdlab.trace.event import ACTORS
from pdlab.trace.journey import STAGES, Journey

# What travels: (event where it leaves, event where it arrives).
ARROWS = (("pull.encoded", "pull.received"), ("answer.sent", "answer.received"))


def as_chrome_trace(journeys: Iterable[Journey]) -> dict[str, Any]:
    """{"traceEvents": […]}, times in microseconds."""
    lanes = {actor: number for number, actor in enumerate(ACTORS, start=1)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": actor}}
        for actor, pid in lanes.items()
    ]
    for row, journey in enumerate(journeys):
        events += _slices(journey, row, lanes)
        events += _instants(journey, row, lanes)
        events += _arrows(journey, row, lanes)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _slices(journey: Journey, row: int, lanes: dict[str, int]) -> Iterable[dict[str, Any]]:
    for stage, ((actor, first), (_, _last)) in STAGES.items():
        if stage not in (seconds := journey.seconds):
            continue
        whose = f"{actor} scheduler" if actor in ("P", "D") else actor
        began = journey.of(first, whose)[0]
        yield {
            "ph": "X", "name": stage, "cat": "stage", "pid": lanes[whose], "tid": row, "ts": began.time * 1e6,
            "dur": seconds[stage] * 1e6, "args": {"transfer_id": journey.transfer_id},
        }  # fmt: skip


def _instants(journey: Journey, row: int, lanes: dict[str, int]) -> Iterable[dict[str, Any]]:
    for step in journey.steps:
        yield {
            "ph": "i", "s": "t", "name": f"{step.number} {step.title}", "cat": "step", "pid": lanes[step.actor],
            "tid": row, "ts": (journey.start + step.time) * 1e6, "args": step.facts,
        }  # fmt: skip


def _arrows(journey: Journey, row: int, lanes: dict[str, int]) -> Iterable[dict[str, Any]]:
    for leaves, arrives in ARROWS:
        sent, got = journey.of(leaves), journey.of(arrives)
        if not sent or not got:
            continue
        common = {"name": leaves, "cat": "message", "id": f"{journey.transfer_id}:{leaves}", "tid": row}
        yield {"ph": "s", **common, "pid": lanes[sent[0].actor], "ts": sent[0].time * 1e6}
        yield {"ph": "f", "bp": "e", **common, "pid": lanes[got[0].actor], "ts": got[0].time * 1e6}
