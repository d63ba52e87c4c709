"""One event: what one probe saw, in one process, at one moment."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

SCHEMA = 1
ACTORS = ("proxy", "P scheduler", "P worker", "D scheduler", "D worker")


@dataclass(frozen=True, slots=True)
class Event:
    """Attributes:
    time: seconds by the monotonic clock of this host (of another host: aligned by both wall clocks).
    name: of the event, as pdlab.inside.probes lists them.
    actor: one of ACTORS.
    thread: name of the thread that ran it.
    transfers: the transfer_ids it is about; several where vLLM handles several requests in one message or call.
    request_id: the internal one of the engine (in the proxy: the X-Request-Id); None where the event has several.
    facts: small values, copied when it happened. Never prompt text or token ids.
    """

    time: float
    name: str
    actor: str
    thread: str
    transfers: tuple[str, ...] = ()
    request_id: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def as_line(self) -> str:
        """The event as one line of JSON."""
        fields = [self.time, self.name, self.actor, self.thread, self.transfers, self.request_id, self.facts]
        return json.dumps(fields, separators=(",", ":"), default=str)

    def later(self, seconds: float) -> "Event":
        """The same event on a clock that is `seconds` ahead."""
        return replace(self, time=self.time + seconds) if seconds else self


def read_line(line: str) -> Event:
    """The event of a line that `Event.as_line` wrote. ValueError if it is none."""
    time, name, actor, thread, transfers, request_id, facts = json.loads(line)
    return Event(time, name, actor, thread, tuple(transfers), request_id, facts)


def own_of(events: Sequence[Event]) -> list[Event]:
    """Without what the schedulers noted of other requests under the same transfer_id.

    There is one where D has not served its half: D's API server then submits another, which is aborted at once, so that
    its worker has P's blocks freed (`AsyncLLM.notify_kv_transfer_request_rejected`). Each engine gives it an id.
    """
    added = [event for event in events if event.name == "request.added"]
    notices = {event.request_id for event in added if event.facts.get("abort_immediately")}
    first = {e.actor: e.request_id for e in reversed(added) if e.request_id not in notices}

    def own(event: Event) -> bool:
        ours = first.get(event.actor, event.request_id)
        return event.request_id not in notices and event.request_id in (None, ours)

    return [event for event in events if not event.actor.endswith("scheduler") or own(event)]


def by_time(events: Sequence[Event]) -> list[Event]:
    return sorted(events, key=lambda event: event.time)
