"""The sequence diagram: a row a step, arrows between actors, who waits."""

from itertools import pairwise

import pytest

from pdlab.errors import RequestError
from pdlab.trace.event import ACTORS
from pdlab.trace.journey import Journey
from pdlab.views.sequence import FROM, sequence
from tests.test_views_picture import check_drawable, place
from tests.traces import journey_of, saved

HOP = "prefill instance http://127.0.0.1:41001"
WHY = "it ended, or was started again, before D had its KV"
LOST = RequestError(502, f"the proxy answered 502: {HOP}: {WHY}", hop=HOP)


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
def test_a_failed_one_ends_with_the_hop_that_failed(to_scale: bool) -> None:
    whole = saved("plain")
    before, failed = (journey_of(whole.events[:30], whole) for _ in range(2))
    failed.answered(None, LOST)
    usual, picture = sequence(before, to_scale), sequence(failed, to_scale)
    check_drawable(picture)
    *rest, said = picture.shapes
    assert rest == usual.shapes  # the rest of it is as it was
    words = f"✗ failed: 502 from the prefill instance: {WHY}"
    assert (said.kind, said.role, said.label, said.since) == ("text", "unequal", words, len(failed.steps) - 1)
    assert usual.height < said.at[1] < picture.height
    assert picture.line == f"{usual.line}; {words}"
    assert picture.png() and words in picture.svg() and words not in "".join(picture.svg(0).split("</title>")[1:])


def test_a_long_reason_is_written_in_several_rows() -> None:
    whole = saved("plain")
    failed = journey_of(whole.events[:30], whole)
    failed.answered(None, RequestError(400, "no KV " * 100, hop="decode instance http://127.0.0.1:41002"))
    picture = sequence(failed)
    check_drawable(picture)
    rows = [s for s in picture.shapes if s.role == "unequal"]
    assert len(rows) == 3 and " ".join(s.label for s in rows) == f"✗ failed: {failed.failure}"
    assert all(len(s.label) * s.size * 0.7 < picture.width for s in rows)
    assert [b.at[1] - a.at[1] for a, b in pairwise(rows)] == [17, 17]


def test_a_refused_one_has_no_step_and_says_why() -> None:
    picture = sequence(Journey("pdlab-1", error=RequestError(400, "the proxy answered 400: request: no")))
    check_drawable(picture)
    assert picture.line == "sequence diagram by step: 0 steps by 0 actors; ✗ failed: 400 for the request: no"
    assert "✗ failed" in [s.label for s in picture.at_step(0)][-1]


@pytest.mark.parametrize("to_scale", [False, True])
@pytest.mark.parametrize("name", ["plain", "held", "p_first"])
def test_every_beginning_of_a_journey(name: str, to_scale: bool) -> None:
    journey = saved(name)
    for count in range(len(journey.events) + 1):
        check_drawable(sequence(journey_of(journey.events[:count], journey), to_scale))
