"""The block tables: which blocks are there at which step, hashed or not, written or not."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from pdlab.trace.journey import Journey
from pdlab.views.blocks import FOLD, blocks, linked
from pdlab.views.picture import Picture, Shape
from tests.test_views_picture import check_drawable, place
from tests.traces import changed, journey_of, saved

LONG = 63  # blocks of a prompt of 2,000 tokens


def of(picture: Picture, step: int, side: str) -> list[Shape]:
    """What is drawn of one side at a step: P's table is on the left."""
    return [shape for shape in picture.at_step(step) if (shape.at[0] < 440) == (side == "P")]


def tags(picture: Picture, step: int, side: str) -> list[tuple[str, str]]:
    shapes = of(picture, step, side)
    return [(s.label, s.fill) for s in shapes if s.kind == "rect" and s.label in ("hashed", "not hashed")]


def links(picture: Picture, step: int) -> list[Shape]:
    return [shape for shape in picture.at_step(step) if shape.kind == "arrow"]


def labels(picture: Picture, step: int) -> list[str]:
    return [shape.label for shape in picture.at_step(step)]


def long(journey: Journey, count: int) -> Journey:
    """The same with `count` blocks of its table; the writes stay as they are."""
    events = []
    for event in journey.events:
        if event.name in ("blocks.allocated", "request.promoted", "blocks.freed"):
            rows = event.facts["blocks"]
            more = [[100 + i, rows[0][1], rows[0][2]] for i in range(count - len(rows))]
            event = changed(event, blocks=rows[:-1] + more + rows[-1:])
        events.append(event)
    return journey_of(events, journey)


def verdicts(journey: Journey, held: str, differs: int | None = None) -> SimpleNamespace:
    pairs = [
        SimpleNamespace(layer=layer, source_block=p, destination_block=d, equal=not (place == differs and layer == 7))
        for layer in range(30)
        for place, (p, d) in enumerate(linked(journey))
    ]
    return SimpleNamespace(pairs=pairs, held=held)


def test_a_table_appears_with_the_step_that_allocates_it() -> None:
    journey = saved("plain")
    picture = blocks(journey)
    assert not tags(picture, place(journey, 3) - 1, "P") and tags(picture, place(journey, 3), "P")
    assert not tags(picture, place(journey, 8) - 1, "D") and tags(picture, place(journey, 8), "D")
    assert labels(picture, 0).count("no blocks yet") == 2
    assert "no blocks yet" not in labels(picture, place(journey, 8))


def test_ds_blocks_are_hashed_at_the_promotion_and_ps_at_once() -> None:
    journey = saved("plain")
    picture = blocks(journey)
    assert tags(picture, place(journey, 9), "D") == [("not hashed", "none")] * 5
    assert tags(picture, place(journey, 19), "D") == [("not hashed", "none")] * 5
    assert tags(picture, place(journey, 20), "D") == [("hashed", "solid")] * 4 + [("not hashed", "none")]
    assert tags(picture, place(journey, 3), "P") == [("hashed", "solid")] * 4 + [("not hashed", "none")]


@pytest.mark.parametrize(("name", "count"), [("plain", 5), ("partial_hit", 1), ("p_first", 5), ("batch", 2)])
def test_links_from_the_write_on(name: str, count: int) -> None:
    journey = saved(name)
    picture, written = blocks(journey), place(journey, 15)
    assert not links(picture, written - 1)
    assert len(links(picture, written)) == count
    assert all(
        link.role == "P" and link.step == written and link.at[0] < link.at[2] for link in links(picture, written)
    )
    assert picture.line.endswith(f"; {count} written from P to D")


def test_a_link_joins_the_rows_of_its_blocks() -> None:
    journey = saved("partial_hit")
    picture = blocks(journey)
    [link] = links(picture, place(journey, 15))
    [row] = [s for s in of(picture, place(journey, 15), "P") if s.name == "P block 4" and "logical" in s.label]
    assert row.at[1] < link.at[1] < row.at[1] + row.at[3]


@pytest.mark.parametrize(("side", "step"), [("P", 17), ("D", 23)])
def test_freed_blocks_are_soft_and_have_no_reference(side: str, step: int) -> None:
    journey = saved("plain")
    picture, freed = blocks(journey), place(journey, step)
    for at, references, fill in ((freed - 1, "ref 1", "solid"), (freed, "ref 0", "soft")):
        shapes = of(picture, at, side)
        assert [s.label for s in shapes if s.label.startswith("ref ")] == [references] * 5
        assert {s.fill for s in shapes if "physical" in s.label} == {fill}


def test_free_blocks_before_and_after() -> None:
    journey = saved("plain")
    picture = blocks(journey)
    free = [s for s in picture.shapes if s.label.startswith("free blocks")]
    assert [s.label for s in free] == ["free blocks 363 → 358", "free blocks 358 → 363"] * 2
    assert [s.since for s in free] == [place(journey, number) for number in (3, 17, 8, 23)]


def test_a_bar_is_as_long_as_its_tokens() -> None:
    picture = blocks(saved("plain"))
    bars = {s.label: s.at[2] for s in picture.shapes if s.label.endswith(" tokens")}
    assert bars["15 of 32 tokens"] == pytest.approx(bars["32 of 32 tokens"] * 15 / 32, abs=0.1)


def test_rows_can_be_clicked() -> None:
    picture = blocks(saved("plain"))
    assert {s.name for s in picture.shapes} == {""} | {f"{side} block {i}" for side in "PD" for i in range(5)}


def test_compared_after_the_write() -> None:
    journey = saved("was_held")
    picture, written = blocks(journey, verdicts(journey, "before_answer", differs=3)), place(journey, 15)
    said = [(s.label, s.role) for s in picture.at_step(written) if s.role in ("equal", "unequal")]
    assert said == [("= equal", "equal")] * 3 + [("≠ differs", "unequal")] + [("= equal", "equal")]
    assert not [s for s in picture.at_step(written - 1) if s.role in ("equal", "unequal")]
    assert picture.line.endswith("; compared: 4 equal, 1 differ")


def test_compared_before_the_write_holds_until_then() -> None:
    journey = saved("was_held")
    picture, written = blocks(journey, verdicts(journey, "before_write")), place(journey, 15)
    assert labels(picture, written - 1).count("= equal") == 5
    assert "= equal" not in labels(picture, written)


def test_a_failed_write_links_nothing() -> None:
    journey = saved("plain")
    events = [changed(e, result=-1) if e.name == "transfer.written" else e for e in journey.events]
    picture = blocks(journey_of(events, journey))
    assert not links(picture, 10**5) and picture.line.endswith("; 0 written from P to D")


@pytest.mark.parametrize("count", [LONG, 10_000])
def test_a_long_table_is_folded(count: int) -> None:
    journey = long(saved("plain"), count)
    picture = blocks(journey)
    rows = {s.name for s in picture.shapes if s.name.startswith("P block")}
    assert len(rows) == FOLD - 1 and {"P block 0", f"P block {count - 1}"} <= rows
    hidden = count - FOLD + 1
    assert f"… {hidden:,} more, 0 of them hashed" in labels(picture, place(journey, 9))
    assert f"… {hidden:,} more, {hidden:,} of them hashed" in labels(picture, place(journey, 20))
    assert picture.height < 900 and len(picture.shapes) < 1500
    check_drawable(picture)


def test_folded_links_share_one() -> None:
    """The journey of 5 blocks, with the last of them behind the fold, as if P had listed others before it."""
    journey = long(saved("plain"), LONG)
    [planned] = journey.of("transfer.planned")
    ids = [row[0] for row in journey.of("blocks.allocated")[0].facts["blocks"]]
    [request] = planned.facts["requests"]
    facts = {"requests": [[*request[:2], [ids], [ids]]], "lengths": [49_152 * LONG] * 30}
    events = [changed(planned, **facts) if e is planned else e for e in journey.events]
    journey = journey_of(events, journey)
    picture = blocks(journey, verdicts(journey, "before_answer", differs=30))
    assert len(links(picture, place(journey, 15))) == FOLD
    assert "≠ 1 differ" in labels(picture, place(journey, 15))


def test_no_ids_in_the_line() -> None:
    first, later = saved("plain"), saved("p_first")
    assert [b.block_id for b in first.prefill.blocks] != [b.block_id for b in later.prefill.blocks]
    assert blocks(first).line == blocks(later).line
    assert blocks(first).line == (
        "block tables: P 5 blocks, 4 hashed, freed; D 5 blocks, 4 hashed, freed; 5 written from P to D"
    )


@pytest.mark.parametrize("name", ["plain", "partial_hit", "held", "was_held", "p_first", "batch"])
def test_every_beginning_of_a_journey(name: str) -> None:
    journey = saved(name)
    for count in range(len(journey.events) + 1):
        check_drawable(blocks(journey_of(journey.events[:count], journey)))


def test_one_half_alone() -> None:
    journey = saved("plain")
    halves = [replace(event) for event in journey.events if event.actor.startswith("D")]
    assert blocks(journey_of(halves, journey)).line.startswith("block tables: P no blocks; D 5 blocks")
