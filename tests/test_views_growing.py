"""Views of a journey that is under way: they grow with it, until it is complete."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pdlab import views
from pdlab.trace.answer import Answer
from pdlab.trace.journey import Journey
from pdlab.views import growing
from tests.helpers import wait_until
from tests.traces import P_FIRST, WHOLE, recorded_journey

LAST = 24  # steps 1 to 23, of these 1 and 2 of both halves; counted from 0
ANSWER = Answer("", (1,), 143, "length", "pdlab-1", None)
_others: list[threading.Thread] = []
FIGURES: dict[str, Callable[[Journey], Any]] = {
    "sequence": views.sequence_view,
    "blocks": views.blocks_view,
    "status": views.status_view,
    "memory": views.memory_view,
}


class UnderWay:
    """A recorded journey, as far as it was let come."""

    def __init__(self, index: int = WHOLE) -> None:
        self.whole = recorded_journey(index)
        self.come = 0
        self.journey = Journey(self.whole.request_id, feed=self.feed)

    def feed(self, journey: Journey) -> None:
        journey.fill(self.whole.events[: self.come], self.whole.transfer_id)

    def until(self, step: int) -> Journey:
        """Let it come until that step has happened."""
        time = self.whole.start + self.whole.step(step).time
        self.come = sum(event.time <= time for event in self.whole.events)
        return self.journey

    def end(self) -> None:
        self.come = len(self.whole.events)
        self.journey.answered(ANSWER)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Looks in quick succession; and none is left behind."""
    monkeypatch.setattr(growing, "LOOK", 0.01)
    _others[:] = [thread for thread in threading.enumerate() if thread.name == "pdlab-growing"]
    yield
    wait_until(lambda: not followers(), "the end of the thread that looks")


@pytest.fixture
def under_way() -> UnderWay:
    return UnderWay()


def followers() -> list[threading.Thread]:
    """The threads of this test: those of other tests may follow journeys that never end."""
    return [thread for thread in threading.enumerate() if thread.name == "pdlab-growing" and thread not in _others]


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_grows_and_goes_on_to_the_new_last_step(name: str, under_way: UnderWay) -> None:
    shown = FIGURES[name](under_way.until(9))
    before = shown.last
    assert shown.step == before < LAST
    under_way.end()
    wait_until(lambda: shown.step == LAST)
    assert shown.last == LAST and shown.shown.shapes == FIGURES[name](under_way.whole).shown.shapes


def test_a_stepper_and_what_follows_it_grow_together(under_way: UnderWay) -> None:
    journey = under_way.until(9)
    diagram, source, steps = views.sequence_view(journey), views.source_view(journey), views.stepper(journey)
    steps.follow(diagram, source)
    under_way.end()
    wait_until(lambda: steps.step == diagram.step == source.step == LAST)
    assert "step 23 of 23" in repr(steps) and "step 23" in repr(source)
    assert (steps._slider.max, steps._play.max, diagram.last) == (LAST, LAST, LAST)


def test_who_looks_at_an_earlier_step_stays_there(under_way: UnderWay) -> None:
    journey = under_way.until(9)
    steps, diagram, source = views.stepper(journey), views.sequence_view(journey), views.source_view(journey, step=1)
    steps.follow(diagram)
    steps.step = 2
    under_way.end()
    wait_until(lambda: steps.last == diagram.last == LAST and not followers())
    assert (steps.step, diagram.step, source.step) == (2, 2, 0)


def test_the_bench_grows_with_all_that_is_on_it(under_way: UnderWay) -> None:
    bench = views.bench(under_way.until(14))
    bench.memory.chosen = "layer 7"
    under_way.end()
    wait_until(lambda: not followers())
    parts = (bench.sequence, bench.blocks, bench.status, bench.memory)
    assert {part.last for part in parts} == {part.step for part in (*parts, bench.source, bench.stepper)} == {LAST}
    assert bench.memory.layer == 7 and "layer 7" in bench.memory.shown.line


def test_a_request_that_is_held_is_read_as_long_as_it_is() -> None:
    under_way = UnderWay()
    lab = type("Lab", (), {"hold": None, "held": lambda self: {}, "release": None, "proxy": None})()
    bench = views.bench(under_way.until(14))
    bench.detail.lab = lab  # as of one that is held
    under_way.end()
    wait_until(lambda: not followers())
    assert bench.detail.lab is None


def test_all_views_of_a_journey_are_drawn_by_one_thread(under_way: UnderWay) -> None:
    journey = under_way.until(9)
    shown = [views.sequence_view(journey) for _ in range(5)]
    assert len(followers()) == 1
    under_way.end()
    wait_until(lambda: all(each.last == LAST for each in shown))


@pytest.mark.parametrize("index", [WHOLE, P_FIRST])
def test_what_is_complete_is_not_looked_at(index: int) -> None:
    views.bench(recorded_journey(index))
    assert followers() == []


def test_one_that_failed_is_not_looked_at_for_ever(under_way: UnderWay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing, "REST", 0.05)
    shown = views.sequence_view(under_way.until(9))
    under_way.journey.answered(None, OSError("no"))
    wait_until(lambda: not followers())
    assert shown.last < LAST


def test_who_fills_it_and_who_looks_may_be_two(under_way: UnderWay) -> None:
    """What was made of fewer events never stays."""
    journey = under_way.journey
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            assert all((journey.steps is not None, journey.prefill, journey.writes is not None))

    lookers = [threading.Thread(target=look) for _ in range(3)]
    for looker in lookers:
        looker.start()
    for count in range(len(under_way.whole.events) + 1):
        under_way.come = count
        journey.refresh()
        time.sleep(0)
    stop.set()
    for looker in lookers:
        looker.join()
    assert len(journey.steps) == LAST + 1 and journey.writes == under_way.whole.writes
