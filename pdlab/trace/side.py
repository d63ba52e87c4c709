"""A journey as one engine saw it: its blocks, its status, its computed tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pdlab.trace.event import Event


class Block(NamedTuple):
    """A row of a block table.

    Attributes:
        logical: its place in the request; block_id: the physical block behind it.
        tokens: how many of the prompt's tokens are in it.
        hashed: whether it is in the prefix cache; ref_count: of the `KVCacheBlock`.
    """

    logical: int
    block_id: int
    tokens: int
    hashed: bool
    ref_count: int


class Moment(NamedTuple):
    """The request's state from `time` (seconds since the journey's first event) on.

    Attributes:
        status: name of its `RequestStatus`; queue: of the scheduler, that holds it.
        computed_tokens: its num_computed_tokens; scheduled_tokens: for it, in that step.
        steps_before, tokens_of_others_before: scheduler steps since the last moment, and tokens of others in them.
    """

    time: float
    status: str
    queue: str | None
    computed_tokens: int
    scheduled_tokens: int
    steps_before: int = 0
    tokens_of_others_before: int = 0


@dataclass(frozen=True)
class Side:
    """One half of a journey.

    Attributes:
        name: "P" or "D".
        request_id: the engine's internal one; None if it never had the request.
        moments: its state over time.
        tables: its block table, each time it was noted: (time, rows).
    """

    name: str
    request_id: str | None
    prompt_tokens: int
    moments: Sequence[Moment]
    tables: Sequence[tuple[float, list[Block]]]

    @property
    def blocks(self) -> list[Block]:
        """The block table as it was last while the request had it; empty if it never had any."""
        return self.tables[-1][1] if self.tables else []

    @property
    def block_ids(self) -> list[int]:
        return [block.block_id for block in self.blocks]

    @property
    def prompt_tokens_computed(self) -> int:
        """How many of the prompt's tokens this engine computed itself, as its scheduler gave them out."""
        return sum(moment.scheduled_tokens for moment in self.moments if moment.computed_tokens <= self.prompt_tokens)

    @property
    def status(self) -> list[tuple[float, str]]:
        """(time, status) at each change."""
        return _changes([(moment.time, moment.status) for moment in self.moments])

    @property
    def computed_tokens(self) -> list[tuple[float, int]]:
        """(time, num_computed_tokens) at each change."""
        return _changes([(moment.time, moment.computed_tokens) for moment in self.moments])

    def __repr__(self) -> str:
        status = self.moments[-1].status if self.moments else "no event"
        return f"<{self.name}: {status}, blocks {self.block_ids}>"


def _changes(rows: list[tuple[float, Any]]) -> list[tuple[float, Any]]:
    return [row for before, row in zip([None, *rows], rows, strict=False) if before is None or before[1] != row[1]]


def side_of(name: str, events: Sequence[Event], start: float) -> Side:
    """The half of engine "P" or "D" of a journey whose events these are."""
    mine = [event for event in events if event.actor == f"{name} scheduler"]
    added = next((event for event in mine if event.name == "request.added"), None)
    tokens = added.facts["num_prompt_tokens"] if added else 0
    moments: list[Moment] = []
    for event in mine:
        moment = _moment(event, event.time - start, moments[-1] if moments else None)
        moments += [moment] if moment else []
    size = _block_size(mine, tokens)
    noted = [
        event for event in mine if event.name in ("blocks.allocated", "request.promoted") and event.facts["blocks"]
    ]
    tables = [(event.time - start, _rows(event.facts["blocks"], tokens, size)) for event in noted]
    return Side(name, added.request_id if added else None, tokens, moments, tables)


def _moment(event: Event, time: float, last: Moment | None) -> Moment | None:
    facts, queue, computed = event.facts, last and last.queue, last.computed_tokens if last else 0
    if event.name == "request.added":
        return Moment(time, facts["status"], "waiting", 0, 0)
    if event.name == "scheduled":
        return Moment(
            time, facts["status"], facts["queue"], facts["num_computed_tokens"], facts["num_scheduled_tokens"],
            facts["steps_since"], facts["tokens_of_others_since"],
        )  # fmt: skip
    if event.name == "request.promoted":
        return Moment(time, "WAITING", queue, facts["num_computed_tokens_after"], 0)
    if event.name == "request.preempted":
        return Moment(time, "PREEMPTED", "waiting", 0, 0)
    if event.name == "load.failed":
        return Moment(time, last.status if last else "", queue, facts["num_computed_tokens_after"], 0)
    if event.name in ("request.finished", "blocks.freed"):
        return Moment(time, facts["status"], None, facts["num_computed_tokens"], 0)
    if event.name == "request.aborted":
        return Moment(time, facts["status_after"], None, computed, 0)
    return None


def _block_size(events: Sequence[Event], tokens: int) -> int:
    """Tokens a block, as the engine says it in each `request.added`."""
    return next((event.facts["block_size"] for event in events if event.name == "request.added"), max(tokens, 1))


def _rows(rows: list[list[int]], tokens: int, size: int) -> list[Block]:
    return [
        Block(i, block_id, min(size, max(0, tokens - i * size)), bool(has_hash), references)
        for i, (block_id, references, has_hash) in enumerate(rows)
    ]
