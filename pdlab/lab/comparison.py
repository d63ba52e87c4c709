"""Comparing the KV of a request on both sides, byte for byte, while it is held."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdlab.checks import of_kind
from pdlab.errors import PdlabError
from pdlab.lab.kv import KVBlock
from pdlab.trace.journey import Journey

if TYPE_CHECKING:  # where recorded runs play, no engine need be able to start
    from pdlab.lab.instance import Instance


@dataclass(frozen=True)
class Pair:
    """One block of one layer on both sides: its ids, and whether their digests are equal."""

    layer: int
    source_block: int
    destination_block: int
    equal: bool


@dataclass(frozen=True)
class Rewritten:
    """Bytes of a block on D that are other than they came: `ranges` of [start, stop) within the block."""

    layer: int
    block: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def bytes(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


@dataclass(frozen=True)
class Comparison:
    """Every pulled block of every layer, on P and on D.

    Attributes:
        pairs: by layer, then in the request's order.
        block_len: bytes of each.
        held: the point at which the request was held meanwhile.
    """

    pairs: tuple[Pair, ...]
    block_len: int
    held: str
    _decode: "Instance" = field(repr=False)
    _last: tuple[KVBlock, ...] = field(repr=False)

    @property
    def equal(self) -> bool:
        """Whether all of them are equal, and there are any."""
        return bool(self.pairs) and all(pair.equal for pair in self.pairs)

    @property
    def unequal(self) -> list[Pair]:
        return [pair for pair in self.pairs if not pair.equal]

    @property
    def bytes(self) -> int:
        """How many bytes of D were compared."""
        return len(self.pairs) * self.block_len

    def rewritten(self) -> list[Rewritten]:
        """What D has changed since in the last pulled block of each layer; call it when the request is done.

        D computes the last prompt token itself and writes its keys and values over those that came; what it decodes
        goes behind them.

        Raises:
            PdlabError: D's engine does not let its memory be read.
        """
        now = [self._decode.kv(block.layer, block.block) for block in self._last]
        changed = [(before, before.differing(after)) for before, after in zip(self._last, now, strict=True)]
        return [Rewritten(before.layer, before.block, tuple(ranges)) for before, ranges in changed if ranges]

    def __repr__(self) -> str:
        layers = len({pair.layer for pair in self.pairs})
        each = len(self.pairs) // max(layers, 1)
        verdict = "all equal" if self.equal else f"{len(self.unequal)} of {len(self.pairs)} UNEQUAL"
        return f"<compared {each} blocks in {layers} layers, {self.bytes:,} bytes, {self.held}: {verdict}>"


def compare(journey: Journey, prefill: "Instance", decode: "Instance") -> Comparison:
    """Compare what P read from with what D got; see `Lab.compare`."""
    of_kind(journey, Journey, "give the journey that lab.submit(…) returned")
    if not journey.writes:
        raise PdlabError("nothing of this request was planned to be written yet", f"it lacks {journey.missing[:1]}")
    if journey.held is None:
        raise PdlabError(
            "P frees the blocks of a request once they are sent, and D overwrites the last one",
            'compare while it is held: with lab.hold("before_answer"): journey = lab.submit(…)',
        )
    columns: dict[int, list[tuple[int, int]]] = {}
    for write in journey.writes:
        columns.setdefault(write.layer, []).extend(zip(write.source_blocks, write.destination_blocks, strict=True))
    layers, rows = sorted(columns), columns[min(columns)]
    theirs = prefill.kv_digests([source for source, _ in rows], layers)
    ours = decode.kv_digests([destination for _, destination in rows], layers)
    pairs = tuple(
        Pair(layer, source, destination, theirs[i][j] == ours[i][j])
        for i, layer in enumerate(layers)
        for j, (source, destination) in enumerate(rows)
    )
    last = tuple(decode.kv(layer, rows[-1][1]) for layer in layers)
    return Comparison(pairs, journey.writes[0].block_len, journey.held, decode, last)
