"""Drifts as a table for a terminal, and as JSON."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdlab.source.drift import Drift

# State and what it means, the worst first.
STATES = {
    "gone": "what pdlab names is not there",
    "changed": "other code, the marked statement is still found",
    "moved": "the same code in another place",
    "same": "the same code in the same place",
}


def counts(drifts: Iterable["Drift"]) -> dict[str, int]:
    """State → how many."""
    found: Counter[str] = Counter(drift.state for drift in drifts)
    return {state: found[state] for state in STATES}


def render(drifts: Sequence["Drift"], version: str, against: str) -> str:
    """A block a state, a line an anchor; what is the same is only counted. The versions: recorded, and compared."""
    lines = [f"{len(drifts)} anchors recorded for vLLM {version}, in vLLM {against}:"]
    for state, count in counts(drifts).items():
        lines += ["", f"{state} {count}: {STATES[state]}"]
        rows = [drift for drift in drifts if drift.state == state != "same"]
        names = max((len(drift.name) for drift in rows), default=0)
        symbols = max((len(_symbol(drift)) for drift in rows), default=0)
        lines += [f"  {drift.name:<{names}}  {_symbol(drift):<{symbols}}{drift.detail}" for drift in rows]
    return "\n".join(lines)


def as_json(drifts: Sequence["Drift"], version: str, against: str) -> dict[str, Any]:
    """The same for a program, what is the same included."""
    head = {"recorded": version, "against": against, "counts": counts(drifts)}
    return head | {"anchors": [asdict(drift) for drift in drifts]}


def _symbol(drift: "Drift") -> str:
    # What is missing of a gone one is named in full behind it.
    return "" if drift.state == "gone" else drift.symbol.partition(":")[2] + "  "
