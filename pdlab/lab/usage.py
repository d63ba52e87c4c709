"""`lab.prefill.usage()`: what an engine holds at this moment."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Usage:
    """Counts of one engine.

    Attributes:
        blocks: KV blocks that it can give away; used_blocks: those that requests own now (a block that is only in the
            prefix cache is not used).
        running, waiting, parked: requests in the scheduler's `running`, `waiting` and `kv_holding_waiting`.
        kept: requests that ended and whose blocks it keeps: on P for a pull, on D for a write that may be under way.
        sends: entries of `MooncakeConnectorWorker.reqs_need_send`, on P: transfers it expects a pull for.
        placeholders: entries among them without a request id: made by a pull, for a request that P has not finished,
            or never gets.
    """

    blocks: int
    used_blocks: int
    running: int = 0
    waiting: int = 0
    parked: int = 0
    kept: int = 0
    sends: int = 0
    placeholders: int = 0

    @property
    def under_way(self) -> int:
        """Requests that have not ended."""
        return self.running + self.waiting + self.parked

    def __repr__(self) -> str:
        words = [f"{self.used_blocks} of {self.blocks} blocks"]
        counts = ("running", "waiting", "parked", "kept", "sends", "placeholders")
        words += [f"{name} {count}" for name in counts if (count := getattr(self, name))]
        return f"<uses {', '.join(words)}>"


def usage_from(answer: list[dict[str, Any]]) -> Usage:
    """The sum over an engine's EngineCores of what `GET /pdlab/usage` answered."""
    totals: dict[str, int] = {}
    for core in answer:
        for name, count in core.items():
            totals[name] = totals.get(name, 0) + count
    return Usage(**totals)
