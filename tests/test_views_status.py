"""Status and computed tokens over the steps, both sides."""

import itertools

import pytest

from pdlab.errors import RequestError
from pdlab.views.picture import Picture, Shape
from pdlab.views.status import COLUMN, LEFT, status
from tests.test_views_picture import check_drawable, place
from tests.traces import journey_of, saved

FILLS = {"WAITING": "hatch", "WAITING_FOR_REMOTE_KVS": "hatch", "RUNNING": "solid", "FINISHED_LENGTH_CAPPED": "soft"}


def cells(picture: Picture, side: str) -> dict[int, Shape]:
    """The cell of each step in a side's band."""
    shapes = [s for s in picture.shapes if s.kind == "rect" and s.role == side and s.label in FILLS]
    return {s.since: s for s in shapes}


def texts(picture: Picture, side: str, step: int) -> list[str]:
    half = (picture.height - 54) / 2 + 20
    return [s.label for s in picture.at_step(step) if s.kind == "text" and (s.at[1] < half) == (side == "P")]


@pytest.mark.parametrize(
    ("side", "number", "expected"),
    [
        ("P", 3, "RUNNING"), ("P", 5, "FINISHED_LENGTH_CAPPED"), ("D", 2, "WAITING"), ("D", 8, "WAITING"),
        ("D", 9, "WAITING_FOR_REMOTE_KVS"), ("D", 19, "WAITING_FOR_REMOTE_KVS"), ("D", 20, "WAITING"),
        ("D", 21, "RUNNING"), ("D", 22, "RUNNING"), ("D", 23, "FINISHED_LENGTH_CAPPED"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["plain", "partial_hit", "was_held", "p_first", "batch"])
def test_status_at_a_step(name: str, side: str, number: int, expected: str) -> None:
    journey = saved(name)
    index = next(i for i, s in enumerate(journey.steps) if (s.number, s.actor) == (number, f"{side} scheduler"))
    cell = cells(status(journey), side)[index]
    assert (cell.label, cell.fill, cell.at[0]) == (expected, FILLS[expected], LEFT + COLUMN * index)


def test_computed_tokens_are_written_at_each_change() -> None:
    journey = saved("plain")
    picture = status(journey)
    numbers = [(s.label, s.since) for s in picture.shapes if s.kind == "text" and s.role == "text"]
    assert numbers[:2] == [("0", place(journey, 2) + 1), ("143", place(journey, 3))]
    expected = [("0", 2), ("143", place(journey, 9)), ("142", place(journey, 20)), ("143", place(journey, 21))]
    assert numbers[2:] == [*expected, ("…146", place(journey, 22)), ("148", place(journey, 23))]


def test_scheduled_tokens_and_queues() -> None:
    journey = saved("partial_hit")
    picture = status(journey)
    assert "+15" in texts(picture, "P", 10**5) and "+1" in texts(picture, "D", 10**5)
    assert "in kv_holding_waiting" in texts(picture, "D", place(journey, 9))
    assert "in kv_holding_waiting" not in texts(picture, "D", place(journey, 8))


def test_what_is_to_come_is_not_there_yet() -> None:
    journey = saved("plain")
    picture, parked = status(journey), place(journey, 9)
    there = picture.at_step(parked)
    band = [s for s in there if s.role == "D" and s.label in FILLS and s.kind == "rect"]
    assert max(s.at[0] for s in band) == LEFT + COLUMN * parked
    assert "RUNNING" not in texts(picture, "D", parked)


def test_the_current_step_is_lit() -> None:
    journey = saved("plain")
    picture = status(journey)
    for step in range(len(journey.steps)):
        [column] = [s for s in picture.at_step(step) if s.role == "muted" and s.kind == "rect"]
        assert column.at[0] == LEFT + COLUMN * step
        assert {s.name for s in picture.at_step(step) if s.step == step} == {f"step {step}"}


def test_texts_of_a_lane_do_not_lie_on_one_another() -> None:
    for name in ("plain", "partial_hit", "held", "batch"):
        picture = status(saved(name))
        rows: dict[float, list[tuple[float, float]]] = {}
        for s in picture.shapes:
            if s.kind == "text" and (s.label in FILLS or s.label.startswith("in ")):
                wide = len(s.label) * s.size * 0.7
                start = s.at[0] - (wide if s.anchor == "end" else 0)
                rows.setdefault(s.at[1], []).append((start, start + wide))
        for row in rows.values():
            row.sort()
            assert all(before[1] <= after[0] for before, after in itertools.pairwise(row)), name


def test_line() -> None:
    halves = "P WAITING, RUNNING, FINISHED_LENGTH_CAPPED, computed tokens 0, 143; D WAITING, WAITING_FOR_REMOTE_KVS, "
    rest = "WAITING, RUNNING, FINISHED_LENGTH_CAPPED, computed tokens 0, 143, 142, 143"
    assert status(saved("plain")).line == status(saved("p_first")).line == f"status: {halves}{rest}"


def test_a_failed_one_ends_with_the_hop_that_failed() -> None:
    whole = saved("plain")
    before, failed = (journey_of(whole.events[:30], whole) for _ in range(2))
    failed.answered(None, RequestError(502, "it ended", hop="decode instance http://127.0.0.1:41002"))
    usual, picture = status(before), status(failed)
    check_drawable(picture)
    assert picture.shapes[:-1] == usual.shapes
    said, words = picture.shapes[-1], "✗ failed: 502 from the decode instance: it ended"
    assert (said.role, said.label, said.since) == ("unequal", words, len(failed.steps) - 1)
    assert picture.line == f"{usual.line}; {words}"


@pytest.mark.parametrize("name", ["plain", "partial_hit", "held", "p_first", "batch"])
def test_every_beginning_of_a_journey(name: str) -> None:
    journey = saved(name)
    for count in range(len(journey.events) + 1):
        check_drawable(status(journey_of(journey.events[:count], journey)))


def test_an_empty_journey() -> None:
    journey = saved("plain")
    assert status(journey_of([], journey)).line == "status: P no event; D no event"
