"""A block, layer by layer: addresses, bytes, and whether they are equal."""

from types import SimpleNamespace
from typing import Any

from pdlab.trace.journey import Journey
from pdlab.views.bench import bench
from pdlab.views.detail import Detail, detail
from tests.helpers import RECORDED


def saved(name: str) -> Journey:
    return Journey.load(RECORDED / "journeys" / f"{name}.json.gz")


def test_a_row_a_layer_with_the_addresses_of_that_block() -> None:
    journey = saved("plain")
    for logical in range(5):
        rows = detail(journey, logical)
        assert [row.layer for row in rows] == list(range(30))
        for row, write in zip(rows, journey.writes, strict=True):
            assert row.source_address == write.source_address + logical * write.block_len
            assert row.destination_address == write.destination_address + logical * write.block_len
            assert (row.length, row.equal) == (49152, None)


def test_a_block_that_was_not_written_has_none() -> None:
    journey = saved("partial_hit")
    assert [len(detail(journey, logical)) for logical in range(5)] == [0, 0, 0, 0, 30]
    assert detail(journey, 7) == []


def test_what_was_compared_is_said() -> None:
    journey = saved("plain")
    first = journey.writes[0]
    pair = SimpleNamespace(
        layer=0, source_block=first.source_block, destination_block=first.destination_block, equal=False
    )
    rows = detail(journey, 0, SimpleNamespace(pairs=[pair]))
    assert rows[0].equal is False and rows[1].equal is None


def test_with_a_lab_the_bytes_are_read() -> None:
    class Side:
        def __init__(self, digest: str) -> None:
            self.digest = digest

        def kv(self, layer: int, block: int) -> Any:
            return SimpleNamespace(data=bytes(range(16)), digest=self.digest)

    same = detail(saved("held"), 0, lab=SimpleNamespace(prefill=Side("aa"), decode=Side("aa")))
    other = detail(saved("held"), 0, lab=SimpleNamespace(prefill=Side("aa"), decode=Side("bb")))
    assert all(row.equal for row in same) and not any(row.equal for row in other)
    assert same[0].source == "00 01 02 03 04 05 06 07… aa"


def test_a_click_on_a_block_shows_it() -> None:
    whole = bench(saved("plain"))
    assert repr(whole.detail) == "<no block chosen>"
    whole.blocks.chosen = "D block 2"
    assert repr(whole.detail) == "<block in 30 layers>"
    whole.blocks.chosen = "P block 0"
    assert whole.detail.rows == detail(saved("plain"), 0)


def test_it_says_so_where_nothing_was_written() -> None:
    shown = Detail(saved("partial_hit"))
    shown.show(0)
    assert "was not written" in shown.children[1].value
