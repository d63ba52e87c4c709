"""What P wrote into D's memory: each descriptor of a transfer, and the arithmetic that gives its addresses."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pdlab.trace.event import Event


@dataclass(frozen=True)
class Write:
    """One descriptor of `batch_transfer_sync_write`: one range of bytes, of one layer.

    Attributes:
        layer: index; layer_name: as vLLM calls the layer.
        source_blocks, destination_blocks: ids on P and on D, as many; more than one where both are consecutive.
        source_address, destination_address: as given to the Transfer Engine, in bytes.
        length: in bytes.
        source_base, destination_base: where that layer's region begins on either side.
        block_len: bytes from one block to the next on P; destination_block_len: on D.
    """

    layer: int
    layer_name: str
    source_blocks: tuple[int, ...]
    destination_blocks: tuple[int, ...]
    source_address: int
    destination_address: int
    length: int
    source_base: int
    destination_base: int
    block_len: int
    destination_block_len: int

    @property
    def source_block(self) -> int:
        return self.source_blocks[0]

    @property
    def destination_block(self) -> int:
        return self.destination_blocks[0]

    @property
    def computed(self) -> tuple[int, int]:
        """Both addresses worked out: base + block id × block_len (the same head of a block on both sides)."""
        return (
            self.source_base + self.source_block * self.block_len,
            self.destination_base + self.destination_block * self.destination_block_len,
        )

    @property
    def as_computed(self) -> bool:
        """Whether vLLM used the computed addresses: it does where P and D have equal tensor parallelism."""
        return self.computed == (self.source_address, self.destination_address)

    @property
    def arithmetic(self) -> str:
        source, destination = self.computed
        return (
            f"layer {self.layer}: source 0x{source:x} = 0x{self.source_base:x} + {self.source_block} × "
            f"{self.block_len:,}; destination 0x{destination:x} = 0x{self.destination_base:x} + "
            f"{self.destination_block} × {self.destination_block_len:,}; {self.length:,} bytes"
        )

    def __repr__(self) -> str:
        source, destination = (",".join(map(str, ids)) for ids in (self.source_blocks, self.destination_blocks))
        return f"<write of layer {self.layer}: blocks {source} → {destination}, {self.length:,} bytes>"


def writes_of(event: Event, transfer: str) -> list[Write]:
    """The writes of one transfer in a `transfer.planned` event, which may plan for several.

    vLLM lists descriptors by request, then region, then run of consecutive blocks; so they are read here. Of a long
    list only the beginning was noted.
    """
    facts, descriptors = event.facts, _descriptors(event.facts)
    found: list[Write] = []
    for owner, p_blocks, d_blocks in _planned(event):
        for layer, region in enumerate(facts["regions"]):
            if owner == transfer:
                found += _of_region(layer, region, p_blocks, d_blocks, descriptors)
            else:
                _pass(region, len(p_blocks), descriptors)
    return found


def length_of(event: Event, transfer: str) -> int:
    """Bytes that a `transfer.planned` event plans for one transfer, whether or not all descriptors were noted."""
    blocks = sum(len(p_blocks) for owner, p_blocks, _ in _planned(event) if owner == transfer)
    return blocks * sum(_per_block(region) for region in event.facts["regions"])


def _planned(event: Event) -> Iterator[tuple[str, list[int], list[int]]]:
    """Each request that has descriptors: its transfer_id, its blocks on P and on D. Those in error have none."""
    for d_req_id, owner, p_groups, d_groups in event.facts["requests"] if event.facts["descriptors"] else ():
        if d_req_id not in event.facts["err_reqs"]:
            yield owner, *pulled(p_groups, d_groups)


def _per_block(region: list[Any]) -> int:
    """Bytes written for a block: of the two sides' payloads the smaller, where their tensor parallelism differs."""
    return int(min(region[3], region[6]))


def _blocks_in(length: int, region: list[Any]) -> int:
    return max(1, length // _per_block(region))


def pulled(p_groups: list[list[int]], d_groups: list[list[int]]) -> tuple[list[int], list[int]]:
    """The blocks of P and of D that correspond: of P's, the last ones, as many as D asked for."""
    d_blocks = [block for group in d_groups for block in group]
    p_blocks = [block for p, d in zip(p_groups, d_groups, strict=False) if d for block in p[-len(d) :]]
    return p_blocks, d_blocks


def _descriptors(facts: dict[str, Any]) -> Iterator[tuple[int, int, int]]:
    return zip(facts["src_ptrs"], facts["dst_ptrs"], facts["lengths"], strict=True)


def _of_region(
    layer: int, region: list[Any], p_blocks: list[int], d_blocks: list[int], descriptors: Iterator[tuple[int, int, int]]
) -> Iterator[Write]:
    name, p_base, p_len, _, d_base, d_len, _ = region
    done = 0
    while done < len(p_blocks):
        descriptor = next(descriptors, None)
        if descriptor is None:  # not all were noted
            return
        source, destination, length = descriptor
        count = _blocks_in(length, region)
        yield Write(
            layer, name, tuple(p_blocks[done : done + count]), tuple(d_blocks[done : done + count]),
            source, destination, length, p_base, d_base, p_len, d_len,
        )  # fmt: skip
        done += count


def _pass(region: list[Any], blocks: int, descriptors: Iterator[tuple[int, int, int]]) -> None:
    """Leave out the descriptors of so many blocks of one layer."""
    while blocks > 0 and (descriptor := next(descriptors, None)):
        blocks -= _blocks_in(descriptor[2], region)
