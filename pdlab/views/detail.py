"""One block, layer by layer: where it was read and written, how many bytes, and what is there."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import ipywidgets

from pdlab.trace.journey import Journey
from pdlab.trace.writes import Write
from pdlab.views.shown import said, style

FIRST = 8  # bytes that are shown


@dataclass(frozen=True)
class Row:
    """A layer of one block of the request.

    Attributes:
        source_address, destination_address: of the block on P and on D; length: in bytes.
        source, destination: its first bytes in hex and its digest, where they were read.
        equal: whether the digests are equal; None where nothing was read or compared.
    """

    layer: int
    source_address: int
    destination_address: int
    length: int
    source: str = ""
    destination: str = ""
    equal: bool | None = None


def detail(journey: Journey, logical: int, compared: Any = None, lab: Any = None) -> list[Row]:
    """The rows of logical block `logical`, a row a layer; none if it was not written.

    Args:
        compared: what `lab.compare(journey)` found.
        lab: whose engines are read now; None: nothing is read.
    """
    skipped = len(journey.decode.blocks) - sum(len(w.destination_blocks) for w in journey.writes if w.layer == 0)
    found = []
    for write, at in _of_block(journey.writes, logical - skipped):
        p, d = write.source_blocks[at], write.destination_blocks[at]
        each = write.length // len(write.source_blocks)
        source, destination = (_read(lab and instance, write.layer, block) for instance, block in _sides(lab, p, d))
        equal = source == destination if source else _verdict(compared, write.layer, p, d)
        found.append(
            Row(
                write.layer, write.source_base + p * write.block_len,
                write.destination_base + d * write.destination_block_len, each, source, destination, equal,
            )
        )  # fmt: skip
    return found


def _of_block(writes: Sequence[Write], place: int) -> list[tuple[Write, int]]:
    """For each layer, the write that holds the `place`-th pulled block, and where in it that is."""
    found, passed = [], {}  # type: ignore[var-annotated]
    for write in writes:
        before = passed.get(write.layer, 0)
        passed[write.layer] = before + len(write.source_blocks)
        if before <= place < passed[write.layer]:
            found.append((write, place - before))
    return found


def _sides(lab: Any, p: int, d: int) -> tuple[tuple[Any, int], tuple[Any, int]]:
    return (getattr(lab, "prefill", None), p), (getattr(lab, "decode", None), d)


def _read(instance: Any, layer: int, block: int) -> str:
    if not instance:
        return ""
    read = instance.kv(layer, block)
    return f"{read.data[:FIRST].hex(' ')}… {read.digest}"


def _verdict(compared: Any, layer: int, p: int, d: int) -> bool | None:
    pairs = compared.pairs if compared is not None else ()
    wanted = (layer, p, d)
    return next(
        (pair.equal for pair in pairs if (pair.layer, pair.source_block, pair.destination_block) == wanted), None
    )


class Detail(ipywidgets.VBox):
    """The table of a block that was chosen.

    Attributes:
        rows: what it shows.
    """

    def __init__(self, journey: Journey, compared: Any = None, lab: Any = None) -> None:
        self.journey, self.compared, self.lab = journey, compared, lab
        self.rows: list[Row] = []
        self._table = ipywidgets.HTML(said('<span class="muted">click a block to see it layer by layer</span>'))
        super().__init__([style(), self._table])

    def show(self, logical: int) -> None:
        """Show a logical block. Raises PdlabError where the lab's memory cannot be read."""
        self.rows = detail(self.journey, logical, self.compared, self.lab)
        self._table.value = said(_table(logical, self.rows))

    def __repr__(self) -> str:
        return f"<block in {len(self.rows)} layers>" if self.rows else "<no block chosen>"


def _table(logical: int, rows: list[Row]) -> str:
    if not rows:
        return f'block {logical} <span class="muted">was not written: it was here, or nothing is planned yet</span>'
    head = "".join(
        f"<th>{word}</th>" for word in ("layer", "on P", "on D", "bytes", "first bytes, digest on P", "on D", "")
    )
    return f"<b>block {logical}</b><table><tr>{head}</tr>{''.join(map(_tr, rows))}</table>"


def _tr(row: Row) -> str:
    signs = {True: '<span class="equal">= equal</span>', False: '<span class="unequal">≠ differs</span>', None: ""}
    cells = [
        str(row.layer), f'<span class="P">0x{row.source_address:x}</span>',
        f'<span class="D">0x{row.destination_address:x}</span>', f"{row.length:,}", escape(row.source),
        escape(row.destination), signs[row.equal],
    ]  # fmt: skip
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
