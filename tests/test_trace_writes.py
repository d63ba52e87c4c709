"""What P wrote into D's memory: recorded plans of transfers, and what vLLM would have planned for other blocks."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from pdlab.trace.event import Event
from pdlab.trace.writes import Write, length_of, pulled, writes_of
from tests.traces import (
    AT_ONCE,
    BLOCK_LEN,
    EVERY,
    HIT,
    LAYERS,
    WHOLE,
    changed,
    journey_of,
    recorded_journey,
    recorded_trace,
    the,
)

Blocks = list[int]
PLANNED = the("transfer.planned", recorded_trace()[WHOLE])
[[D_ID, TRANSFER, _, _]] = PLANNED.facts["requests"]
REGIONS: list[list[Any]] = PLANNED.facts["regions"]


def descriptors(event: Event) -> list[tuple[int, int, int]]:
    facts = event.facts
    return list(zip(facts["src_ptrs"], facts["dst_ptrs"], facts["lengths"], strict=True))


def runs(p_blocks: Blocks, d_blocks: Blocks) -> Iterator[tuple[int, int, int]]:
    """Where both sides go on by one: (first of P, first of D, how many)."""
    pairs = list(zip(p_blocks, d_blocks, strict=True))
    while pairs:
        (p, d), count = pairs[0], 1
        while count < len(pairs) and pairs[count] == (p + count, d + count):
            count += 1
        yield p, d, count
        pairs = pairs[count:]


def planned(*requests: tuple[str, Blocks, Blocks], coalesced: bool = True, regions: Any = REGIONS) -> Event:
    """The recorded plan, as vLLM makes it for other requests: (transfer_id, blocks of P, blocks that D asks for)."""
    rows: list[tuple[int, int, int]] = []
    for _, p_blocks, d_blocks in requests:
        pairs = list(runs(p_blocks[len(p_blocks) - len(d_blocks) :], d_blocks))
        if not coalesced:
            pairs = [(p + n, d + n, 1) for p, d, count in pairs for n in range(count)]
        for _, p_base, p_len, p_payload, d_base, d_len, d_payload in regions:
            rows += [(p_base + p * p_len, d_base + d * d_len, n * min(p_payload, d_payload)) for p, d, n in pairs]
    src, dst, lengths = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [])
    return replace(
        changed(
            PLANNED, requests=[[f"cmpl-{name}", name, [p], [d]] for name, p, d in requests], regions=regions,
            src_ptrs=src, dst_ptrs=dst, lengths=lengths, descriptors=len(rows),
        ),
        transfers=tuple(name for name, _, _ in requests),
    )  # fmt: skip


def blocks_of(writes: list[Write], layer: int = 0) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(write.source_blocks, write.destination_blocks) for write in writes if write.layer == layer]


def test_what_is_made_here_is_what_vllm_made() -> None:
    made = planned((TRANSFER, [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]))
    for key in ("src_ptrs", "dst_ptrs", "lengths", "descriptors", "regions", "err_reqs"):
        assert made.facts[key] == PLANNED.facts[key]
    hit = recorded_journey(HIT)
    facts = the("transfer.planned", hit).facts
    made = planned((str(hit.transfer_id), [5, 6, 7, 8, 9], [9]), regions=facts["regions"])
    assert descriptors(made) == descriptors(the("transfer.planned", hit))


class TestRecorded:
    @pytest.mark.parametrize("index", EVERY)
    def test_addresses_are_the_arithmetic(self, index: int) -> None:
        for write in recorded_journey(index).writes:
            assert write.as_computed
            assert write.computed == (write.source_address, write.destination_address)
            assert write.source_address == write.source_base + write.source_block * BLOCK_LEN
            assert write.destination_address == write.destination_base + write.destination_block * BLOCK_LEN
            assert write.length == len(write.source_blocks) * BLOCK_LEN == len(write.destination_blocks) * BLOCK_LEN

    @pytest.mark.parametrize("index", EVERY)
    def test_one_descriptor_a_layer(self, index: int) -> None:
        writes = recorded_journey(index).writes
        assert [write.layer for write in writes] == list(range(LAYERS))
        assert [write.layer_name for write in writes] == [f"model.layers.{n}.self_attn.attn" for n in range(LAYERS)]

    def test_bases_are_those_that_the_engines_registered(self) -> None:
        journey = recorded_journey(WHOLE)
        registered = {e.actor: e.facts["regions"] for e in recorded_trace().startup if e.name == "kv.registered"}
        p = [base for _, base, _, _ in registered["P worker"]]
        d = [base for _, base, _, _ in registered["D worker"]]
        assert [write.source_base for write in journey.writes] == p
        assert [write.destination_base for write in journey.writes] == d
        assert the("pull.encoded", journey).facts["fields"]["kv_caches_base_addr"] == d

    @pytest.mark.parametrize("index", EVERY)
    def test_are_all_that_the_transfer_was_given(self, index: int) -> None:
        journey = recorded_journey(index)
        event = the("transfer.planned", journey)
        others = {t: recorded_trace().of(t) for t in event.transfers}
        mine = [
            (write.source_address, write.destination_address, write.length)
            for _, transfer, _, _ in event.facts["requests"]
            for write in others[transfer].writes  # type: ignore[union-attr]
        ]
        assert mine == descriptors(event)

    def test_of_a_prefix_hit_take_the_last_blocks_of_p(self) -> None:
        journey = recorded_journey(HIT)
        assert journey.prefill.block_ids == [5, 6, 7, 8, 9]
        assert blocks_of(journey.writes) == [((9,), (9,))]
        assert {write.length for write in journey.writes} == {BLOCK_LEN}
        assert journey.writes[7].destination_block == journey.decode.block_ids[-1]

    def test_the_arithmetic_comes_out(self) -> None:
        write = recorded_journey(AT_ONCE[2]).writes[3]
        layer, source, destination, length = (part for part in write.arithmetic.replace(";", ":").split(": "))
        assert layer == "layer 3"
        assert length == f"{2 * BLOCK_LEN:,} bytes"
        for text, address in ((source, write.source_address), (destination, write.destination_address)):
            left, right = text.split(" ", 1)[1].replace(",", "").replace("×", "*").split(" = ")
            assert eval(left) == eval(right) == address

    def test_as_text(self) -> None:
        writes = recorded_journey(WHOLE).writes
        assert repr(writes[0]) == "<write of layer 0: blocks 1,2,3,4,5 → 1,2,3,4,5, 245,760 bytes>"


class TestFragments:
    def test_of_the_destination_are_a_descriptor_each(self) -> None:
        event = planned((TRANSFER, [1, 2, 3, 4, 5], [6, 2, 7, 8, 1]))
        assert event.facts["descriptors"] == 4 * LAYERS
        writes = writes_of(event, TRANSFER)
        assert [write.layer for write in writes] == [layer for layer in range(LAYERS) for _ in range(4)]
        for layer in range(LAYERS):
            assert blocks_of(writes, layer) == [((1,), (6,)), ((2,), (2,)), ((3, 4), (7, 8)), ((5,), (1,))]
        assert_as_planned(writes, event)

    def test_of_the_source_too(self) -> None:
        event = planned((TRANSFER, [9, 10, 3, 4, 5], [20, 21, 22, 23, 24]))
        writes = writes_of(event, TRANSFER)
        assert blocks_of(writes) == [((9, 10), (20, 21)), ((3, 4, 5), (22, 23, 24))]
        assert_as_planned(writes, event)

    def test_in_reverse_order(self) -> None:
        # As the free queue gives back blocks without hashes.
        event = planned((TRANSFER, [1, 2, 3, 4, 5], [5, 4, 3, 2, 1]))
        writes = writes_of(event, TRANSFER)
        assert blocks_of(writes, 29) == [((p,), (6 - p,)) for p in range(1, 6)]
        assert_as_planned(writes, event)

    def test_of_a_prefix_hit(self) -> None:
        event = planned((TRANSFER, [5, 6, 7, 8, 9], [30, 12]))
        writes = writes_of(event, TRANSFER)
        assert blocks_of(writes) == [((8,), (30,)), ((9,), (12,))]
        assert_as_planned(writes, event)

    def test_bytes_do_not_depend_on_them(self) -> None:
        lengths = [
            sum(write.length for write in writes_of(planned((TRANSFER, [1, 2, 3, 4, 5], blocks)), TRANSFER))
            for blocks in ([1, 2, 3, 4, 5], [6, 2, 7, 8, 1], [5, 4, 3, 2, 1])
        ]
        assert lengths == [LAYERS * 5 * BLOCK_LEN] * 3


class TestUncoalesced:
    """P alone, D two ranks: each gets half of the heads, so that no two blocks are one range of bytes."""

    HALF = BLOCK_LEN // 2

    def regions(self) -> list[list[Any]]:
        return [[name, p, p_len, p_pay, d, self.HALF, self.HALF] for name, p, p_len, p_pay, d, _, _ in REGIONS]

    def test_is_a_descriptor_a_block(self) -> None:
        event = planned((TRANSFER, [1, 2, 3], [7, 8, 9]), coalesced=False, regions=self.regions())
        assert event.facts["descriptors"] == 3 * LAYERS
        writes = writes_of(event, TRANSFER)
        assert blocks_of(writes, 11) == [((1,), (7,)), ((2,), (8,)), ((3,), (9,))]
        assert {write.length for write in writes} == {self.HALF}
        assert writes[0].destination_address == writes[0].destination_base + 7 * self.HALF
        assert length_of(event, TRANSFER) == sum(write.length for write in writes) == LAYERS * 3 * self.HALF
        assert_as_planned(writes, event)

    def test_of_the_second_rank_is_not_at_a_blocks_beginning(self) -> None:
        first = planned((TRANSFER, [1, 2, 3], [7, 8, 9]), coalesced=False, regions=self.regions())
        event = changed(first, src_ptrs=[address + self.HALF for address in first.facts["src_ptrs"]])
        writes = writes_of(event, TRANSFER)
        assert blocks_of(writes) == [((1,), (7,)), ((2,), (8,)), ((3,), (9,))]
        assert not any(write.as_computed for write in writes)

    def test_where_a_block_is_longer_than_what_is_in_it(self) -> None:
        regions = [[n, p, 2 * BLOCK_LEN, BLOCK_LEN, d, 2 * BLOCK_LEN, BLOCK_LEN] for n, p, _, _, d, _, _ in REGIONS]
        event = planned((TRANSFER, [1, 2], [7, 8]), coalesced=False, regions=regions)
        writes = writes_of(event, TRANSFER)
        assert blocks_of(writes) == [((1,), (7,)), ((2,), (8,))]
        assert writes[1].source_address - writes[0].source_address == 2 * BLOCK_LEN
        assert_as_planned(writes, event)


class TestSeveralRequests:
    FIRST, SECOND, THIRD = ("xfer-a", [1, 2, 3], [6, 2, 7]), ("xfer-b", [9, 10], [11]), ("xfer-c", [4, 5], [4, 5])

    def test_keep_their_descriptors(self) -> None:
        event = planned(self.FIRST, self.SECOND, self.THIRD)
        writes = {name: writes_of(event, name) for name in event.transfers}
        assert blocks_of(writes["xfer-a"], 29) == [((1,), (6,)), ((2,), (2,)), ((3,), (7,))]
        assert blocks_of(writes["xfer-b"], 29) == [((10,), (11,))]
        assert blocks_of(writes["xfer-c"], 29) == [((4, 5), (4, 5))]
        assert_as_planned([write for mine in writes.values() for write in mine], event)
        assert writes_of(event, "xfer-d") == []

    @pytest.mark.parametrize("failed", ["xfer-a", "xfer-b", "xfer-c"])
    def test_one_that_p_refuses_has_none(self, failed: str) -> None:
        """P has fewer blocks than D asks for ("P num blocks less than D"): vLLM plans nothing for it."""
        requests = [self.FIRST, self.SECOND, self.THIRD]
        rest = planned(*(request for request in requests if request[0] != failed))
        refused = [[f"cmpl-{name}", name, [p], [d]] for name, p, d in requests]
        event = changed(rest, requests=refused, err_reqs=[f"cmpl-{failed}"])
        assert writes_of(event, failed) == []
        assert length_of(event, failed) == 0
        for name, _, _ in requests:
            assert writes_of(event, name) == writes_of(rest, name)
            assert length_of(event, name) == length_of(rest, name)

    def test_one_that_pulls_nothing_has_none(self) -> None:
        # D was left before it had blocks: an empty pull only lets P free its own.
        event = planned(self.FIRST, ("xfer-empty", [8, 9], []), self.THIRD)
        assert writes_of(event, "xfer-empty") == []
        assert blocks_of(writes_of(event, "xfer-c")) == [((4, 5), (4, 5))]
        assert length_of(event, "xfer-empty") == 0

    def test_nothing_planned(self) -> None:
        event = planned(("xfer-empty", [8, 9], []))
        assert writes_of(event, "xfer-empty") == []
        assert length_of(event, "xfer-empty") == 0

    def test_left_to_another_rank(self) -> None:
        # Where ranks of P hold the same heads, only one of them sends.
        event = changed(PLANNED, src_ptrs=[], dst_ptrs=[], lengths=[], descriptors=0)
        assert writes_of(event, TRANSFER) == []
        assert length_of(event, TRANSFER) == 0


class TestCutShort:
    """Of a long list of descriptors, only the beginning is noted."""

    def cut(self, event: Event, count: int) -> Event:
        return changed(event, **{key: event.facts[key][:count] for key in ("src_ptrs", "dst_ptrs", "lengths")})

    @pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 119, 120])
    def test_what_was_noted_is_there(self, count: int) -> None:
        event = planned((TRANSFER, [1, 2, 3, 4, 5], [6, 2, 7, 8, 1]))
        assert writes_of(self.cut(event, count), TRANSFER) == writes_of(event, TRANSFER)[:count]

    def test_the_bytes_are_all_the_same(self) -> None:
        journey = recorded_journey(WHOLE)
        events = [self.cut(e, 7) if e.name == "transfer.planned" else e for e in journey.events]
        short = journey_of(events, journey)
        assert len(short.writes) == 7
        assert short.bytes_moved == journey.bytes_moved == LAYERS * 5 * BLOCK_LEN

    def test_of_several_requests_the_last_may_have_none(self) -> None:
        event = self.cut(planned(("xfer-a", [1, 2], [1, 2]), ("xfer-b", [3, 4], [3, 4])), LAYERS)
        assert len(writes_of(event, "xfer-a")) == LAYERS
        assert writes_of(event, "xfer-b") == []
        assert length_of(event, "xfer-a") == length_of(event, "xfer-b") == LAYERS * 2 * BLOCK_LEN


@pytest.mark.parametrize(
    ("p", "d", "expected"),
    [
        ([[1, 2, 3]], [[7, 8, 9]], ([1, 2, 3], [7, 8, 9])),
        ([[1, 2, 3]], [[9]], ([3], [9])),
        ([[1, 2, 3]], [[8, 9]], ([2, 3], [8, 9])),
        ([[1, 2, 3]], [[]], ([], [])),
        ([[1, 2, 3]], [], ([], [])),
    ],
)
def test_blocks_that_correspond(p: list[Blocks], d: list[Blocks], expected: tuple[Blocks, Blocks]) -> None:
    assert pulled(p, d) == expected


def assert_as_planned(writes: list[Write], event: Event) -> None:
    """The writes are the descriptors of the event, in order, and where the arithmetic puts them."""
    assert [(w.source_address, w.destination_address, w.length) for w in writes] == descriptors(event)
    assert all(write.as_computed for write in writes)
