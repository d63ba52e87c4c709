"""The widgets, without a front end: traits are set, buttons clicked, and what they show is looked at."""

import json
import threading
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ipywidgets
import pytest

from pdlab import views
from pdlab.errors import PdlabError, RequestError
from pdlab.source.anchor import Anchor
from pdlab.source.anchors import ANCHORS
from pdlab.trace.journey import Journey
from pdlab.views.bench import Bench
from pdlab.views.gates import GatePanel
from pdlab.views.memory import memory
from pdlab.views.shown import ErrorLine, guarded
from pdlab.views.source import AROUND, Source, lines_shown, shortened
from pdlab.views.stepper import Stepper
from tests.helpers import wait_until

JOURNEYS = sorted((Path(__file__).parent / "recorded" / "journeys").glob("*.json.gz"))
OF_VLLM = "RequestStatus.WAITING_FOR_REMOTE_KVS"  # what the statement of step 9 has in it
ROOT = "vllm/v1/core/sched"


@pytest.fixture
def journey() -> Journey:
    return Journey.load(next(path for path in JOURNEYS if path.name == "plain.json.gz"))


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A vLLM of ours whose `Scheduler.schedule` is 300 lines long; the other anchors have nothing."""
    body = [f"        line = {number}" for number in range(1, 299)]
    body[200] = f"        request.status = (\n            {OF_VLLM}\n        )"
    file = tmp_path / ROOT / "scheduler.py"
    file.parent.mkdir(parents=True)
    file.write_text("\n".join(["class Scheduler:", "    def schedule(self):", *body, ""]))
    resolve = Anchor.resolve
    monkeypatch.setattr(Anchor, "resolve", lambda anchor, root=None: resolve(anchor, root or tmp_path))
    return file


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    ipywidgets.Widget.close_all()


def index_of(journey: Journey, number: int) -> int:
    return [step.number for step in journey.steps].index(number)


def all_within(widget: Any) -> list[Any]:
    return [widget, *(deep for child in getattr(widget, "children", ()) for deep in all_within(child))]


def words_of(widget: Any) -> str:
    return " ".join(part.value for part in all_within(widget) if isinstance(part, ipywidgets.HTML))


def button(widget: Any, words: str) -> ipywidgets.Button:
    return next(part for part in all_within(widget) if getattr(part, "description", None) == words)


def slider(widget: Any) -> ipywidgets.IntSlider:
    return next(part for part in all_within(widget) if isinstance(part, ipywidgets.IntSlider))


def bundle_of(widget: Any) -> dict[str, Any]:
    bundle = widget._repr_mimebundle_()
    return dict(bundle[0] if isinstance(bundle, tuple) else bundle)


# The stepper ----------------------------------------------------------------------------------------------------------


def test_the_stepper_says_the_step_in_words_and_in_its_actors_colour(journey: Journey) -> None:
    stepper = Stepper(journey)
    stepper.step = index_of(journey, 9)
    assert "D parks the request" in words_of(stepper)
    assert '<b class="D">D scheduler</b>' in words_of(stepper)
    assert "WAITING_FOR_REMOTE_KVS, 0 tokens scheduled" in words_of(stepper)
    assert repr(stepper) == "<stepper: step 9 of 23, D scheduler: D parks the request>"


def test_views_follow_the_stepper_and_move_it(journey: Journey) -> None:
    one, other, stepper = views.sequence_view(journey), Source(journey), Stepper(journey)
    stepper.follow(one, other)
    for mover in (stepper, one, other):
        for step in (3, 4):
            mover.step = step
            assert (stepper.step, one.step, other.step, slider(stepper).value) == (step,) * 4
    slider(stepper).value = 5
    assert (stepper.step, one.step, other.step) == (5, 5, 5)


def test_nobody_steps_past_the_ends(journey: Journey) -> None:
    figure, stepper = views.sequence_view(journey), Stepper(journey)
    stepper.follow(figure)
    assert stepper.step == figure.step == len(journey.steps) - 1 == stepper.last
    button(stepper, "▶").click()
    assert stepper.step == stepper.last
    for far, end in ((1000, stepper.last), (-1000, 0)):
        stepper.step = far
        assert stepper.step == figure.step == end
        figure.step = far
        assert stepper.step == figure.step == end
    button(stepper, "◀").click()
    assert stepper.step == 0
    button(stepper, "▶").click()
    assert stepper.step == figure.step == 1


def test_play_at_the_end_begins_again(journey: Journey) -> None:
    stepper = Stepper(journey)
    next(part for part in all_within(stepper) if isinstance(part, ipywidgets.Play)).playing = True
    assert stepper.step == 0


def test_a_journey_without_a_step_is_no_error() -> None:
    bench = views.bench(Journey("nothing"))
    assert "nothing has happened yet" in words_of(bench.stepper)
    button(bench, "▶").click()
    assert bench.stepper.step == 0
    assert repr(bench.stepper) == "<stepper: nothing has happened yet>"


def test_a_failed_journey_ends_with_the_hop_that_failed(journey: Journey) -> None:
    failed = Journey("r", journey.events[:30], transfer_id=journey.transfer_id)
    failed.answered(None, RequestError(502, "it <ended>", hop="prefill instance http://127.0.0.1:41001"))
    stepper = Stepper(failed)
    assert "✗ failed: 502 from the prefill instance: it &lt;ended&gt;</div>" in words_of(stepper)
    assert repr(stepper).endswith("; ✗ failed: 502 from the prefill instance: it <ended>>")
    stepper.step = 0
    assert "failed" not in words_of(stepper) + repr(stepper)


def test_a_refused_request_has_no_step_and_says_why() -> None:
    bench = views.bench(Journey("r", error=RequestError(400, "the proxy answered 400: request: no")))
    assert "✗ failed: 400 for the request: no" in words_of(bench.stepper)
    assert repr(bench.stepper) == "<stepper: nothing has happened yet; ✗ failed: 400 for the request: no>"
    assert repr(bench) == "<bench of Journey: 0 of 23 steps, failed: 400 for the request: no>"


# Errors ---------------------------------------------------------------------------------------------------------------


def test_what_a_callback_raises_is_shown_until_it_succeeds() -> None:
    line = ErrorLine()

    def fail() -> None:
        raise ValueError("a < b\nand more")

    guarded(line, fail)()
    assert "ValueError: a &lt; b · and more" in line.value and line.layout.display == ""
    guarded(line, lambda: None)()
    assert line.layout.display == ""
    guarded(line, fail)()
    assert line.value.count("⚠") == 1


def test_a_warning_is_shown_and_goes_with_the_next_success() -> None:
    line, told = ErrorLine(), ["held too long"]

    def tell() -> None:
        if told:
            warnings.warn(told.pop(), UserWarning, stacklevel=2)

    call = guarded(line, tell)
    call()
    assert "held too long" in line.value
    call()
    assert "held too long" not in line.value and line.layout.display == "none"


def test_a_view_that_fails_to_follow_says_so_in_the_stepper(journey: Journey) -> None:
    class Broken(Source):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "step" and value == 2:
                raise OSError("no such step")
            super().__setattr__(name, value)

    stepper = Stepper(journey).follow(Broken(journey), other := Source(journey))
    stepper.step = 2
    assert "OSError: no such step" in words_of(stepper) and other.step == 2
    stepper.step = 3
    assert "OSError" not in words_of(stepper)


# The source -----------------------------------------------------------------------------------------------------------


def test_the_statement_is_marked_amid_some_lines(journey: Journey, vllm: Path) -> None:
    source = Source(journey)
    source.step = index_of(journey, 9)
    lines = source.html().split("<div")
    marked = [line for line in lines if line.startswith(" class=marked")]
    assert [line.partition("<i>")[2].partition("</i>")[0] for line in marked] == ["203", "204", "205"]
    assert "WAITING_FOR_REMOTE_KVS" in marked[1]
    assert sum("<i>" in line for line in lines) == AROUND
    assert f"{ROOT}/scheduler.py:203" in source.html()


def test_all_of_the_symbol_is_shown_when_asked_for(journey: Journey, vllm: Path) -> None:
    source = Source(journey)
    source.step = index_of(journey, 9)
    assert "all 301 lines of Scheduler.schedule" in source.html()
    source.whole = True
    assert source.html().count("<i>") == 301
    assert "only the lines around" in source.html()


@pytest.mark.skipif(find_spec("vllm") is None, reason="reads the installed vLLM")
@pytest.mark.parametrize("number", range(1, 24))
def test_the_window_holds_the_statement_and_stays_in_the_symbol(number: int) -> None:
    place = ANCHORS[f"step.{number}"].resolve()
    shown = lines_shown(place, whole=False)
    assert place.first_line <= shown[0] <= place.marked_first and place.marked_last <= shown[-1] <= place.last_line
    assert len(shown) == min(AROUND, place.last_line - place.first_line + 1)


def test_no_text_of_vllm_is_in_what_a_notebook_can_store(journey: Journey, vllm: Path) -> None:
    bench = views.bench(journey)
    bench.stepper.step = index_of(journey, 9)
    assert OF_VLLM.partition(".")[2] in bench.source.html()
    bench.source._answer(None, {}, [])
    stored = [bundle_of(widget) for widget in (bench, bench.source)]
    # Of every widget too: Jupyter can store their states.
    stored += [widget.get_state() for widget in all_within(bench)]
    text = json.dumps(stored, default=str)
    assert "line = 201" not in text and "request.status" not in text
    assert "Scheduler.schedule" in json.dumps(bundle_of(bench.source))


def test_the_source_answers_the_page_by_a_message(journey: Journey, vllm: Path, monkeypatch: Any) -> None:
    source, sent = Source(journey), []
    source.step = index_of(journey, 9)
    monkeypatch.setattr(Source, "send", lambda self, content, buffers=None: sent.append(content))
    source._handle_custom_msg({}, [])
    assert sent == [{"html": source.html()}]
    source._handle_custom_msg({"whole": True}, [])
    assert source.whole


def test_without_vllm_the_pane_says_so_and_shows_the_values(journey: Journey, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: Any) -> None:
        raise PdlabError("vllm is not installed beside this Python")

    monkeypatch.setattr(Anchor, "resolve", absent)
    source = Source(journey)
    source.step = index_of(journey, 9)
    assert "vllm is not installed" in source.html()
    assert "kv_holding_waiting" in source.html()
    assert repr(source) == f"<source of step 9: Scheduler.schedule, {ROOT}/scheduler.py>"


def test_a_fault_of_ours_is_shown_in_the_pane(journey: Journey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Anchor, "resolve", lambda *_: 1 / 0)
    assert "ZeroDivisionError" in Source(journey).html()


def test_captured_values_are_shortened() -> None:
    assert shortened(list(range(30))) == "[0, 1, 2, 3, 4, 5, … 30 in all]"
    assert shortened({"a": [1, 2], "b": None}) == "{a: [1, 2], b: None}"
    assert shortened(0.09180204199947184) == "0.091802"
    assert len(shortened("x" * 1000)) < 200


# The gates ------------------------------------------------------------------------------------------------------------


class FakeHold:
    def __init__(self, lab: "FakeLab", point: str, match: str) -> None:
        self.lab, self.point, self.match, self.stands = lab, point, match, True

    def release(self) -> None:
        self.lab.asked.append(f"{self.point} released")


class FakeLab:
    def __init__(self) -> None:
        self.proxy = SimpleNamespace(process=SimpleNamespace(alive=True))
        self.there: dict[str, str] = {}
        self.asked: list[str] = []
        self.holds: list[FakeHold] = []
        self.looks = 0

    def status(self) -> dict[str, Any]:
        return {"servers": {"proxy": {"up": self.proxy.process.alive}}}

    def held(self) -> dict[str, str]:
        self.looks += 1
        return dict(self.there)

    def hold(self, point: str, match: str = "*") -> FakeHold:
        if match == "bad":
            raise PdlabError("there is no such request", "look again")
        self.asked.append(f"hold {point} {match}")
        self.holds.append(FakeHold(self, point, match))
        return self.holds[-1]

    def release(self) -> None:
        self.asked.append("release all")


def panel_of(lab: Any) -> GatePanel:
    return views.gate_panel(lab)


def test_the_panel_holds_and_releases() -> None:
    lab = FakeLab()
    panel = panel_of(lab)
    panel._point.value, panel._match.value = "before_write", "one-*"
    button(panel, "Hold").click()
    assert lab.asked == ["hold before_write one-*"]
    assert "closed for one-*" in words_of(panel)
    button(panel, "Release").click()
    assert lab.asked[1:] == ["before_write released", "release all"]
    assert "closed for" not in words_of(panel)


def test_a_hold_whose_time_is_up_is_not_shown_any_more() -> None:
    lab = FakeLab()
    panel = panel_of(lab)
    button(panel, "Hold").click()
    assert "closed for *" in words_of(panel)
    lab.holds[0].stands = False
    wait_until(lambda: "closed for" not in words_of(panel))
    panel.close()


def test_the_panel_sees_by_itself_who_is_held_until_it_is_closed() -> None:
    lab = FakeLab()
    panel = panel_of(lab)
    lab.there = {"xfer-1": "before_pull"}
    wait_until(lambda: "holds 1" in words_of(panel) and "xfer-1" in words_of(panel))
    panel.close()
    wait_until(lambda: not watchers(), "the thread's end")


def test_the_panel_stops_when_the_lab_is_down() -> None:
    lab = FakeLab()
    panel = panel_of(lab)
    lab.proxy.process.alive = False
    wait_until(lambda: "the lab is down" in words_of(panel))
    wait_until(lambda: not watchers(), "the thread's end")


def test_the_panel_shows_what_went_wrong() -> None:
    panel = panel_of(FakeLab())
    panel._match.value = "bad"
    button(panel, "Hold").click()
    assert "there is no such request · look again" in words_of(panel)
    panel._match.value = "*"
    button(panel, "Hold").click()
    assert "no such request" not in words_of(panel)


def test_the_panel_of_a_lab_that_is_not_traced_says_so() -> None:
    class Untraced(FakeLab):
        def held(self) -> dict[str, str]:
            raise PdlabError("this lab is not traced")

    panel = panel_of(Untraced())
    assert "this lab is not traced" in words_of(panel) and "before_pull" in words_of(panel)
    wait_until(lambda: not watchers(), "the thread's end")


def test_a_recorded_lab_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    import pdlab

    monkeypatch.setenv("PDLAB_RUN", "recorded")
    panel = panel_of(pdlab.up(report=lambda *_: None))
    assert not watchers()
    assert "before_answer" in words_of(panel)
    panel._match.value = "no-recorded-call-has-this"
    button(panel, "Hold").click()
    assert "⚠" in words_of(panel)


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pdlab-gate-panel"]


# A prediction ---------------------------------------------------------------------------------------------------------


def test_a_prediction_is_judged_in_words_and_signs() -> None:
    asked = views.predict("How many?", ["all", "one"], "one", "the rest <came>")
    assert (asked.chosen, asked.right) == (None, None)
    asked.chosen = "all"
    button(asked, "Check").click()
    assert asked.right is False and "✗" in words_of(asked) and "one" in words_of(asked)
    asked.chosen = "one"
    assert asked.right is None and "✗" not in words_of(asked)
    button(asked, "Check").click()
    assert asked.right is True and "✓" in words_of(asked) and "the rest &lt;came&gt;" in words_of(asked)
    assert repr(asked) == "<prediction: How many?>"


def test_a_prediction_is_not_judged_before_one_is_made() -> None:
    asked = views.predict("How many?", ["all", "one"], "one")
    button(asked, "Check").click()
    assert asked.right is None and "✗" not in words_of(asked)


def test_the_answer_must_be_an_option() -> None:
    with pytest.raises(PdlabError, match="none of the options"):
        views.predict("How many?", ["all"], "one")


# The bench ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", JOURNEYS, ids=lambda path: path.name.partition(".")[0])
def test_the_bench_shows_every_recorded_journey_at_every_step(path: Path) -> None:
    journey = Journey.load(path)
    bench = views.bench(journey)
    followers = (bench.sequence, bench.blocks, bench.status, bench.memory, bench.source)
    for step in range(len(journey.steps)):
        bench.sequence.step = step
        assert {part.step for part in (bench.stepper, *followers)} == {step}
        assert "⚠" not in words_of(bench)
    assert "0x" not in " ".join(repr(part) for part in (bench, bench.stepper, *followers))
    bundle = bundle_of(bench)
    assert bundle["text/plain"] == repr(bench) and "\n" not in repr(bench)
    assert bundle["image/png"] and "application/vnd.jupyter.widget-view+json" in bundle


@pytest.mark.parametrize("where", ["alone", "on the bench"])
def test_a_layer_and_a_descriptor_that_are_clicked_are_shown(where: str, journey: Journey) -> None:
    shown = views.memory_view(journey) if where == "alone" else views.bench(journey).memory
    shown.chosen = "layer 7"
    assert shown.shown.shapes == memory(journey, 7).shapes
    shown.chosen = "descriptor 0"
    assert shown.layer == 7 and shown.shown.shapes == memory(journey, 7, chosen=0).shapes
    shown.chosen = "layer x"  # from a page that is not ours
    assert shown.layer == 7


def test_an_error_of_a_click_is_shown_on_the_bench(journey: Journey) -> None:
    bench = views.bench(journey)
    bench.blocks.chosen = "P block x"
    assert "⚠" in words_of(bench)


def test_the_source_of_a_step(journey: Journey) -> None:
    assert repr(views.source_view(journey, step=1)) == "<source of step 1: Proxy.double_send, pdlab/lab/proxy.py>"
    assert "step 23" in repr(views.source_view(journey))
    with pytest.raises(PdlabError, match="step 99 has not happened"):
        views.source_view(journey, step=99)


def test_the_bench_has_the_gates_of_a_lab(journey: Journey) -> None:
    bench = views.bench(journey, FakeLab())  # type: ignore[arg-type]
    assert isinstance(bench.gates, GatePanel)
    assert "before_pull" in words_of(bench)


def test_the_functions_stay_functions_beside_modules_of_their_names(journey: Journey) -> None:
    assert isinstance(views.bench(journey), Bench) and isinstance(views.bench(journey), Bench)
    assert isinstance(views.stepper(journey), Stepper)
    assert all(callable(getattr(views, name)) for name in views.__all__)


def test_each_view_has_the_journeys_last_step(journey: Journey) -> None:
    for view in (views.sequence_view, views.blocks_view, views.memory_view, views.status_view):
        assert view(journey).last == len(journey.steps) - 1
    assert views.sequence_view(journey, to_scale=True).picture != views.sequence_view(journey).picture
