"""The 23 steps of one request through prefill/decode, and by which events each is recognised.

The numbers follow the mechanism, not the clock: P's steps 3-6 and D's 7-13 run side by side.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pdlab.trace.event import Event

Facts = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """Attributes:
    number: 1 to 23.
    actor: who does it.
    event, when: which events are this step.
    title: what it is, without the request's own values.
    and_then: an event that follows, whose facts belong to it too.
    says: the request's own values, in a sentence; the same on every run of the same prompt.
    """

    number: int
    actor: str
    event: str
    title: str
    says: Callable[[Facts], str]
    when: Callable[[Facts], bool] = lambda facts: True
    and_then: str = ""

    @property
    def anchor(self) -> str:
        """Name of its place in vLLM's source (pdlab.source.anchors)."""
        return f"step.{self.number}"


@dataclass(frozen=True)
class Step:
    """One step of one journey. `time` is in seconds since the journey's first event."""

    kind: Kind
    time: float
    thread: str
    facts: Facts

    @property
    def number(self) -> int:
        return self.kind.number

    @property
    def actor(self) -> str:
        return self.kind.actor

    @property
    def title(self) -> str:
        return self.kind.title

    @property
    def anchor(self) -> str:
        return self.kind.anchor

    @property
    def says(self) -> str:
        return self.kind.says(self.facts)

    def as_dict(self) -> dict[str, Any]:
        fields = ("number", "actor", "thread", "time", "title", "says", "anchor", "facts")
        return {field: getattr(self, field) for field in fields}

    def __repr__(self) -> str:
        return f"<step {self.number}, {self.actor}: {self.says}>"


def is_(**wanted: Any) -> Callable[[Facts], bool]:
    return lambda facts: all(facts.get(key) == value for key, value in wanted.items())


def of_blocks(count: int) -> str:
    return "1 block" if count == 1 else f"{count} blocks"


def flag(facts: Facts) -> str:
    return next((f"{key}=True" for key, value in facts["kv_transfer_params"].items() if value is True), "no flag")


def blocks_in(ids: Any) -> int:
    return sum(len(group) for group in ids or ())


def hashed(facts: Facts, key: str = "blocks") -> str:
    rows = facts[key]
    return f"{sum(row[2] for row in rows)} of {of_blocks(len(rows))} hashed"


# fmt: off
KINDS = (
    Kind(1, "proxy", "half.sent", "the proxy sends both halves",
         lambda f: f"{f['role']}: {flag(f)}, max_tokens={f['max_tokens']}, stream={f['stream']}"),
    Kind(2, "P scheduler", "request.added", "P takes its half into the queue",
         lambda f: f"{f['num_prompt_tokens']} prompt tokens, {f['block_hashes']} block hashes, {f['status']}"),
    Kind(2, "D scheduler", "request.added", "D takes its half into the queue",
         lambda f: f"{f['num_prompt_tokens']} prompt tokens, {f['block_hashes']} block hashes, {f['status']}"),
    Kind(3, "P scheduler", "scheduled", "P schedules the whole prompt",
         lambda f: f"{f['num_scheduled_tokens']} tokens scheduled, {f['status']}", lambda f: f["num_scheduled_tokens"] > 0),
    Kind(4, "P worker", "send.recorded", "P's worker expects a pull under the transfer_id",
         lambda f: "an entry in reqs_need_send, not ready" + (": D had made it" if f["before"] else ""), is_(block_ids=[])),
    Kind(5, "P scheduler", "request.finished", "P is finished and keeps the blocks",
         lambda f: f"{f['status']}, {of_blocks(blocks_in(f['block_ids']))}, delay_free_blocks={f['delay_free_blocks']}"),
    Kind(6, "P worker", "send.recorded", "P's worker has the block ids: ready",
         lambda f: f"{of_blocks(blocks_in(f['block_ids']))} to send, ready={f['after'] and f['after']['ready']}", lambda f: bool(f["block_ids"])),
    Kind(7, "D scheduler", "tokens.matched", "D asks the connector what P has",
         lambda f: f"{f['num_computed_tokens']} tokens are here, {f['external_tokens']} to be loaded", is_(load_async=True)),
    Kind(8, "D scheduler", "blocks.allocated", "D allocates blocks, without hashes",
         lambda f: f"{hashed(f)}, reserved_blocks={f['reserved_blocks']}", is_(delay_cache_blocks=True, allocated=True)),
    Kind(9, "D scheduler", "stage.set", "D parks the request",
         lambda f: f"{f['status']}, {f['num_scheduled_tokens']} tokens scheduled, num_computed_tokens={f['num_computed_tokens']}, in {f['queue']}",
         is_(stage="in_progress"), and_then="scheduled"),
    Kind(10, "D scheduler", "metadata.built", "D's scheduler tells its worker to pull",
         lambda f: of_blocks(blocks_in(f["block_ids"])), is_(kind="recv")),
    Kind(11, "D worker", "engine.known", "D's worker knows P's address from an earlier query", lambda f: "no query needed"),
    Kind(11, "D worker", "engine.asked", "D's worker asks the bootstrap server for P's address",
         lambda f: "GET /query: " + ("found" if f["found"] else "not found")),
    Kind(12, "D worker", "pull.encoded", "D's worker sends the pull message",
         lambda f: f"{len(f['fields']['kv_caches_base_addr'])} base addresses, {len(f['fields'])} fields"),
    Kind(13, "P worker", "pull.matched", "P's worker matches it by the transfer_id",
         lambda f: f"{'P' if f['known'] else 'D'} came first" + (", P is ready" if f["ready"] else ", P is not ready yet")),
    Kind(14, "P worker", "transfer.planned", "P's worker plans the transfer",
         lambda f: f"{len(f['regions'])} regions, {of_blocks(sum(blocks_in(r[3]) for r in f['requests']))} each"),
    Kind(15, "P worker", "transfer.written", "a pool thread of P's worker writes into D's memory",
         lambda f: f"{f['bytes']:,} bytes, returned {f['result']}"),
    Kind(16, "P worker", "answer.sent", "P's worker answers D", lambda f: f"{f['status']}, {len(f['ok_reqs'])} ok"),
    Kind(17, "P scheduler", "blocks.freed", "P frees the blocks",
         lambda f: f"{hashed(f)}, {f['free_after'] - f['free_before']} more free"),
    Kind(18, "D worker", "answer.received", "D's worker has P's answer",
         lambda f: f"finished_recving={f['finished_recving']}", is_(ok=True)),
    Kind(19, "D scheduler", "transfer.reported", "D's scheduler hears of it",
         lambda f: f"still {f['status_after']}", is_(way="recving")),
    Kind(20, "D scheduler", "request.promoted", "D promotes the request",
         lambda f: f"{hashed(f)}, num_computed_tokens {f['num_computed_tokens_before']} → {f['num_computed_tokens_after']}"),
    Kind(21, "D scheduler", "scheduled", "D resumes it",
         lambda f: f"{f['num_scheduled_tokens']} token scheduled, {f['status']}", lambda f: f["status"] == "RUNNING" and f["num_scheduled_tokens"] > 0),
    Kind(22, "D scheduler", "token.first", "D has computed the last prompt token, and has the first of the answer",
         lambda f: f"{f['num_output_tokens']} output token, {f['num_computed_tokens']} computed tokens"),
    Kind(23, "D scheduler", "blocks.freed", "D is finished and frees the blocks",
         lambda f: f"{f['status']}, {hashed(f)}"),
)
# fmt: on
NUMBERS = tuple(range(1, 24))


def steps_of(events: Sequence[Event], start: float) -> list[Step]:
    """The steps in `events`, by time; each kind once, at the first event that is it (step 1: one for each half)."""
    found: dict[tuple[int, str, str], Step] = {}
    for position, event in enumerate(events):
        for kind in KINDS:
            if kind.event == event.name and kind.actor == event.actor and kind.when(event.facts):
                key = (kind.number, kind.event, event.actor + str(event.facts.get("role", "")))
                later = None if key in found else _later_facts(kind, events, position)
                if later is not None:
                    found[key] = Step(kind, event.time - start, event.thread, event.facts | later)
    return sorted(found.values(), key=lambda step: step.time)


def _later_facts(kind: Kind, events: Sequence[Event], position: int) -> Facts | None:
    if not kind.and_then:
        return {}
    later = (event for event in events[position:] if event.name == kind.and_then and event.actor == kind.actor)
    return next((event.facts for event in later), None)
