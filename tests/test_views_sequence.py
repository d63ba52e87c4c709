"""The sequence diagram: a row a step, arrows between actors, who waits."""

import pytest

from pdlab.trace.event import ACTORS
from pdlab.views.sequence import FROM, sequence
from tests.test_views_picture import check_drawable, place
from tests.traces import journey_of, saved


def test_a_clickable_square_a_step_and_a_column_an_actor() -> None:
    journey = saved("plain")
    picture = sequence(journey)
    squares = [s for s in picture.shapes if s.name and s.kind == "rect"]
    assert [(s.name, s.step, s.since) for s in squares] == [(f"step {i}", i, i) for i in range(len(journey.steps))]
    columns = {step.actor: s.at[0] for s, step in zip(squares, journey.steps, strict=True)}
    assert sorted(columns, key=lambda actor: columns[actor]) == list(ACTORS)
    assert all(s.label.endswith(step.says) for s, step in zip(squares, journey.steps, strict=True))


def test_the_write_goes_from_p_to_d_and_comes_with_its_step() -> None:
    journey = saved("plain")
    picture, written = sequence(journey), place(journey, 15)
    arrows = [s for s in picture.shapes if s.kind == "arrow"]
    assert len(arrows) == len(FROM)
    [write] = [s for s in arrows if s.label == "KV"]
    assert write.role == "P" and write.at[0] < write.at[2] and write.size == max(s.size for s in arrows)
    assert write.since == written and write not in picture.at_step(written - 1)


def test_the_parked_request_waits() -> None:
    journey = saved("plain")
    [parked] = [s for s in sequence(journey).shapes if s.label.startswith("parked")]
    assert (parked.role, parked.fill, parked.since) == ("D", "hatch", place(journey, 9))


def test_to_scale_the_distances_are_times() -> None:
    journey = saved("was_held")
    rows = {s.name: s.at[1] for s in sequence(journey, to_scale=True).shapes if s.name}
    before, after = place(journey, 14), place(journey, 15)
    gaps = [rows[f"step {i + 1}"] - rows[f"step {i}"] for i in range(len(journey.steps) - 1)]
    assert gaps[before] == max(gaps) and after == before + 1 and min(gaps) >= 14.9


def test_line() -> None:
    journey = saved("plain")
    assert sequence(journey).line == "sequence diagram by step: 25 steps by 5 actors"
    assert sequence(journey, to_scale=True).line == "sequence diagram to scale: 25 steps by 5 actors"


@pytest.mark.parametrize("to_scale", [False, True])
@pytest.mark.parametrize("name", ["plain", "held", "p_first"])
def test_every_beginning_of_a_journey(name: str, to_scale: bool) -> None:
    journey = saved(name)
    for count in range(len(journey.events) + 1):
        check_drawable(sequence(journey_of(journey.events[:count], journey), to_scale))
