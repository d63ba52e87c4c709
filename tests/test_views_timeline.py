"""The timeline's columns: every stage and step of every request, in the lane of its actor and a row of its own."""

import io
import json
from array import array
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
from PIL import Image

from pdlab.trace.event import ACTORS
from pdlab.trace.trace import Trace
from pdlab.views.timeline import LEFT, LOOKS, ROW, ROWS, TYPES, Columns, Timeline, columns, picture, placed
from tests.traces import AT_ONCE, recorded_trace


@pytest.fixture(scope="module")
def shown() -> Columns:
    return columns(recorded_trace())


class TestColumns:
    def test_have_every_stage_and_step(self, shown: Columns) -> None:
        trace = recorded_trace()
        began = trace[0].start
        expected = set()
        for request, journey in enumerate(trace):
            for stage, first, last in journey.stages():
                expected.add((request, stage, first.actor, first.time - began, last.time - began))
            for step in journey.steps:
                time = journey.start + step.time - began
                expected.add((request, f"{step.number} {step.title}", step.actor, time, time))
        each = zip(shown.requests, shown.kinds, shown.lanes, shown.starts, shown.ends, strict=True)
        assert {(r, LOOKS[kind].name, ACTORS[lane], start, end) for r, kind, lane, start, end in each} == expected
        assert len(shown) == sum(len(journey.steps) + len(journey.seconds) for journey in trace)
        assert shown.names == [journey.request_id for journey in trace]

    def test_are_by_kind_and_within_a_kind_by_start(self, shown: Columns) -> None:
        order = list(zip(shown.kinds, shown.starts, strict=True))
        assert order == sorted(order)

    def test_requests_of_one_row_do_not_overlap(self, shown: Columns) -> None:
        spans: dict[tuple[int, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        rows = defaultdict(set)
        for lane, row, request, *times in zip(
            shown.lanes, shown.rows, shown.requests, shown.starts, shown.ends, strict=True
        ):
            spans[lane, row][request] += times
            rows[lane, request].add(row)
        assert all(len(of) == 1 for of in rows.values())
        for of_row in spans.values():
            bounds = sorted((min(times), max(times)) for times in of_row.values())
            assert all(before[1] < after[0] for before, after in pairwise(bounds))

    def test_there_are_as_many_rows_as_requests_overlap(self, shown: Columns) -> None:
        assert shown.depths == [len(AT_ONCE)] * len(ACTORS)
        assert columns(list(recorded_trace())[:3]).depths == [1] * len(ACTORS)

    def test_are_the_bytes_that_a_browser_reads(self, shown: Columns) -> None:
        sizes = {name: len(column) // len(shown) for name, column in shown.as_bytes().items()}
        assert sizes == {"starts": 8, "ends": 8, "lanes": 2, "rows": 2, "kinds": 1, "requests": 4}
        assert array(TYPES["starts"], shown.as_bytes()["starts"]) == shown.starts

    def test_of_no_request_are_empty(self) -> None:
        empty = columns([])
        assert (len(empty), empty.end, empty.line) == (0, 0.0, "timeline of 0 requests, 0 actors")


def test_lanes_are_below_each_other_and_fit_on_a_screen() -> None:
    for depths in ([1] * 5, [6, 6, 6, 6, 6], [400, 0, 30, 900, 1]):
        places = placed(depths)
        assert [place.name for place in places] == list(ACTORS)
        assert all(a.top + a.height < b.top for a, b in pairwise(places))
        assert all(place.row * place.depth <= place.height + 0.1 and place.row <= ROW for place in places)
        assert sum(place.height for place in places) <= ROWS + 5 * 20


class TestTimeline:
    @pytest.fixture
    def timeline(self, tmp_path: Path) -> Timeline:
        return Timeline(recorded_trace(), path=tmp_path / "trace.json")

    def test_is_one_line_of_text_and_a_picture(self, timeline: Timeline) -> None:
        data, _ = timeline._repr_mimebundle_()
        assert data["text/plain"] == repr(timeline) == "<timeline of 11 requests, 5 actors>"
        assert data["image/png"]
        image = Image.open(io.BytesIO(timeline.png(dark=True)))
        assert image.size == (2000, 2 * picture(timeline.columns).height)

    def test_of_its_picture_nothing_is_outside(self, timeline: Timeline) -> None:
        whole = picture(timeline.columns, 700)
        boxes = [shape.at for shape in whole.shapes if shape.kind == "rect"]
        assert len(boxes) > 200
        assert all(x >= LEFT and x + width <= 700 and y + height <= whole.height for x, y, width, height in boxes)

    def test_the_button_saves_it_and_says_where(self, timeline: Timeline) -> None:
        timeline.button.click()
        assert timeline.said.value == f"saved {timeline.path}: open it at ui.perfetto.dev"
        assert json.loads(timeline.path.read_text()) == json.loads(json.dumps(timeline.trace.chrome_trace()))

    def test_the_button_says_why_it_could_not(self, timeline: Timeline, tmp_path: Path) -> None:
        timeline.path = tmp_path / "no such folder" / "trace.json"
        timeline.button.click()
        assert timeline.said.value.startswith("not saved: ")

    def test_another_trace_in_its_place(self, timeline: Timeline) -> None:
        timeline.canvas.chosen = 3
        assert timeline.journey is recorded_trace()[3]
        timeline.show(Trace(list(recorded_trace())[:2], []))
        assert (timeline.journey, repr(timeline)) == (None, "<timeline of 2 requests, 5 actors>")
        assert timeline.canvas.starts == timeline.columns.starts.tobytes()
        assert timeline.canvas.revision == 1
