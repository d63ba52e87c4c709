"""A journey in words: by time for a terminal, and as an outline that is the same on every run."""

import re

import pytest

from pdlab.trace.journey import Journey
from pdlab.trace.steps import KINDS
from tests.traces import (
    AT_ONCE,
    BEFORE_HIT,
    EVERY,
    HELD,
    HIT,
    P_FIRST,
    WHOLE,
    journey_of,
    recorded_journey,
    recorded_trace,
    saved,
)

ABOUT = {"when": "2026-11-30", "where": "a laptop with two cores"}
VARIES = {
    "an id": r"xfer-|pdlab-|cmpl-|[0-9a-f]{8}",
    "an address": r"0x|:\d{4,5}|\d{10,}|//",
    "a time": r"\d\.\d|\bms\b|\bseconds\b",
    "a thread": r"MainThread|Thread-\d|sender_\d",
}


def differing(one: Journey, other: Journey) -> dict[int, tuple[str, str]]:
    """The lines in which two outlines differ, by step."""
    pairs = zip(one.outline().splitlines(), other.outline().splitlines(), strict=True)
    return {int(a.split()[0]): (a, b) for a, b in pairs if a != b}


class TestOutline:
    @pytest.mark.parametrize("what", VARIES)
    @pytest.mark.parametrize("index", EVERY)
    def test_holds_nothing_of_one_run(self, index: int, what: str) -> None:
        assert not re.search(VARIES[what], recorded_journey(index).outline())

    def test_what_is_looked_for_there_is_in_the_events(self) -> None:
        events = " ".join(event.as_line() for event in recorded_journey(WHOLE).events)
        for what in ("an id", "an address", "a time", "a thread"):
            assert re.search(VARIES[what], events)

    @pytest.mark.parametrize("index", EVERY)
    def test_has_a_line_a_step_by_number(self, index: int) -> None:
        lines = recorded_journey(index).outline().splitlines()
        assert [int(line.split()[0]) for line in lines] == [1, 1, 2, 2, *range(3, 24)]
        assert [line[4:15].strip() for line in lines][:5] == [
            "proxy", "proxy", "P scheduler", "D scheduler", "P scheduler",
        ]  # fmt: skip

    @pytest.mark.parametrize("other", [BEFORE_HIT, HELD, P_FIRST])
    def test_of_the_same_prompt_is_the_same(self, other: int) -> None:
        """Held or not, whoever came first; but the client asked for another number of tokens."""
        one, two = recorded_journey(WHOLE), recorded_journey(other)
        assert two.prefill.block_ids != one.prefill.block_ids
        differ = differing(one, two)
        assert set(differ) == {1}
        asked = [re.sub(r"max_tokens=\d+", "max_tokens=N", line) for line in differ[1]]
        assert asked[0] == asked[1]

    def test_of_two_that_asked_for_the_same_is_equal(self) -> None:
        assert recorded_journey(HELD).outline() == recorded_journey(P_FIRST).outline()

    def test_of_a_prefix_hit_differs_in_what_it_saves(self) -> None:
        differ = differing(recorded_journey(BEFORE_HIT), recorded_journey(HIT))
        assert {number: line.split(": ", 1)[1] for number, (_, line) in differ.items()} == {
            3: "15 tokens scheduled, RUNNING",
            7: "128 tokens are here, 15 to be loaded",
            8: "4 of 5 blocks hashed, reserved_blocks=0",
            10: "1 block",
            14: "30 regions, 1 block each",
            15: "1,474,560 bytes, returned 0",
        }

    def test_of_one_of_several_in_a_message_differs_in_the_message(self) -> None:
        # 40 tokens and 41; the second had another with it.
        differ = differing(recorded_journey(AT_ONCE[0]), recorded_journey(AT_ONCE[1]))
        numbers = {n for n, (a, b) in differ.items() if a.replace("40", "41").replace("39", "40") != b}
        assert numbers == {14, 15, 16}

    def test_says_what_is_missing_of_a_request_that_is_done(self) -> None:
        journey = recorded_journey(WHOLE)
        part = journey_of([event for event in journey.events if not event.actor.startswith("D")], journey)
        lines = part.outline().splitlines()
        assert "    missing: D worker: no event" in lines
        assert "    missing: step 22: D has computed the last prompt token, and has the first of the answer" in lines
        assert not re.search("missing", saved("held").outline())


class TestByTime:
    @pytest.mark.parametrize("index", EVERY)
    def test_has_a_line_a_step(self, index: int) -> None:
        journey = recorded_journey(index)
        first, *lines = str(journey).splitlines()
        assert first == repr(journey)
        assert [int(line.split()[2]) for line in lines] == [step.number for step in journey.steps]
        when = [float(line.split()[0]) for line in lines]
        assert when == sorted(when)
        assert when[0] == 0

    def test_names_a_thread_that_has_a_name(self) -> None:
        [line] = [line for line in str(recorded_journey(WHOLE)).splitlines() if "a pool thread" in line]
        assert line.endswith("returned 0  [vllm-mooncake-sender_0]")
        assert "MainThread" not in str(recorded_journey(WHOLE))
        assert "Thread-1" not in str(recorded_journey(WHOLE))

    def test_has_every_kind_of_step(self) -> None:
        text = "\n".join(str(recorded_journey(index)) for index in EVERY)
        assert [kind.title for kind in KINDS if kind.title not in text] == []


class TestOneLine:
    def test_of_recorded_ones(self) -> None:
        lines = [repr(journey) for journey in recorded_trace()]
        whole = "<Journey: 143 prompt tokens, 23 of 23 steps, 5 blocks moved, 7,372,800 bytes, answered>"
        assert lines[WHOLE] == lines[HELD] == lines[P_FIRST] == whole
        assert lines[HIT] == whole.replace("5 blocks moved, 7,372,800", "1 block moved, 1,474,560")
        assert lines[AT_ONCE[5]] == whole.replace("143", "45").replace(
            "5 blocks moved, 7,372,800", "2 blocks moved, 2,949,120"
        )
        assert repr(saved("held")) == "<Journey: 143 prompt tokens, 14 of 23 steps, held at before_write>"
        assert repr(saved("plain")) == whole.replace("answered", repr(saved("plain").text))

    def test_of_one_that_no_engine_has_yet_says_no_number(self) -> None:
        journey = recorded_journey(WHOLE)
        assert repr(journey_of(journey.events[:2], journey)) == "<Journey: 1 of 23 steps, under way>"


class TestRecorded:
    def test_says_so_wherever_it_is_shown(self) -> None:
        journey = saved("plain")
        assert "recorded" not in str(journey)
        journey.about = ABOUT
        said = "; recorded 2026-11-30 on a laptop with two cores>"
        assert repr(journey).endswith(said)
        assert str(journey).splitlines()[0].endswith(said)

    def test_but_for_the_outline_which_is_the_same(self) -> None:
        journey = saved("plain")
        live = journey.outline()
        journey.about = ABOUT
        assert journey.outline() == live == recorded_journey(WHOLE).outline()
