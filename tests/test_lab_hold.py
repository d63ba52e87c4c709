"""A hold as a notebook has it in its hand: what it holds, and what it says of those that went on by themselves."""

import math
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdlab.errors import PdlabError
from pdlab.inside.holds import GIVEN_UP, RELEASED, find
from pdlab.inside.points import POINTS
from pdlab.lab.hold import HeldTooLong, Hold, seconds_for
from pdlab.trace.event import Event
from pdlab.trace.writer import Writer
from tests.helpers import wait_until

POINT = "before_write"


# How long it may stand -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("point", "abort_timeout", "seconds"),
    [
        ("before_prefill_send", 480, 477.0),
        ("before_decode_send", 30, 27.0),
        ("before_pull", 30, 27.0),
        ("before_ready", 4, 1.0),
        ("before_ready", 1, 1.0),
        ("before_write", 30, 60.0),  # while P writes, nothing expires there
        ("before_answer", 480, 60.0),
    ],
)
def test_it_ends_before_an_engine_would_give_the_request_up(point: str, abort_timeout: int, seconds: float) -> None:
    assert seconds_for(point, None, abort_timeout) == seconds


@pytest.mark.parametrize("point", POINTS)
def test_what_is_asked_for_wins(point: str) -> None:
    for asked in (0.001, 1, 2.5, 3600):
        found = seconds_for(point, asked, 30)
        assert (found, type(found)) == (asked, float)


@pytest.mark.parametrize("asked", [0, -1, -0.5, 3600.1, math.nan, math.inf, "5", [5], b"5"])
def test_what_is_no_time_is_refused(asked: Any) -> None:
    with pytest.raises(PdlabError) as error:
        seconds_for(POINT, asked, 30)
    assert str(error.value) == f"a hold cannot last {asked!r} s\n  give seconds, more than 0 and at most 3600"


@pytest.mark.parametrize("point", ["", "before", "before_Write", "before_write ", "*", "after_write"])
def test_an_unknown_point_is_refused_and_the_known_ones_are_named(point: str) -> None:
    with pytest.raises(PdlabError) as error:
        seconds_for(point, None, 30)
    first, second = str(error.value).splitlines()
    assert first == f"there is no gate {point!r}"
    assert all(known in second for known in POINTS)


# What it holds, as the engines' events say ----------------------------------------------------------------------------


class Engine:
    """Notes what an engine's gates would note of a hold."""

    def __init__(self, folder: Path) -> None:
        self.writer = Writer(folder, "engine-P", {"side": "P"})
        self.count = 0

    def __call__(self, name: str, hold: Hold, request: str, **facts: Any) -> None:
        facts = {"point": hold.point, "hold": hold.name, **facts}
        event = Event(time.monotonic(), f"gate.{name}", "P worker", "T", (f"xfer-{request}",), f"id-{request}", facts)
        self.writer.note(event)
        self.count += 1

    def written(self) -> None:
        """Wait until all of it is in the file."""
        path = self.writer._path
        wait_until(lambda: path.read_text().count('"gate.') == self.count)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace"


@pytest.fixture
def engine(trace: Path) -> Iterator[Engine]:
    engine = Engine(trace)
    yield engine
    engine.writer.close()


@pytest.fixture
def make(trace: Path) -> Iterator[Callable[..., Hold]]:
    made: list[Hold] = []

    def make(point: str = POINT, match: str = "*", seconds: float = 30) -> Hold:
        made.append(Hold(trace, point, match, seconds))
        return made[-1]

    yield make
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for hold in made:
            hold.release()


def test_it_stands_from_the_start_and_ends_with_the_block(trace: Path, make: Callable[..., Hold]) -> None:
    with make(match="pdlab-abc") as hold:
        found = find(trace / "gates", POINT, "cmpl-pdlab-abc-0-1f2e3d4c")
        assert found and found.path.stem == hold.name
        assert find(trace / "gates", POINT, "another") is None
        assert (hold.point, hold.match, hold.seconds) == (POINT, "pdlab-abc", 30)
        assert hold.stands
    assert found.over() == "released" and not hold.stands


def test_it_stands_no_longer_than_its_time(make: Callable[..., Hold]) -> None:
    hold = make(seconds=0.05)
    wait_until(lambda: not hold.stands)


def test_it_ends_with_the_block_even_where_that_fails(trace: Path, make: Callable[..., Hold]) -> None:
    with pytest.raises(ZeroDivisionError), make():
        raise ZeroDivisionError
    assert find(trace / "gates", POINT, "r") is None


def test_it_says_what_it_holds(make: Callable[..., Hold], engine: Engine) -> None:
    hold = make()
    assert (hold.held, repr(hold)) == ([], "<hold before_write: 0 held>")
    engine("held", hold, "1"), engine("held", hold, "2")
    assert hold.wait(2) == ["id-1", "id-2"]
    assert repr(hold) == "<hold before_write: 2 held>"
    engine("released", hold, "1", why=RELEASED)
    wait_until(lambda: hold.held == ["id-2"])
    assert hold.notes == []


def test_of_other_holds_it_says_nothing(make: Callable[..., Hold], engine: Engine) -> None:
    hold, same_point, other = make(), make(), make("before_pull")
    for each in (same_point, other):
        engine("held", each, "1")
        engine("passed", each, "2", why="it holds 8")
        engine("released", each, "1", why="its time was up")
    engine.written()
    assert (hold.held, hold.notes) == ([], [])
    assert len(other.notes) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hold.release()


def test_what_was_before_it_is_not_its_own(make: Callable[..., Hold], engine: Engine) -> None:
    earlier = make()
    engine("held", earlier, "1")
    engine.written()
    assert make().held == []


def test_wait_returns_as_soon_as_enough_are_held(make: Callable[..., Hold], engine: Engine) -> None:
    hold = make()
    assert hold.wait(0) == []
    engine("held", hold, "1")
    began = time.monotonic()
    assert hold.wait() == ["id-1"]
    assert time.monotonic() - began < 5


def test_waiting_in_vain_is_an_error_that_says_how_many_came(make: Callable[..., Hold], engine: Engine) -> None:
    hold = make()
    engine("held", hold, "1")
    hold.wait()
    began = time.monotonic()
    with pytest.raises(PdlabError) as error:
        hold.wait(2, seconds=0.2)
    assert 0.2 <= time.monotonic() - began < 5
    assert str(error.value) == (
        "after 0.2 s before_write holds 1 requests, not 2\n"
        "  was one sent that matches, and has it passed this point already?"
    )


def test_letting_go_as_asked_is_no_warning(make: Callable[..., Hold], engine: Engine) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with make() as hold:
            engine("held", hold, "1"), engine("released", hold, "1", why=RELEASED)
            engine("held", hold, "2"), engine("released", hold, "2", why=GIVEN_UP)  # its client left
            engine.written()
        assert (hold.held, hold.notes) == ([], [])


@pytest.mark.parametrize("why", ["its time was up", "its holder died", "its file cannot be read (Permission denied)"])
def test_letting_go_before_is_a_warning(why: str, make: Callable[..., Hold], engine: Engine) -> None:
    hold = make()
    engine("held", hold, "1"), engine("released", hold, "1", why=why)
    engine.written()
    assert hold.notes == [f"id-1 went on: {why}"]
    with pytest.warns(HeldTooLong) as warned:
        hold.release()
    assert [str(each.message) for each in warned] == [f"before_write: id-1 went on: {why}"]


def test_one_that_it_could_not_hold_is_a_warning(make: Callable[..., Hold], engine: Engine) -> None:
    with pytest.warns(HeldTooLong) as warned, make() as hold:
        engine("passed", hold, "9", why="it holds 8")
        engine.written()
    assert [str(each.message) for each in warned] == ["before_write: id-9 went on: it holds 8"]


def test_a_hold_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    hold = Hold(tmp_path / "later", POINT, "*", 30)
    assert hold.held == []
    hold.release()
