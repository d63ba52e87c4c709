"""All journeys of a period."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pdlab.checks import seconds, write
from pdlab.errors import PdlabError
from pdlab.trace.event import Event
from pdlab.trace.journey import Journey
from pdlab.trace.perfetto import as_chrome_trace
from pdlab.trace.reader import Reader


class Trace:
    """The journeys of a period, in the order in which they began; iterate over it, or index it.

    Attributes:
        journeys: each with what the trace keeps of it, which is no text.
        startup: events of no request: registration of memory, the bootstrap server.
        probe_errors: how often a probe of pdlab failed, by its name.
    """

    def __init__(self, journeys: list[Journey], loose: list[Event]) -> None:
        self.journeys = journeys
        self.startup = [event for event in loose if event.name != "probe.failed"]
        self.probe_errors = _probe_errors(loose)
        self._by_transfer = {journey.transfer_id: journey for journey in journeys}

    def __iter__(self) -> Iterator[Journey]:
        return iter(self.journeys)

    def __len__(self) -> int:
        return len(self.journeys)

    def __getitem__(self, index: int) -> Journey:
        return self.journeys[index]

    def of(self, transfer_id: str) -> Journey | None:
        """The journey of that transfer_id; None if it is not in this trace."""
        return self._by_transfer.get(transfer_id)

    def chrome_trace(self) -> dict[str, Any]:
        """For Perfetto (ui.perfetto.dev) and chrome://tracing."""
        return as_chrome_trace(self.journeys)

    def save_chrome_trace(self, path: str | Path) -> Path:
        """Write `chrome_trace()` to a file. PdlabError if it cannot be written there."""
        return write(path, json.dumps(self.chrome_trace(), separators=(",", ":"), default=str).encode())

    def __repr__(self) -> str:
        errors = f", {sum(self.probe_errors.values())} probe errors" if self.probe_errors else ""
        return f"<Trace of {len(self)} journeys{errors}>"


def _probe_errors(events: list[Event]) -> dict[str, int]:
    counts: dict[str, dict[str, int]] = {}  # by probe, by engine: each notes how many it has by then
    for event in events:
        if event.name == "probe.failed":
            engines = counts.setdefault(event.facts["probe"], {})
            engines[event.actor] = max(event.facts["count"], engines.get(event.actor, 0))
    return {probe: sum(engines.values()) for probe, engines in counts.items()}


def read(folder: str | Path, since: float = 0.0) -> Trace:
    """What the processes of a lab wrote into `folder`; of its last 4,000 journeys those that began at `since` or later.

    Args:
        since: by this host's monotonic clock, in seconds. 0: all, also what another host wrote before this one's boot.

    Raises:
        PdlabError: it is no folder, or what lies in it is no trace.
    """
    seconds(since, "since")
    if not isinstance(folder, str | Path):
        raise PdlabError(f"{folder!r} is no folder", "lab.trace_folder is that of a lab")
    reader = Reader(Path(folder))
    reader.poll()
    reader.close()
    names = {transfer: request_id for request_id, transfer in reader.transfer_of.items()}
    journeys = []
    for transfer, events in reader.of_transfer.items():
        journey = Journey(names.get(transfer, ""))
        journey.fill(events, transfer)
        if not since or journey.start >= since:
            journeys.append(journey)
    return Trace(sorted(journeys, key=lambda journey: journey.start), reader.loose)
