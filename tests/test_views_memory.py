"""The memory of a layer: ranges to scale, arrows, the arithmetic of a descriptor."""

import pytest

from pdlab.trace.journey import Journey
from pdlab.views.memory import BAR, LEFT, MOST, memory
from pdlab.views.picture import Picture, Shape
from tests.test_views_picture import check_drawable, place
from tests.traces import BLOCK_LEN, LAYERS, changed, journey_of, saved


def ranges(picture: Picture, step: int) -> list[Shape]:
    shapes = picture.at_step(step)
    return [s for s in shapes if s.kind == "rect" and s.name.startswith("descriptor")]


def labels(picture: Picture, step: int) -> list[str]:
    return [shape.label for shape in picture.at_step(step)]


def fragmented(journey: Journey, to: list[int]) -> Journey:
    """The same, as if D's blocks lay apart: a descriptor a block."""
    [planned] = journey.of("transfer.planned")
    [request] = planned.facts["requests"]
    p_blocks = list(range(1, len(to) + 1))
    pairs = [(r, p, d) for r in planned.facts["regions"] for p, d in zip(p_blocks, to, strict=True)]
    facts = {
        "requests": [[*request[:2], [p_blocks], [to]]],
        "src_ptrs": [r[1] + p * r[2] for r, p, _ in pairs],
        "dst_ptrs": [r[4] + d * r[5] for r, _, d in pairs],
        "lengths": [BLOCK_LEN] * len(pairs),
    }
    return journey_of([changed(e, **facts) if e is planned else e for e in journey.events], journey)


@pytest.mark.parametrize("name", ["plain", "p_first"])
def test_line(name: str) -> None:
    assert memory(saved(name)).line == "memory of layer 0: 5 blocks, 49,152 bytes each"
    assert memory(saved("partial_hit"), 3).line == "memory of layer 3: 1 block, 49,152 bytes each"


def test_planned_is_soft_and_written_is_solid() -> None:
    journey = saved("plain")
    picture, planned, written = memory(journey), place(journey, 14), place(journey, 15)
    assert not ranges(picture, planned - 1)
    assert [(s.role, s.fill) for s in ranges(picture, planned)] == [("P", "soft"), ("D", "soft")]
    assert [(s.role, s.fill) for s in ranges(picture, written)] == [("P", "solid"), ("D", "solid")]
    arrows = [[s for s in picture.at_step(step) if s.kind == "arrow"] for step in (planned, written)]
    assert [len(found) for found in arrows] == [0, 1]


def test_held_before_the_write_nothing_is_written() -> None:
    picture = memory(saved("held"))
    assert {s.fill for s in ranges(picture, 10**5)} == {"soft"}
    assert not [s for s in picture.shapes if s.kind == "arrow"]


def test_ranges_are_to_scale() -> None:
    """Blocks 1 to 5 of 363."""
    journey = saved("plain")
    for shape in ranges(memory(journey, blocks=363), place(journey, 15)):
        assert shape.at[0] == pytest.approx(LEFT + BAR / 363, abs=0.1)
        assert shape.at[2] == pytest.approx(5 * BAR / 363, abs=0.1)


def test_without_the_number_of_blocks_it_is_drawn_up_to_the_highest_used() -> None:
    journey = saved("plain")
    assert "drawn up to block 5" in labels(memory(journey), 0) and "363 blocks" in labels(
        memory(journey, blocks=363), 0
    )
    [source, _] = ranges(memory(journey), place(journey, 15))
    assert source.at[0] + source.at[2] == pytest.approx(LEFT + BAR, abs=0.2)


def test_the_arithmetic_gives_the_address_that_was_used() -> None:
    journey = saved("plain")
    write = next(write for write in journey.writes if write.layer == 7)
    said = labels(memory(journey, 7), place(journey, 14))
    assert f"0x{write.source_base:x} + 1 × 49,152 = 0x{write.source_address:x}" in said
    assert f"0x{write.destination_base:x} + 1 × 49,152 = 0x{write.destination_address:x}" in said
    assert f"P: base 0x{write.source_base:x}" in said and f"D: base 0x{write.destination_base:x}" in said
    assert "245,760 bytes: 5 × 49,152" in said


def test_a_descriptor_for_each_block_where_they_lie_apart() -> None:
    journey = fragmented(saved("plain"), [6, 2, 9])
    picture = memory(journey, chosen=1)
    written = place(journey, 15)
    assert picture.line == "memory of layer 0: 3 blocks, 49,152 bytes each"
    assert [s.name for s in ranges(picture, written)] == [f"descriptor {i}" for i in (0, 0, 1, 1, 2, 2)]
    write = journey.writes[1]
    assert f"0x{write.destination_base:x} + 2 × 49,152 = 0x{write.destination_address:x}" in labels(picture, written)
    slopes = [s.at[2] - s.at[0] for s in picture.at_step(written) if s.kind == "arrow"]
    assert slopes[0] > 0 and slopes[1] == 0 and slopes[2] > slopes[0]


def test_of_many_descriptors_the_first_are_drawn() -> None:
    journey = fragmented(saved("plain"), list(range(200, 0, -2)))
    picture = memory(journey)
    assert len(ranges(picture, 10**5)) == 2 * MOST and f"… {100 - MOST} more descriptors" in labels(picture, 10**5)
    check_drawable(picture)


def test_a_cell_for_each_layer() -> None:
    picture = memory(saved("plain"), 4)
    assert {s.name for s in picture.shapes if s.name.startswith("layer")} == {f"layer {i}" for i in range(LAYERS)}
    [outlined] = [s for s in picture.shapes if s.role == "text" and s.fill == "none"]
    assert outlined.label == "layer 4"


@pytest.mark.parametrize("name", ["plain", "partial_hit", "held", "batch"])
def test_every_beginning_of_a_journey(name: str) -> None:
    journey = saved(name)
    for count in range(len(journey.events) + 1):
        check_drawable(memory(journey_of(journey.events[:count], journey)))


def test_a_layer_that_is_not_there() -> None:
    assert memory(saved("plain"), 99).line == "memory of layer 99: nothing planned to be written yet"
