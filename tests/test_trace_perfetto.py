"""Journeys as Perfetto and chrome://tracing read them."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pdlab.trace.event import ACTORS
from pdlab.trace.perfetto import as_chrome_trace
from pdlab.trace.stages import STAGES
from pdlab.trace.trace import Trace
from tests.traces import EVERY, HELD, P_FIRST, WHOLE, journey_of, recorded_journey, recorded_trace, saved

Row = dict[str, Any]
EXACT = 1e-3  # microseconds: what is left of a nanosecond in floating point


def rows(*indexes: int) -> list[Row]:
    trace = as_chrome_trace([recorded_journey(index) for index in indexes])
    assert trace["displayTimeUnit"] == "ms"
    events: list[Row] = trace["traceEvents"]
    return events


def of(phase: str, events: list[Row]) -> list[Row]:
    return [event for event in events if event["ph"] == phase]


def is_open(slice_: Row, at: float) -> bool:
    return bool(slice_["ts"] <= at <= slice_["ts"] + slice_["dur"])


class TestFormat:
    def test_is_json(self, tmp_path: Path) -> None:
        trace = recorded_trace()
        path = trace.save_chrome_trace(tmp_path / "trace.json")
        loaded = json.loads(path.read_text(), parse_constant=pytest.fail)
        assert loaded == json.loads(json.dumps(trace.chrome_trace(), allow_nan=False))
        assert len(loaded["traceEvents"]) > 11 * (23 + len(STAGES))

    def test_every_event_has_what_its_phase_needs(self) -> None:
        events = rows(*EVERY)
        assert {event["ph"] for event in events} == {"M", "X", "i", "s", "f"}
        for event in events:
            assert {"name", "pid", "tid"} <= set(event)
            assert event["pid"] in range(1, 6)
            if event["ph"] != "M":
                assert event["ts"] >= 0
                assert event["tid"] in range(1, 12)
        assert all(event["dur"] >= 0 for event in of("X", events))
        assert all(event["s"] == "t" for event in of("i", events))

    def test_has_lanes_for_five_actors(self) -> None:
        events = rows(WHOLE)
        assert {event["pid"]: event["args"]["name"] for event in of("M", events)} == dict(enumerate(ACTORS, start=1))
        assert {event["pid"] for event in events if event["ph"] != "M"} == {1, 2, 3, 4, 5}

    def test_has_a_row_a_request(self) -> None:
        steps = [event for event in rows(*EVERY) if event.get("cat") == "step"]
        assert Counter(event["tid"] for event in steps) == dict.fromkeys(range(1, 12), 25)

    def test_begins_at_nothing(self) -> None:
        assert min(event["ts"] for event in rows(*EVERY) if event["ph"] != "M") == 0
        early = recorded_journey(WHOLE)
        early = journey_of([event.later(-1e6) for event in early.events], early)
        assert min(event["ts"] for event in as_chrome_trace([early])["traceEvents"] if event["ph"] != "M") == 0

    def test_of_nothing(self) -> None:
        assert len(as_chrome_trace([])["traceEvents"]) == len(ACTORS)
        assert Trace([], []).chrome_trace() == as_chrome_trace([])


class TestSlices:
    @pytest.mark.parametrize("index", EVERY)
    def test_are_the_stages(self, index: int) -> None:
        found = {event["name"]: event["dur"] for event in rows(index) if event.get("cat") == "stage"}
        seconds = recorded_journey(index).seconds
        assert found == pytest.approx({stage: duration * 1e6 for stage, duration in seconds.items()})

    @pytest.mark.parametrize("index", EVERY)
    def test_of_a_lane_lie_within_or_beside_each_other(self, index: int) -> None:
        # As Perfetto reads them, one after the other: one that ends later than the one it began in is dropped.
        events = rows(index)
        for pid in range(1, 6):
            began, ends = 0.0, [float("inf")]
            for slice_ in of("X", [event for event in events if event["pid"] == pid]):
                assert slice_["ts"] >= began
                began, end = slice_["ts"], slice_["ts"] + slice_["dur"]
                while ends[-1] <= began + EXACT:
                    ends.pop()
                assert end <= ends[-1] + EXACT, slice_
                ends.append(end)

    def test_of_a_stage_that_has_not_ended_are_left_out(self) -> None:
        stages = [e["name"] for e in as_chrome_trace([saved("held")])["traceEvents"] if e.get("cat") == "stage"]
        assert stages == ["wait for P to schedule it", "P computes the prompt", "P gets ready to send"]


class TestSteps:
    @pytest.mark.parametrize("index", EVERY)
    def test_are_instants_with_what_they_say(self, index: int) -> None:
        journey = recorded_journey(index)
        found = [event for event in rows(index) if event["ph"] == "i"]
        assert [event["name"] for event in found] == [f"{step.number} {step.title}" for step in journey.steps]
        assert [event["args"]["says"] for event in found] == [step.says for step in journey.steps]
        assert [event["ts"] for event in found] == pytest.approx([step.time * 1e6 for step in journey.steps], abs=0.01)
        assert [ACTORS[event["pid"] - 1] for event in found] == [step.actor for step in journey.steps]

    def test_hold_small_values_only(self) -> None:
        # A message or a plan holds those of every request in it: each of them would hold all.
        assert all(len(json.dumps(event["args"])) < 1_000 for event in of("i", rows(*EVERY)))


class TestArrows:
    @pytest.mark.parametrize("index", EVERY)
    def test_leave_and_arrive(self, index: int) -> None:
        events = rows(index)
        leaving, arriving = of("s", events), of("f", events)
        assert [event["name"] for event in leaving] == ["pull.encoded", "answer.sent"]
        assert [ACTORS[event["pid"] - 1] for event in leaving] == ["D worker", "P worker"]
        assert [ACTORS[event["pid"] - 1] for event in arriving] == ["P worker", "D worker"]
        for leaves, arrives in zip(leaving, arriving, strict=True):
            assert (leaves["id"], leaves["name"], leaves["cat"]) == (arrives["id"], arrives["name"], arrives["cat"])
            assert leaves["ts"] < arrives["ts"]

    def test_have_a_number_of_their_own(self) -> None:
        # Perfetto takes an id that is no number for hexadecimal, and drops the arrow where it is not.
        ids = [event["id"] for event in of("s", rows(*EVERY))]
        assert all(isinstance(number, int) for number in ids)
        assert len(set(ids)) == len(ids) == 2 * len(EVERY)

    @pytest.mark.parametrize("index", EVERY)
    def test_hang_on_slices(self, index: int) -> None:
        # Of an arrow whose end lies in no slice that has begun in the file and in time, Perfetto shows nothing.
        events = rows(index)
        for place, event in enumerate(events):
            if event["ph"] in "sf":
                lane = [e for e in of("X", events[:place]) if (e["pid"], e["tid"]) == (event["pid"], event["tid"])]
                assert any(is_open(slice_, event["ts"]) and slice_["cat"] == "message" for slice_ in lane)
                assert event["bp"] == "e"

    @pytest.mark.parametrize("lost", ["pull.encoded", "pull.received", "answer.sent", "answer.received"])
    def test_with_an_end_that_is_missing_are_left_out(self, lost: str) -> None:
        journey = recorded_journey(P_FIRST)
        part = journey_of([event for event in journey.events if event.name != lost], journey)
        events = as_chrome_trace([part])["traceEvents"]
        kept = {"pull.encoded", "answer.sent"} - {
            lost.replace("received", "encoded") if "pull" in lost else "answer.sent"
        }
        assert {event["name"] for event in of("s", events)} == {event["name"] for event in of("f", events)} == kept


@pytest.mark.parametrize("actor", ACTORS)
def test_a_journey_without_an_actor_is_one(actor: str) -> None:
    journey = recorded_journey(HELD)
    part = journey_of([event for event in journey.events if event.actor != actor], journey)
    events = as_chrome_trace([part])["traceEvents"]
    assert all(event["ts"] >= 0 for event in events if event["ph"] != "M")
    assert ACTORS.index(actor) + 1 not in {event["pid"] for event in events if event["ph"] != "M"}
