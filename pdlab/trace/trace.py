"""All journeys of a period."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
        self.probe_errors = {e.facts["probe"]: e.facts["count"] for e in loose if e.name == "probe.failed"}

    def __iter__(self) -> Iterator[Journey]:
        return iter(self.journeys)

    def __len__(self) -> int:
        return len(self.journeys)

    def __getitem__(self, index: int) -> Journey:
        return self.journeys[index]

    def of(self, transfer_id: str) -> Journey | None:
        """The journey of that transfer_id; None if it is not in this trace."""
        return next((journey for journey in self.journeys if journey.transfer_id == transfer_id), None)

    def chrome_trace(self) -> dict[str, Any]:
        """For Perfetto (ui.perfetto.dev) and chrome://tracing."""
        return as_chrome_trace(self.journeys)

    def save_chrome_trace(self, path: str | Path) -> Path:
        path = Path(path)
        path.write_text(json.dumps(self.chrome_trace(), separators=(",", ":"), default=str))
        return path

    def __repr__(self) -> str:
        errors = f", {sum(self.probe_errors.values())} probe errors" if self.probe_errors else ""
        return f"<Trace of {len(self)} journeys{errors}>"


def read(folder: Path, since: float = 0.0) -> Trace:
    """What the processes of a lab wrote into `folder`; of the journeys, those that began at `since` or later.

    Args:
        since: by this host's monotonic clock, in seconds.
    """
    reader = Reader(folder)
    reader.poll()
    reader.close()
    names = {transfer: request_id for request_id, transfer in reader.transfer_of.items()}
    journeys = []
    for transfer, events in reader.of_transfer.items():
        journey = Journey(names.get(transfer, ""))
        journey.fill(events, transfer)
        if journey.start >= since:
            journeys.append(journey)
    return Trace(sorted(journeys, key=lambda journey: journey.start), reader.loose)
