"""A recorded lab answers as the live one did: here, as the fakes did that were recorded."""

import inspect
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

from pdlab.errors import PdlabError, RequestError
from pdlab.inside.holds import GIVEN_UP, RELEASED
from pdlab.lab.comparison import Comparison, Rewritten
from pdlab.lab.hold import HeldTooLong, Hold
from pdlab.lab.instance import Instance
from pdlab.lab.lab import Lab
from pdlab.lab.proxy_server import ProxyServer
from pdlab.recorded.codec import Held
from pdlab.recorded.player import RecordedInstance, RecordedLab, RecordedProxy, Run
from pdlab.recorded.recorder import Recorder, Recording
from pdlab.recorded.stage import LET_GO, RecordedHold, Stage
from pdlab.trace.event import Event
from pdlab.trace.journey import Journey
from tests.recording import ABOUT, NOTE, PROMPT, FakeLab, sample


class Both:
    """A fake lab that is recorded; `played` is what its tape plays by then."""

    def __init__(self, folder: Path, *samples: str) -> None:
        self.live = FakeLab(folder / "trace", *samples)
        self.recorder = Recorder(folder / "run.json.gz", ABOUT)
        self.lab: Recording = self.recorder.take(self.live)  # type: ignore[arg-type]

    def played(self) -> RecordedLab:
        lab: RecordedLab = Run("run", self.recorder.keep()).play(None, "up", {})
        return lab


@pytest.fixture
def both(tmp_path: Path, request: pytest.FixtureRequest) -> Both:
    return Both(tmp_path, *getattr(request, "param", ()))


def samples(*names: str) -> Any:
    return pytest.mark.parametrize("both", [names], indirect=True)


class TestCalls:
    @samples("plain")
    def test_a_journey(self, both: Both) -> None:
        both.lab.send(PROMPT, max_tokens=6, fresh=True)
        journey = both.played().send(PROMPT, 6, fresh=True)
        assert journey.text == sample("plain").text and len({step.number for step in journey.steps}) == 23
        assert journey.done and journey.wait() is journey
        assert repr(journey).endswith(NOTE + ">")

    def test_answers_metrics_bytes_and_tables(self, both: Both) -> None:
        recorded = [
            both.lab.decode.complete("a", n=1), both.lab.prefill.metric("x", source="y"), both.lab.prefill.kv(2, 3),
            both.lab.decode.kv_digests([1], [2]), both.lab.prefill.bootstrap_query(), both.lab.held(),
            list(both.lab.processes()),
        ]  # fmt: skip
        lab = both.played()
        played = [
            lab.decode.complete("a", n=1), lab.prefill.metric("x", source="y"), lab.prefill.kv(2, 3),
            lab.decode.kv_digests(blocks=[1], layers=[2]), lab.prefill.bootstrap_query(), lab.held(),
            list(lab.processes()),
        ]  # fmt: skip
        assert [vars(each) if hasattr(each, "__dict__") else each for each in played] == [
            vars(each) if hasattr(each, "__dict__") else each for each in recorded
        ]

    def test_what_nobody_asked_for_is_there(self, both: Both) -> None:
        lab = both.played()
        assert lab.status()["up"] and lab.status()["servers"]["proxy"]["log"] == "~/p.log"
        assert len(lab.processes()) == 1 and lab.settings == both.live.settings and lab.name == "default"
        for live, played in ((both.live.prefill, lab.prefill), (both.live.decode, lab.decode)):
            assert played.facts == live.facts and played.command == live.command and played.role == live.role
            assert (played.engine_id, played.registered_kv) == (live.engine_id, live.registered_kv)
            assert played.alive and played.healthy and played.url == live.url and played.bootstrap == live.bootstrap
        assert lab.proxy.url == both.live.proxy.url and lab.proxy.alive
        assert lab.prefill.bootstrap_query() == both.live.prefill.bootstrap_query()

    def test_what_was_asked_for_comes_before_what_nobody_did(self, both: Both) -> None:
        both.live.prefill.alive = False
        assert not both.lab.prefill.alive
        assert both.played().prefill.alive is False

    def test_what_a_live_lab_alone_has(self, both: Both) -> None:
        lab = both.played()
        assert lab.prefill.token == ""
        assert lab.trace_folder == both.recorder.path.parent
        for server in (lab.prefill, lab.proxy):
            with pytest.raises(PdlabError, match="no process"):
                _ = server.process
        with lab as same:
            assert same is lab
        lab.down()
        assert lab.status()["up"]

    @samples("plain", "partial_hit", "batch")
    def test_equal_calls_get_their_results_in_order_and_then_the_last(self, both: Both) -> None:
        for _ in range(2):
            both.lab.send(PROMPT, 6)
        both.lab.send("other")
        [both.lab.decode.metric("x") for _ in range(3)]
        lab = both.played()
        assert [lab.send(PROMPT, 6).request_id for _ in range(4)] == [
            sample(name).request_id for name in ("plain", "partial_hit", "partial_hit", "partial_hit")
        ]
        assert [lab.decode.metric("x") for _ in range(5)] == [1, 2, 3, 3, 3]
        assert lab.send("other").request_id == sample("batch").request_id

    def test_a_lab_that_is_brought_up_again_begins_anew(self, both: Both) -> None:
        [both.lab.decode.metric("x") for _ in range(2)]
        run = Run("run", both.recorder.keep())
        for _ in range(2):
            assert [run.play(None, "up", {}).decode.metric("x") for _ in range(1)] == [1]
        lab = run.play(None, "up", {})
        assert [lab.decode.metric("x"), lab.decode.metric("x")] == [1, 2]

    def test_labs_that_were_brought_up_one_after_the_other_have_their_own_calls(self, both: Both) -> None:
        both.lab.decode.metric("x")
        again = both.recorder.take(both.live)  # type: ignore[arg-type]
        again.decode.metric("x")
        run = Run("run", both.recorder.keep())
        first, second = run.play(None, "up", {}), run.play(None, "up", {})
        assert (second.decode.metric("x"), first.decode.metric("x")) == (2, 1)

    def test_errors_are_raised_as_they_were(self, both: Both) -> None:
        for call in (lambda: both.lab.send(PROMPT, n=2), lambda: both.lab.prefill.metric("none")):
            with pytest.raises(PdlabError):
                call()
        lab = both.played()
        for _ in range(2):
            with pytest.raises(RequestError) as refused:
                lab.send(PROMPT, n=2)
        assert (refused.value.status, refused.value.hint) == (400, "ask for one")
        assert isinstance(refused.value.journey, Journey) and refused.value.journey.error is refused.value
        with pytest.raises(PdlabError, match="it has no metric none"):
            lab.prefill.metric("none")

    def test_calls_from_several_threads(self, both: Both) -> None:
        for number in range(6):
            both.lab.decode.metric("x", part=str(number % 2))
        lab, found = both.played(), []
        threads = [threading.Thread(target=lambda: found.append(lab.decode.metric("x", part="0"))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(found) == [1, 3, 5]


class TestWhatIsNotRecorded:
    @samples("plain")
    def test_it_says_the_call_the_run_and_what_there_is(self, both: Both) -> None:
        both.lab.send(PROMPT, max_tokens=6, fresh=True)
        with pytest.raises(PdlabError) as caught:
            both.played().send("Hello", 3)
        assert caught.value.message == (
            "this call is not in the recorded run 'run' of 2026-11-30 02:10: lab.send('Hello', max_tokens=3)"
        )
        assert caught.value.hint == (
            "recorded: lab.send([1000, 1001, 1002, … 143 values], max_tokens=6, fresh=True). "
            "Live engines answer anything: unset PDLAB_RUN, python3 -m pdlab lab"
        )

    def test_where_there_is_nothing_like_it(self, both: Both) -> None:
        for call in (lambda lab: lab.send("a"), lambda lab: lab.hold("before_write"), lambda lab: lab.trace()):
            with pytest.raises(PdlabError, match="not in the recorded run") as caught:
                call(both.played())
            assert caught.value.hint == "live engines answer anything: unset PDLAB_RUN, python3 -m pdlab lab"

    def test_it_takes_nothing_of_what_is(self, both: Both) -> None:
        [both.lab.decode.metric(name) for name in ("x", "x", "y")]
        lab = both.played()
        assert lab.decode.metric("x") == 1
        with pytest.raises(PdlabError) as caught:
            lab.decode.metric("z")
        assert str(caught.value.hint).startswith("recorded: lab.decode.metric('x'); lab.decode.metric('y'). Live")
        assert lab.decode.metric("x") == 2
        with pytest.raises(PdlabError):
            lab.prefill.metric("x")

    @samples("held")
    def test_a_comparison_of_another_journey_is_none_of_this_one(self, both: Both) -> None:
        both.lab.compare(both.lab.send("a"))
        with pytest.raises(PdlabError, match="not in the recorded run"):
            both.played().compare(sample("plain"))

    def test_a_mistaken_call_is_a_mistake(self, both: Both) -> None:
        with pytest.raises(TypeError):
            both.played().send()  # type: ignore[call-arg]
        with pytest.raises(AttributeError):
            _ = both.played().sendd  # type: ignore[attr-defined]


class TestHolds:
    @samples("was_held")
    def test_a_held_journey_shows_what_it_had_come_to(self, both: Both) -> None:
        self.script(both.lab)
        journey = self.script(both.played())
        assert journey.done and journey.text == sample("was_held").text
        assert len(journey.events) == len(sample("was_held").events)

    @staticmethod
    def script(lab: Any) -> Journey:
        """Of the live (fake) lab and of the played one: the same is so at every moment."""
        with lab.hold("before_write") as hold:
            assert (hold.held, lab.held()) == ([], {})
            journey: Journey = lab.submit(PROMPT, max_tokens=3)
            cut = sample("held")
            held = [event.request_id for event in cut.events if event.name == "gate.held"]
            assert hold.wait() == hold.held == held and isinstance(hold, Hold)
            assert repr(hold).startswith("<hold before_write: 1 held")
            assert (hold.notes, hold.point, hold.match) == ([], "before_write", "*")
            assert journey.held == "before_write" and lab.held() == {journey.transfer_id: "before_write"}
            assert [event.as_line() for event in journey.events] == [event.as_line() for event in cut.events]
            assert not journey.done and not journey.has_text and journey.missing == cut.missing
            assert journey.decode.status[-1][1] == "WAITING_FOR_REMOTE_KVS"
            with pytest.raises(PdlabError, match="no answer yet"):
                _ = journey.text
        assert (hold.held, lab.held(), journey.held) == ([], {}, None)
        return journey.wait()

    @samples("was_held")
    def test_displays_say_so(self, both: Both) -> None:
        with both.lab.hold("before_write"):
            both.lab.submit(PROMPT)
        with both.played().hold("before_write") as hold:
            assert repr(hold) == f"<hold before_write: 0 held{NOTE}>"

    @samples("was_held")
    def test_waiting_for_a_held_journey_fails_at_once_in_the_words_of_a_live_one(self, both: Both) -> None:
        with both.lab.hold("before_write"):
            live = both.lab.submit(PROMPT)
            with pytest.raises(PdlabError) as expected:
                live.wait(0.05)
        lab = both.played()
        with lab.hold("before_write"):
            journey = lab.submit(PROMPT)
            with pytest.raises(PdlabError) as caught:
                journey.wait(0.05)
            assert str(caught.value) == str(expected.value)
            with pytest.raises(PdlabError, match="after 3600 s"):
                journey.wait(3600)
        assert journey.wait().done

    @samples("was_held")
    def test_the_lab_lets_go_too(self, both: Both) -> None:
        both.lab.hold("before_write")
        both.lab.submit(PROMPT)
        both.lab.release()
        lab = both.played()
        hold = lab.hold("before_write")
        journey = lab.submit(PROMPT)
        assert hold.held
        lab.release()
        assert not hold.held and journey.done

    @samples("was_held")
    def test_without_its_hold_it_is_whole(self, both: Both) -> None:
        with both.lab.hold("before_write"):
            both.lab.submit(PROMPT)
        assert both.played().submit(PROMPT).done

    @samples("p_first")
    def test_what_goes_on_beside_a_held_half_is_seen(self, both: Both) -> None:
        """P computes and is ready to send while D's half waits in the proxy: a reader waits for that, in the block."""
        with both.lab.hold("before_decode_send"):
            both.lab.submit(PROMPT)
        lab = both.played()
        with lab.hold("before_decode_send") as hold:
            journey = lab.submit(PROMPT)
            hold.wait()
            assert {3, 4, 5, 6} <= {step.number for step in journey.steps} and 7 in journey_numbers_missing(journey)
        assert "P came first" in journey.step(13).says

    @samples("plain")
    def test_a_hold_that_held_nothing(self, both: Both) -> None:
        both.lab.hold("before_pull", match="x*").release()
        both.lab.send("a")
        lab = both.played()
        with lab.hold("before_pull", match="x*") as hold:
            assert lab.send("a").done and hold.held == []
            with pytest.raises(PdlabError, match="after 10 s before_pull holds 0 requests, not 1"):
                hold.wait()

    @samples("was_held")
    def test_one_that_was_sent_while_it_stood(self, both: Both) -> None:
        with both.lab.hold("before_write"):
            both.lab.send("a")
        lab = both.played()
        with lab.hold("before_write") as hold:
            lab.send("a")
            assert [event.name for event in hold._events()] == ["gate.held", "gate.released"]

    def test_a_hold_that_could_not_be(self, both: Both) -> None:
        with pytest.raises(PdlabError, match="no gate"):
            both.lab.hold("nowhere")
        with pytest.raises(PdlabError, match="no gate"):
            both.played().hold("nowhere")

    @samples("was_held")
    def test_comparing_while_it_is_held_and_looking_at_it_later(self, both: Both) -> None:
        self.compare(both.lab)
        comparison, rewritten = self.compare(both.played())
        assert rewritten == [Rewritten(0, 7, ((3, 5), (9, 10)))] and comparison.rewritten() == rewritten
        assert isinstance(comparison, Comparison) and comparison.held == "before_write"
        assert repr(comparison) == (f"<compared 1 blocks in 30 layers, 1,474,560 bytes, before_write: all equal{NOTE}>")

    @staticmethod
    def compare(lab: Any) -> Any:
        with lab.hold("before_write") as hold:
            journey = lab.submit(PROMPT)
            hold.wait()
            comparison = lab.compare(journey)
        journey.wait()
        return comparison, comparison.rewritten()

    @samples("was_held")
    def test_a_trace_is_as_it_was_at_its_moment(self, both: Both) -> None:
        with both.lab.hold("before_write"):
            both.lab.submit(PROMPT)
            both.lab.trace(since=123.0)
        both.lab.trace(456.0)
        lab = both.played()
        held, later = lab.trace(since=7.0), lab.trace()[0]
        assert held[0].held == "before_write" and later.held is None
        assert repr(held) == f"<Trace of 1 journeys{NOTE}>"


def journey_numbers_missing(journey: Journey) -> list[int]:
    return [int(what.split()[1].rstrip(":")) for what in journey.missing if what.startswith("step")]


class TestHoldsThatEndedByThemselves:
    """Made of a real journey whose release says that its time was up; none was recorded."""

    @pytest.fixture
    def whole(self) -> Journey:
        journey = sample("was_held")
        for event in journey.events:
            if event.name == "gate.released":
                event.facts["why"] = "its time was up"
        return journey

    @pytest.fixture
    def stage(self) -> Stage:
        return Stage()

    def hold(self, stage: Stage) -> RecordedHold:
        name = next(event.facts["hold"] for event in sample("was_held").events if event.name == "gate.held")
        return RecordedHold(Held("before_write", "*", 1.0, name), stage)

    def test_it_holds_until_somebody_waits(self, whole: Journey, stage: Stage) -> None:
        hold, journey = self.hold(stage), stage.submitted(whole)
        assert hold.wait() and journey.held == "before_write"
        assert journey.wait().done
        assert hold.held == []
        request_id = next(event.request_id for event in whole.events if event.name == "gate.released")
        assert hold.notes == [f"{request_id} went on: its time was up"]

    def test_leaving_the_block_warns_as_live(self, whole: Journey, stage: Stage) -> None:
        hold = self.hold(stage)
        stage.submitted(whole)
        with pytest.warns(HeldTooLong, match="before_write: .* went on: its time was up"):
            hold.release()

    def test_being_let_go_is_nothing_to_warn_of(self, stage: Stage) -> None:
        hold = self.hold(stage)
        stage.submitted(sample("was_held"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            hold.release()
        assert hold.notes == [] and LET_GO == (RELEASED, GIVEN_UP)

    def test_of_two_holds_the_first_lets_go_and_the_second_holds(self, stage: Stage) -> None:
        whole = sample("was_held")
        released = next(event for event in whole.events if event.name == "gate.released")
        for name, later in (("gate.held", 1), ("gate.released", 2)):
            facts = {**released.facts, "point": "before_answer", "hold": "before_answer.1"}
            event = Event(released.time + later * 1e-9, name, "P worker", "x", released.transfers, "r", facts)
            whole._events.insert(whole._events.index(released) + later, event)
        stage.hold("before_answer.1")
        hold, journey = self.hold(stage), stage.submitted(whole)
        assert journey.held == "before_write" and hold.stands
        hold.release()
        assert journey.held == "before_answer" and not journey.done and not hold.stands
        stage.release()
        assert journey.done

    def test_two_holds_at_once_on_either_side(self, stage: Stage) -> None:
        """D's worker holds it while P's does: what is seen of it goes on to the end of the one that stands."""
        whole = sample("was_held")
        place = next(i for i, event in enumerate(whole.events) if event.name == "gate.held")
        for name, later in (("gate.held", 1), ("gate.released", 2)):
            facts = {"point": "before_pull", "hold": "before_pull.1", "why": "released"}
            time = whole.events[place].time + later * 1e-9
            whole._events.insert(place + later, Event(time, name, "D worker", "x", ("t",), "r", facts))
        self.hold(stage)
        journey = stage.submitted(whole)
        assert [event.name for event in journey.events][-2:] == ["gate.held", "gate.released"]
        assert journey.held == "before_write"

    def test_one_that_was_sent_is_noted_too(self, whole: Journey, stage: Stage) -> None:
        hold = self.hold(stage)
        stage.sent(whole)
        assert hold.held == [] and "its time was up" in hold.notes[0]

    def test_one_whose_release_was_never_noted_shows_no_more_than_that_it_was_held(self, stage: Stage) -> None:
        whole = sample("was_held")
        whole._events = [event for event in whole._events if event.name != "gate.released"]
        self.hold(stage)
        assert stage.submitted(whole).events[-1].name == "gate.held"


class TestDisplays:
    def test_the_lab_and_its_servers(self, both: Both) -> None:
        lab = both.played()
        assert repr(lab) == repr(both.live) + NOTE
        for live, played in ((both.live.prefill, lab.prefill), (both.live.proxy, lab.proxy)):
            assert repr(played) == repr(live)[:-1] + NOTE + ">"
        assert str(lab.prefill.command) == str(both.live.prefill.command)

    def test_as_they_were_at_each_moment(self, both: Both) -> None:
        repr(both.lab.decode)
        both.live.decode.alive = False
        repr(both.lab.decode)
        decode = both.played().decode
        assert " up;" in repr(decode) and " down;" in repr(decode) and " down;" in repr(decode)


SAME = {RecordedLab: Lab, RecordedInstance: Instance, RecordedProxy: ProxyServer}


@pytest.mark.parametrize("kind", SAME, ids=lambda kind: kind.__name__)
def test_everything_that_a_live_object_has_is_there_with_the_same_arguments(kind: type) -> None:
    live = SAME[kind]
    fields = {name for name in getattr(live, "__dataclass_fields__", {}) if not name.startswith("_")}
    for name in fields | {name for name in vars(live) if not name.startswith("_")}:
        if callable(getattr(live, name, None)):
            ours, theirs = (inspect.signature(getattr(each, name)).parameters for each in (kind, live))
            assert [(p.name, p.default, p.kind) for p in ours.values()] == [
                (p.name, p.default, p.kind) for p in theirs.values()
            ], name
        else:
            assert hasattr(kind, name) or name in ("prefill", "decode", "proxy"), name
