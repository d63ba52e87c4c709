"""The memory of one layer on both sides, to scale: what P reads, where in D it writes it, and the arithmetic."""

from pdlab.trace.journey import Journey
from pdlab.trace.writes import Write
from pdlab.views.picture import ALWAYS, Picture

WIDTH, LEFT, BAR, THICK = 1000, 20, 960, 34
P_Y, D_Y = 70, 190
SUM_Y = 296  # where the arithmetic begins
CELLS_Y, CELL, IN_A_ROW = 392, 32, 30
MOST = 24  # descriptors that are drawn; of more, how many there are is said


def memory(journey: Journey, layer: int = 0, blocks: int | None = None, chosen: int = 0) -> Picture:
    """Both regions of a layer as bars to scale, with the ranges that each descriptor reads and writes.

    Args:
        blocks: how many blocks a region has; by default it is drawn up to the highest that is used.
        chosen: index of the descriptor, of this layer, whose arithmetic is spelled out.
    """
    every = journey.writes
    layers = sorted({write.layer for write in every})
    writes = [write for write in every if write.layer == layer]
    rows = -(-len(layers) // IN_A_ROW)
    picture = Picture(WIDTH, CELLS_Y + 30 * max(rows, 1) + 8 if writes else 120, _line(layer, writes))
    picture.text(LEFT, 28, f"layer {layer}: the same blocks in P's and in D's memory", size=15, bold=True)
    if not writes:
        picture.text(LEFT, 64, "nothing of it is planned to be written yet", role="muted")
        return picture
    scale = _Scale(writes, blocks)
    _bars(picture, writes[0], scale)
    planned, written = _since(journey)
    for index, write in enumerate(writes[:MOST]):
        _descriptor(picture, index, write, scale, planned, written)
    if len(writes) > MOST:
        more = f"… {len(writes) - MOST} more descriptors"
        picture.text(WIDTH - LEFT, (P_Y + THICK + D_Y) / 2 + 4, more, role="muted", anchor="end", since=planned)
    _arithmetic(picture, writes, min(max(chosen, 0), len(writes) - 1), planned)
    _cells(picture, layers, layer)
    return picture


class _Scale:
    """Pixels of a byte: the same on both sides."""

    def __init__(self, writes: list[Write], blocks: int | None) -> None:
        used = 1 + max(block for write in writes for block in (*write.source_blocks, *write.destination_blocks))
        self.known, self.blocks = blocks is not None, max(blocks or 0, used)
        first = writes[0]
        self.pixels = BAR / (self.blocks * max(first.block_len, first.destination_block_len, 1))

    def __call__(self, size: int) -> float:
        return size * self.pixels

    @property
    def end(self) -> str:
        return f"{self.blocks:,} blocks" if self.known else f"drawn up to block {self.blocks - 1:,}"


def _since(journey: Journey) -> tuple[int, int]:
    """Indices of the steps at which the transfer was planned, and written; a step that no journey comes to if never."""
    index = {step.number: i for i, step in reversed(list(enumerate(journey.steps)))}
    written = any(event.facts["result"] == 0 for event in journey.of("transfer.written"))
    return index.get(14, ALWAYS), index.get(15, ALWAYS) if written else ALWAYS


def _bars(picture: Picture, write: Write, scale: _Scale) -> None:
    for role, y, says, base, block_len in (
        ("P", P_Y, P_Y - 10, write.source_base, write.block_len),
        ("D", D_Y, D_Y + THICK + 20, write.destination_base, write.destination_block_len),
    ):
        wide = scale(scale.blocks * block_len)
        picture.add("rect", LEFT, y, wide, THICK, role=role, fill="none", label=f"{role}'s region of the layer")
        if wide / scale.blocks >= 8:
            for block in range(1, scale.blocks):
                x = LEFT + scale(block * block_len)
                picture.add("line", x, y, x, y + THICK, role="line", size=1)
        picture.text(LEFT, says, f"{role}: base 0x{base:x}", role=role, bold=True)
        picture.text(LEFT + wide, says, scale.end, role="muted", size=12, anchor="end")


def _descriptor(picture: Picture, index: int, write: Write, scale: _Scale, planned: int, written: int) -> None:
    """The range that it reads and the one that it writes: see-through while only planned, filled once written."""
    source = LEFT + scale(write.source_address - write.source_base)
    destination = LEFT + scale(write.destination_address - write.destination_base)
    wide, name = max(scale(write.length), 2), f"descriptor {index}"
    for role, x, y, ids in (
        ("P", source, P_Y, write.source_blocks), ("D", destination, D_Y, write.destination_blocks),
    ):  # fmt: skip
        box, label = (x, y + 3, wide, THICK - 6), f"{_named(ids)}: {write.length:,} bytes"
        there = {"role": role, "label": label, "name": name}
        if planned < written:
            picture.add("rect", *box, fill="soft", since=planned, until=written - 1, **there)
        if written < ALWAYS:
            picture.add("rect", *box, since=written, step=written, **there)
        if wide >= 9 * len(_named(ids)):
            _in_range(picture, x + wide / 2, y + THICK / 2 + 5, _named(ids), name, planned, written)
    if written < ALWAYS:
        picture.add(
            "arrow", source + wide / 2, P_Y + THICK + 5, destination + wide / 2, D_Y - 6, role="P", size=2.4,
            label=f"{write.length:,} bytes", since=written, step=written, name=name,
        )  # fmt: skip


def _in_range(picture: Picture, x: float, y: float, label: str, name: str, planned: int, written: int) -> None:
    for role, since, until in (("text", planned, written - 1), ("ground", written, ALWAYS)):
        if since < ALWAYS:
            picture.text(
                x, y, label, role=role, bold=True, anchor="middle", since=since, until=max(until, since), name=name
            )


def _named(ids: tuple[int, ...]) -> str:
    return f"block {ids[0]}" if len(ids) == 1 else f"blocks {ids[0]} to {ids[-1]}"


def _arithmetic(picture: Picture, writes: list[Write], chosen: int, planned: int) -> None:
    write = writes[chosen]
    source, destination = write.computed
    what = f"{_named(write.source_blocks)} of P, {_named(write.destination_blocks)} of D"
    head = f"descriptor {chosen + 1} of {len(writes)}, {what}: address = base + block id × block_len"
    sums = (
        ("P", "source", write.source_base, write.source_block, write.block_len, source),
        (
            "D", "destination", write.destination_base, write.destination_block, write.destination_block_len,
            destination,
        ),
    )  # fmt: skip
    picture.text(LEFT, SUM_Y - 20, head, role="muted", since=planned)
    for row, (role, end, base, block, block_len, address) in enumerate(sums):
        y = SUM_Y + 6 + 24 * row
        picture.text(LEFT, y, end, role=role, size=15, bold=True, since=planned)
        says = f"0x{base:x} + {block:,} × {block_len:,} = 0x{address:x}"
        picture.text(LEFT + 110, y, says, size=15, since=planned)
    picture.text(LEFT, SUM_Y + 54, _length(write), role="muted", since=planned)


def _length(write: Write) -> str:
    count = len(write.source_blocks)
    size = f"{write.length:,} bytes: {count} × {write.length // count:,}" if count > 1 else f"{write.length:,} bytes"
    return size if write.as_computed else f"{size}; vLLM adds an offset: P and D have different layouts"


def _cells(picture: Picture, layers: list[int], shown: int) -> None:
    """A cell for each layer; a click on one shows it."""
    picture.text(LEFT, CELLS_Y - 10, "layers", role="muted", size=12)
    for place, layer in enumerate(layers):
        row, column = divmod(place, IN_A_ROW)
        x, y, name = LEFT + CELL * column, CELLS_Y + 30 * row, f"layer {layer}"
        picture.add("rect", x, y, CELL - 6, 22, role="muted", fill="soft", label=name, name=name)
        if layer == shown:
            picture.add("rect", x - 2, y - 2, CELL - 2, 26, role="text", fill="none", label=name)
        picture.text(x + CELL / 2 - 3, y + 16, str(layer), size=12, bold=layer == shown, anchor="middle", name=name)


def _line(layer: int, writes: list[Write]) -> str:
    # Without the number of descriptors: that depends on how the free lists lie at the moment.
    if not writes:
        return f"memory of layer {layer}: nothing planned to be written yet"
    count = sum(len(write.source_blocks) for write in writes)
    blocks = "1 block" if count == 1 else f"{count:,} blocks"
    return f"memory of layer {layer}: {blocks}, {sum(w.length for w in writes) // count:,} bytes each"
