"""Many requests: what reading them costs grows with their number, no faster. Counted, not timed."""

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import pdlab.trace
from pdlab.trace import reader as readers
from pdlab.trace import writes
from pdlab.trace.reader import Reader
from pdlab.trace.trace import Trace, read
from tests.traces import HIT, WHOLE, copies, journey_of, recorded_journey, recorded_trace

FOLDER = str(Path(pdlab.trace.__file__).parent)
EVENTS = 53  # of the request that is copied
LOOKS: dict[str, Callable[[Trace], object]] = {
    "steps": lambda trace: [journey.steps for journey in trace],
    "sides": lambda trace: [(journey.prefill.blocks, journey.status) for journey in trace],
    "writes": lambda trace: [(journey.writes, journey.bytes_moved) for journey in trace],
    "seconds": lambda trace: [journey.seconds for journey in trace],
    "missing": lambda trace: [(journey.missing, journey.complete, journey.held) for journey in trace],
    "text": lambda trace: [(repr(journey), str(journey), journey.outline()) for journey in trace],
    "by transfer": lambda trace: [trace.of(str(journey.transfer_id)) for journey in trace],
    "chrome trace": lambda trace: trace.chrome_trace(),
}


def lines_run(what: Callable[[], object]) -> int:
    """How many lines of pdlab.trace run in `what()`: a measure of its cost that is the same each time."""
    count = 0

    def within(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return within

    before = sys.gettrace()
    sys.settrace(lambda frame, *_: within if frame.f_code.co_filename.startswith(FOLDER) else None)
    try:
        what()
    finally:
        sys.settrace(before)
    return count


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    @cache
    def make(count: int) -> Path:
        folder = tmp_path_factory.mktemp(str(count))
        copies(folder, count)
        return folder

    return make


Folders = Callable[[int], Path]


def assert_linear(costs: list[int]) -> None:
    """Of 10, 20 and 40: the second ten cost what ten of the next twenty do."""
    assert costs[0] > 0
    assert costs[2] - costs[1] == pytest.approx(2 * (costs[1] - costs[0]), rel=0.01)


@pytest.fixture(scope="module")
def trace(folder_of: Folders) -> Trace:
    return read(folder_of(1_000))


class TestAThousandRequests:
    def test_are_all_there_and_whole(self, trace: Trace) -> None:
        assert len(trace) == 1_000
        assert all(journey.complete and not journey.missing for journey in trace)
        assert (
            len({journey.transfer_id for journey in trace}) == len({journey.request_id for journey in trace}) == 1_000
        )

    def test_are_each_like_the_one_that_was_copied(self, trace: Trace) -> None:
        one = recorded_journey(WHOLE)
        for journey in (trace[0], trace[500], trace[-1]):
            assert journey.outline() == one.outline()
            assert journey.writes == one.writes
            assert journey.seconds == pytest.approx(one.seconds, abs=1e-6)

    def test_every_line_is_read_once(self, folder_of: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
        original, lines = readers.read_line, 0

        def counted(line: str) -> Any:
            nonlocal lines
            lines += 1
            return original(line)

        monkeypatch.setattr(readers, "read_line", counted)
        reader = Reader(folder_of(1_000))
        for _ in range(3):
            reader.poll()
        assert lines == 1_000 * EVENTS


class TestCost:
    def test_of_reading_grows_with_the_requests(self, folder_of: Folders) -> None:
        assert_linear([lines_run(lambda: read(folder_of(count))) for count in (10, 20, 40)])  # noqa: B023

    @pytest.mark.parametrize("what", LOOKS)
    def test_of_looking_grows_with_the_requests(self, what: str, folder_of: Folders) -> None:
        traces = [read(folder_of(count)) for count in (10, 20, 40)]
        assert_linear([lines_run(lambda: LOOKS[what](trace)) for trace in traces])  # noqa: B023

    def test_of_looking_again_is_nothing(self, folder_of: Folders) -> None:
        journey = read(folder_of(10))[0]
        first, again = (lines_run(lambda: (journey.steps, journey.prefill, journey.writes)) for _ in range(2))
        assert again < first / 50

    def test_of_polling_grows_with_what_is_new(self, folder_of: Folders) -> None:
        costs = []
        for count in (10, 40):
            reader = Reader(folder_of(count))
            reader.poll()
            costs.append(lines_run(reader.poll))
        assert costs[0] == costs[1]

    def test_of_a_step_looks_at_an_event_a_bounded_number_of_times(self) -> None:
        """A longer journey, of more events, costs more by as much."""
        journey = recorded_journey(WHOLE)
        plain = [event for event in journey.events if event.name == "scheduled"][-1]
        longer = [[*journey.events, *[plain.later(0.001 * n) for n in range(count)]] for count in (10, 20, 40)]
        for look in ("steps", "prefill", "seconds", "held", "missing"):
            costs = []
            for one in [journey_of(events, journey) for events in longer]:
                costs.append(lines_run(lambda: getattr(one, look)))  # noqa: B023
            assert_linear(costs)


class TestManyInOneMessage:
    def test_of_the_writes_of_others_only_the_lengths_are_looked_at(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = 0

        class Counted(writes.Write):
            def __init__(self, *args: Any) -> None:
                nonlocal made
                made += 1
                super().__init__(*args)

        monkeypatch.setattr(writes, "Write", Counted)
        journey = recorded_trace()[10]
        [event] = journey.of("transfer.planned")
        assert len(event.facts["requests"]) == 3
        assert len(writes.writes_of(event, str(journey.transfer_id))) == made == 30

    def test_what_they_share_is_kept_once(self) -> None:
        shared = [journey.of("pull.encoded")[0] for journey in list(recorded_trace())[8:]]
        assert shared[0] is shared[1] is shared[2]
        assert recorded_trace()[HIT].of("pull.encoded")[0] is not shared[0]
