"""Requests held in mid-air: those that match, and no others, while both engines go on."""

import signal
import subprocess
import sys
import time
import warnings

import pytest

from pdlab import views
from pdlab.errors import PdlabError
from pdlab.lab.hold import HeldTooLong
from pdlab.lab.lab import Lab
from tests.live import ROOT, until

PROMPT = list(range(1000, 1143))


@pytest.fixture(scope="module")
def right(lab: Lab) -> tuple[int, ...]:
    """The answer of one engine alone."""
    return lab.decode.complete(PROMPT, 6).token_ids


# The point, the steps that have happened there, and some that have not.
POINTS = {
    "before_prefill_send": ({2, 9, 12, 13}, {3, 5, 14}),
    "before_decode_send": ({2, 3, 5, 6}, {7, 9, 13}),
    "before_pull": ({5, 6, 9, 10, 11}, {12, 13, 14}),
    "before_ready": ({5, 9, 13}, {6, 14}),
    "before_write": ({6, 9, 14}, {15, 16}),
    "before_answer": ({9, 14, 15}, {16, 18, 20}),
}


@pytest.mark.parametrize("point", POINTS)
def test_a_request_is_held_at_each_point_and_then_goes_on(lab: Lab, right: tuple[int, ...], point: str) -> None:
    there, not_there = POINTS[point]
    with lab.hold(point) as hold:
        journey = lab.submit(PROMPT, 6, fresh=True)
        hold.wait()
        assert until(lambda: there <= {step.number for step in journey.steps}, 10), journey
        assert journey.held == point
        assert lab.held() == {journey.transfer_id: point}
        time.sleep(0.3)
        assert not {step.number for step in journey.steps} & not_there
    assert journey.wait().token_ids == right
    assert journey.held is None
    assert lab.held() == {}


def test_held_before_the_write_d_waits_and_serves_others(lab: Lab, right: tuple[int, ...]) -> None:
    with lab.hold("before_write") as hold:
        journey = lab.submit(PROMPT, 6, fresh=True)
        hold.wait()
        other = lab.decode.complete("Another request, for D alone", max_tokens=5)
        moment = journey.decode.moments[-1]
        assert moment.status == "WAITING_FOR_REMOTE_KVS"
        assert moment.queue == "kv_holding_waiting"
        assert (moment.scheduled_tokens, moment.computed_tokens) == (0, 143)
        assert len(journey.decode.blocks) == 5
        assert not any(block.hashed for block in journey.decode.blocks)
    assert len(other.token_ids) == 5
    assert journey.wait().token_ids == right
    resumed = next(m for m in journey.decode.moments if m.status == "RUNNING")
    assert resumed.tokens_of_others_before > 5


@pytest.mark.parametrize("point", POINTS)
def test_only_those_that_match_are_held(lab: Lab, point: str) -> None:
    with lab.hold(point, match="the-one-*") as hold:
        held = lab.submit(PROMPT, 3, fresh=True, request_id="the-one-to-hold")
        others = [lab.submit(PROMPT, 3, fresh=True) for _ in range(3)]  # may share steps and messages with it
        for other in others:
            other.wait(20)
        hold.wait()
        assert "the-one-to-hold" in hold.held[0]
        assert held.held == point
    assert held.wait().token_ids == others[0].token_ids


def test_a_bench_grows_when_its_request_is_let_go(lab: Lab) -> None:
    with lab.hold("before_write") as hold:
        journey = lab.submit(PROMPT, 3, fresh=True)
        hold.wait()
        bench = views.bench(journey, lab)
        assert "step 14 of 23" in repr(bench.stepper)
    assert until(lambda: "step 23 of 23" in repr(bench.stepper) and bench.blocks.last == bench.stepper.last)
    assert bench.gates is not None
    bench.gates.close()


def test_a_hold_ends_by_itself_and_says_so(lab: Lab, right: tuple[int, ...]) -> None:
    with pytest.warns(HeldTooLong, match=r"its time was up"), lab.hold("before_write", seconds=8) as hold:
        journey = lab.submit(PROMPT, 6, fresh=True)
        hold.wait()
        assert journey.wait().token_ids == right
        assert "its time was up" in hold.notes[0]


def test_release_ends_every_hold(lab: Lab, right: tuple[int, ...]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with lab.hold("before_write") as first, lab.hold("before_pull") as second:
            journey = lab.submit(PROMPT, 6, fresh=True)
            second.wait()  # D's worker comes to it first
            lab.release()
            assert journey.wait().token_ids == right
            assert first.held == second.held == []


def test_a_dead_notebook_lets_go(lab: Lab, right: tuple[int, ...]) -> None:
    code = "import pdlab, time; hold = pdlab.attach().hold('before_write'); print('held', flush=True); time.sleep(60)"
    notebook = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert notebook.stdout is not None
    assert notebook.stdout.readline() == "held\n"
    journey = lab.submit(PROMPT, 6, fresh=True)
    assert until(lambda: journey.held == "before_write")
    notebook.send_signal(signal.SIGKILL)
    notebook.wait()
    assert journey.wait().token_ids == right
    assert journey.of("gate.released")[0].facts["why"] == "its holder died"


def test_what_cannot_be_held_is_refused_in_words(lab: Lab) -> None:
    with pytest.raises(PdlabError, match=r"there is no gate 'nowhere'\n  choose one of before_prefill_send"):
        lab.hold("nowhere")
    with pytest.raises(PdlabError, match="cannot last -1 s"):
        lab.hold("before_write", seconds=-1)


def test_waiting_for_what_is_not_held_ends(lab: Lab) -> None:
    with lab.hold("before_write") as hold, pytest.raises(PdlabError, match="holds 0 requests, not 1"):
        hold.wait(seconds=0.2)


def test_reset_makes_it_as_new(lab: Lab) -> None:
    prompt = list(range(8000, 8143))
    lab.send(prompt)
    with lab.hold("before_write") as hold:
        journey = lab.submit(prompt, 2)
        hold.wait()
        assert len(journey.decode.blocks) == 5 and journey.step(7).facts["num_computed_tokens"] == 128
        lab.reset()  # lets it go, waits for it, and forgets
    assert journey.wait().text
    assert lab.send(prompt).step(7).facts["num_computed_tokens"] == 0
