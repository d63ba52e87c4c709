"""The journey of one request: what happened to it in the proxy, in P and in D, as one object."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pdlab.checks import seconds as checked
from pdlab.checks import whole
from pdlab.errors import PdlabError
from pdlab.trace.answer import Answer
from pdlab.trace.event import ACTORS, SCHEMA, Event, by_time, own_of
from pdlab.trace.failure import failure_of
from pdlab.trace.kept import load, made_of, save
from pdlab.trace.side import Side, side_of
from pdlab.trace.stages import stages_of
from pdlab.trace.steps import KINDS, NUMBERS, Step, steps_of
from pdlab.trace.writes import Write, length_of, writes_of


class Journey:
    """One request through five actors: the proxy, P's scheduler and worker, D's scheduler and worker.

    It is made of the events that carry its transfer_id (request ids differ between the engines: each adds a suffix of
    its own), and lives with what there is of them: a half that is missing is said to be missing.

    A journey that is under way fills up: each look at it takes in what has happened since.

    Attributes:
        request_id: the X-Request-Id.
        about: empty for a live one; of a recorded one: where and when it was recorded, and with what.
    """

    def __init__(
        self,
        request_id: str,
        events: Sequence[Event] = (),
        *,
        transfer_id: str | None = None,
        answer: Answer | None = None,
        error: Exception | None = None,
        about: dict[str, Any] | None = None,
        feed: Callable[["Journey"], None] | None = None,
    ) -> None:
        self.request_id, self.about = request_id, about or {}
        self._events, self._transfer_id, self._answer, self.error = by_time(events), transfer_id, answer, error
        self._feed, self._filling = feed, threading.Lock()
        self._kept: dict[str, Any] = {}  # what was made of these events

    # What it is made of -------------------------------------------------------------------------------------------

    @property
    def events(self) -> list[Event]:
        """Everything noted of it so far, by time."""
        self.refresh()
        return self._events

    def refresh(self) -> None:
        """Take in what has happened since."""
        if self._feed is not None:
            self._feed(self)

    def fill(self, events: Sequence[Event], transfer_id: str | None) -> None:
        """Give it its events; what was worked out of the former ones is worked out anew. It never gets fewer."""
        with self._filling:
            if len(events) > len(self._events):
                self._events, self._transfer_id = by_time(events), transfer_id
                self._kept = {}

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        """What is made of its events, made once. Views look at a journey while it fills up."""
        kept = self._kept  # asked for first: the events may be newer than it, and not older
        if name not in kept:
            kept[name] = make()
        return kept[name]

    @property
    def fills_up(self) -> bool:
        """Whether more of it may come: it was submitted, and is not complete."""
        return self._feed is not None and not self.complete

    def close(self) -> None:
        """Nothing more will come: it is no longer asked for."""
        self._feed = None

    @property
    def transfer_id(self) -> str | None:
        """What links its two halves; None until the proxy has made it."""
        self.refresh()
        return self._transfer_id

    def of(self, name: str, actor: str | None = None) -> list[Event]:
        """Its events of that name, of one actor or of all; see `own_of`."""
        self.refresh()
        return [event for event in self._own if event.name == name and actor in (None, event.actor)]

    @property
    def _own(self) -> list[Event]:
        own: list[Event] = self._once("own", lambda: own_of(self._events))
        return own

    # What the client got ------------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether the client has its answer, or its error."""
        return self._answer is not None or self.error is not None or self._closed

    @property
    def _closed(self) -> bool:
        """Whether the proxy has done with D's half: of a journey from a trace nothing else is known."""
        return self._feed is None and self._half_of_d == "half.closed"

    @property
    def answer(self) -> Answer:
        """What the client got.

        Raises:
            PdlabError: nothing yet, or an error.
        """
        if self.error is not None:
            raise self.error
        if self._answer is None:
            raise PdlabError("it has no answer yet", "journey.wait() waits for it; a trace keeps no text")
        return self._answer

    def answered(self, answer: Answer | None, error: Exception | None = None) -> None:
        """Tell it what the client got."""
        self._answer, self.error = answer, error

    @property
    def has_text(self) -> bool:
        """Whether the client's answer is known: a trace keeps none."""
        return self._answer is not None

    @property
    def text(self) -> str:
        return self.answer.text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.answer.token_ids

    @property
    def finish_reason(self) -> str:
        return self.answer.finish_reason

    @property
    def prompt_tokens(self) -> int:
        """N, as the client was told, or else as an engine counted them."""
        if self._answer is not None:
            return self._answer.prompt_tokens
        return self.prefill.prompt_tokens or self.decode.prompt_tokens

    # What happened ------------------------------------------------------------------------------------------------

    @property
    def start(self) -> float:
        """When its first event was, by the monotonic clock."""
        return self._events[0].time if self._events else 0.0

    @property
    def steps(self) -> list[Step]:
        """What happened, as the 23 steps of the mechanism, by time."""
        self.refresh()
        steps: list[Step] = self._once("steps", lambda: steps_of(self._own, self.start))
        return steps

    def step(self, number: int) -> Step:
        """The first step of that number. PdlabError if it has not happened."""
        for step in self.steps:
            if step.number == number:
                return step
        raise PdlabError(f"step {number} has not happened", "journey.missing says what has not")

    @property
    def prefill(self) -> Side:
        """P's half."""
        return self._side("P")

    @property
    def decode(self) -> Side:
        """D's half."""
        return self._side("D")

    def _side(self, name: str) -> Side:
        self.refresh()
        side: Side = self._once(name, lambda: side_of(name, self._own, self.start))
        return side

    @property
    def status(self) -> dict[str, list[tuple[float, str]]]:
        """Of both halves over time: {"P": [(seconds, status), …], "D": …}."""
        return {"P": self.prefill.status, "D": self.decode.status}

    @property
    def computed_tokens(self) -> dict[str, list[tuple[float, int]]]:
        """num_computed_tokens of both halves over time."""
        return {"P": self.prefill.computed_tokens, "D": self.decode.computed_tokens}

    @property
    def writes(self) -> list[Write]:
        """The descriptors of its transfer, in vLLM's order: by layer, then by run of consecutive blocks."""
        self.refresh()
        writes: list[Write] = self._once("writes", self._planned)
        return writes

    def _planned(self) -> list[Write]:
        planned = [event for event in self._events if event.name == "transfer.planned"]
        return [write for event in planned for write in writes_of(event, self._transfer_id or "")]

    @property
    def bytes_moved(self) -> int:
        """Bytes of its writes, once they have succeeded."""
        written = any(event.facts["result"] == 0 for event in self.of("transfer.written"))
        return sum(length_of(event, self._transfer_id or "") for event in self.of("transfer.planned")) if written else 0

    @property
    def seconds(self) -> dict[str, float]:
        """How long each of its stages took; stages that it has not ended are left out."""
        return {stage: ended.time - began.time for stage, began, ended in self.stages()}

    def stages(self) -> Iterator[tuple[str, Event, Event]]:
        """The stages that it has ended: each with the events at which it began and ended."""
        self.refresh()
        return stages_of(self._own)

    def summary(self) -> dict[str, Any]:
        """What it came to.

        Returns:
            prompt_tokens, computed_on_prefill, computed_on_decode (tokens of the prompt);
            transfer: regions, blocks, block_bytes, bytes, descriptors, seconds.
        """
        blocks = [block for write in self.writes if write.layer == 0 for block in write.source_blocks]
        return {
            "prompt_tokens": self.prompt_tokens,
            "computed_on_prefill": self.prefill.prompt_tokens_computed,
            "computed_on_decode": self.decode.prompt_tokens_computed,
            "transfer": {
                "regions": len({write.layer for write in self.writes}),
                "blocks": len(blocks),
                "block_bytes": self.writes[0].block_len if self.writes else 0,
                "bytes": self.bytes_moved,
                "descriptors": len(self.writes),
                "seconds": sum(event.facts["seconds"] for event in self.of("transfer.written")),
            },
        }

    @property
    def held(self) -> str | None:
        """The point at which it is held now, of several the last; None where it is not."""
        return self.holding[-1].facts["point"] if self.holding else None

    @property
    def holding(self) -> list[Event]:
        """The events at which it was held, of those that were not followed by its release."""
        held: dict[str, Event] = {}
        for event in self.events:
            if event.name == "gate.held":
                held[event.facts["point"]] = event
            elif event.name == "gate.released":
                held.pop(event.facts["point"], None)
        return list(held.values())

    @property
    def failure(self) -> str | None:
        """In one line which hop failed it, with which status and why; None while it has not failed."""
        return None if self._answer is not None else failure_of(self.error, self.events)

    @property
    def missing(self) -> list[str]:
        """What has not happened, or was not seen; empty for a whole journey."""
        there = {event.actor for event in self.events}
        silent = [f"{actor}: no event" for actor in ACTORS if actor not in there]
        numbers = {step.number for step in self.steps}
        titles = {kind.number: kind.title for kind in KINDS}
        return silent + [f"step {number}: {titles[number]}" for number in NUMBERS if number not in numbers]

    @property
    def complete(self) -> bool:
        """Whether the client has its answer, the proxy has done with D's half, and both engines freed the blocks."""
        freed = all(self.of("blocks.freed", f"{side} scheduler") for side in "PD")
        return self.done and freed and self._half_of_d in (None, "half.closed")

    @property
    def _half_of_d(self) -> str | None:
        """What the proxy noted last of D's half; None: nothing."""
        halves = [e.name for e in self._events if e.actor == "proxy" and e.facts["role"] == "decode"]
        return halves[-1] if halves else None

    def until(self, number: int, seconds: float = 10) -> "Journey":
        """Return when step `number` has happened; the request may be held meanwhile.

        Raises:
            PdlabError: it has not within `seconds`, it is no step, or nothing more will come.
        """
        deadline = time.monotonic() + checked(seconds)
        if whole("number", number, 1) not in NUMBERS:
            raise PdlabError(f"there is no step {number}", f"the steps are {NUMBERS[0]} to {NUMBERS[-1]}")
        while number not in {step.number for step in self.steps}:
            if self._feed is None or time.monotonic() > deadline:
                self.step(number)  # raises
            time.sleep(0.02)
        return self

    def wait(self, seconds: float = 60) -> "Journey":
        """Return when it is complete; without a trace to tell, when the client has its answer.

        Raises:
            PdlabError: the request failed, or `seconds` passed.
        """
        deadline = time.monotonic() + checked(seconds)
        while self.error is None and not self.complete:
            if self.done and self._feed is None:
                break
            if time.monotonic() > deadline:
                held = f"; it is held at {self.held}" if self.held else ""
                raise PdlabError(f"the journey is not complete after {seconds:g} s{held}", "see journey.missing")
            time.sleep(0.02)
        if self.error is not None:
            raise self.error
        return self

    # Keeping it ---------------------------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        return {
            "schema": SCHEMA,
            "about": self.about,
            "request_id": self.request_id,
            "transfer_id": self.transfer_id,
            "answer": vars(self._answer) if self._answer else None,
            "error": None if self.error is None else str(self.error),
            "events": [json.loads(event.as_line()) for event in self.events],
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Journey":
        """The journey that `as_dict` made. PdlabError if it is none, or of another schema."""
        return cls(**made_of(fields))

    def save(self, path: str | Path) -> Path:
        """Write it to a file: JSON, or compressed where the name ends in .gz."""
        return save(self.as_dict(), path)

    @classmethod
    def load(cls, path: str | Path) -> "Journey":
        """The journey that `save` wrote. PdlabError if there is none, or it is of another schema."""
        return cls.from_dict(load(path))

    # Showing it ---------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        from pdlab.trace.text import told

        return told(self)

    def outline(self) -> str:
        """Its steps without times, ids and addresses: the same on every run of the same prompt."""
        from pdlab.trace.text import outline

        return outline(self)

    def __repr__(self) -> str:
        from pdlab.trace.text import line

        return line(self)
