"""A recorded trace of 11 requests on two real engines, and what other traces are made of it."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from pdlab.trace.event import Event, read_line
from pdlab.trace.journey import Journey
from pdlab.trace.trace import Trace, read
from pdlab.trace.writer import header
from tests.helpers import RECORDED

TRACE = RECORDED / "trace"
JOURNEYS = RECORDED / "journeys"
# Its journeys: a prompt of 143 tokens; another, twice, so that D had four of its blocks the second time; one that was
# held before the write; one whose half for D was held, so that P came first; six at once, in three messages. A twelfth
# request, which the proxy refused, left no event.
WHOLE, BEFORE_HIT, HIT, HELD, P_FIRST = range(5)
AT_ONCE = range(5, 11)
EVERY = range(11)
LAYERS, BLOCK_LEN = 30, 49_152  # float32: 3 KV heads × 32 tokens × (64 + 64) values × 4 bytes


@cache
def recorded_trace() -> Trace:
    return read(TRACE)


def recorded_journey(index: int) -> Journey:
    """A journey of the trace, as if it alone were known."""
    journey = recorded_trace()[index]
    return journey_of(journey.events, journey)


def journey_of(events: list[Event], like: Journey) -> Journey:
    """The journey `like`, if there were no other events of it than these."""
    return Journey(like.request_id, events, transfer_id=like.transfer_id)


def saved(name: str) -> Journey:
    """A recorded journey that was saved by itself."""
    return Journey.load(JOURNEYS / f"{name}.json.gz")


def the(name: str, journey: Journey) -> Event:
    """The one event of that name."""
    [event] = journey.of(name)
    return event


def changed(event: Event, **facts: Any) -> Event:
    """The event with some facts as they would be in another case."""
    return replace(event, facts=event.facts | facts)


def lines_of(name: str) -> list[str]:
    """The event lines of a recorded file, without its header."""
    return (TRACE / f"{name}.jsonl").read_text().splitlines(keepends=True)[1:]


def events_of(name: str) -> list[Event]:
    return [read_line(line) for line in lines_of(name)]


def header_line(**other: Any) -> str:
    """The first line of a file of this host, or of another one, or of what is no trace."""
    return json.dumps(header({"side": "P", "process": "engine-P", "pid": 7}) | other) + "\n"


def copies(folder: Path, count: int) -> None:
    """Write a trace of `count` requests: the first recorded one, under other ids and 2 s after each other."""
    transfer = recorded_trace()[WHOLE].transfer_id
    assert transfer is not None
    for name in ("engine-P", "engine-D", "proxy"):
        mine = [line for line in lines_of(name) if transfer in line]
        with (folder / f"{name}.jsonl").open("w") as file:
            file.write(header_line())
            for number in range(count):
                for line in mine:
                    event = read_line(line.replace(transfer, f"xfer-{number}")).later(2.0 * number)
                    file.write(replace(event, request_id=f"{event.request_id}-{number}").as_line() + "\n")
