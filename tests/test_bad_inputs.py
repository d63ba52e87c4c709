"""Whatever a reader gives that cannot be: one line that says what to do, the right exit code, nothing left behind."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pdlab
from pdlab import views
from pdlab.errors import PdlabError
from pdlab.lab import profile
from pdlab.lab.instance import Instance
from pdlab.lab.lab import Lab
from pdlab.lab.proxy_server import ProxyServer
from pdlab.recorded.record import chosen
from pdlab.source.drift import main as drift
from pdlab.trace.journey import Journey
from pdlab.trace.trace import Trace, read
from tests.recording import SETTINGS, FakeInstance, sample

DOWN = "http://127.0.0.1:9"  # nobody listens there
WRONG: tuple[Any, ...] = (None, "x", 3, [], Journey)


def refused(call: Callable[[], Any]) -> str:
    """The one line of what it raised; beneath it stands what to do."""
    with pytest.raises(PdlabError) as error:
        call()
    assert error.value.message and "\n" not in error.value.message and error.value.hint
    return error.value.message


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """A lab that is down."""
    p, d = Instance("prefill", DOWN, DOWN, token="x"), Instance("decode", DOWN, token="x")
    ended = SimpleNamespace(alive=False, pids=list, log="proxy.log", why_ended=lambda: "it was told to")
    (tmp_path / "trace").mkdir()
    return Lab("default", SETTINGS, p, d, ProxyServer(DOWN, ended), trace_folder=tmp_path / "trace")  # type: ignore[arg-type]


# Requests -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [None, 3, "", [], b"x", {"a": 1}, object(), "\ud800", [float("nan")], range(5)])
@pytest.mark.parametrize("call", ["send", "submit", "complete"])
def test_a_prompt_that_is_none(lab: Lab, call: str, prompt: Any) -> None:
    assert "does not answer" not in refused(lambda: getattr(lab.decode if call == "complete" else lab, call)(prompt))


@pytest.mark.parametrize(
    "asked",
    [
        {"max_tokens": None}, {"max_tokens": 0}, {"max_tokens": -1}, {"max_tokens": 1.5}, {"max_tokens": "x"},
        {"max_tokens": True}, {"temperature": float("nan")}, {"stop": object()}, {"stream": True},
        {"request_id": 3}, {"request_id": "é"}, {"request_id": "a\nb"}, {"request_id": " a"}, {"request_id": "a "},
        {"request_id": " "},
    ],
)  # fmt: skip
def test_a_request_that_cannot_be(lab: Lab, asked: dict[str, Any]) -> None:
    for call in (lab.send, lab.submit):
        assert "does not answer" not in refused(lambda call=call: call("Hello", **asked))  # type: ignore[misc]


@pytest.mark.parametrize("prompt", ["é 🙂 中文", [1, 2, 3], "x" * 1_000_000])
def test_what_can_be_sent_is_sent(lab: Lab, prompt: Any) -> None:
    for call in (lab.send, lab.decode.complete, lambda p: lab.submit(p).wait(5)):
        assert "does not answer" in refused(lambda call=call: call(prompt))  # type: ignore[misc]


class Whole:
    """A whole number that is none of Python's, as numpy has them; JSON does not take it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        return self.number


def test_a_whole_number_may_be_of_another_kind(lab: Lab) -> None:
    for call in (lab.send, lab.decode.complete, lambda *asked: lab.submit(*asked).wait(5)):
        assert "does not answer" in refused(lambda call=call: call("x", Whole(3)))  # type: ignore[misc]


@pytest.mark.parametrize("name", ["max_model_len", "abort_timeout", "block_size", "kv_cache_bytes"])
def test_so_it_may_in_a_setting(name: str) -> None:
    chosen = profile.settings("org/name", "cpu", **{name: Whole(1 << 20)})  # type: ignore[arg-type]
    assert json.loads(json.dumps(chosen.as_dict()))[name] == 1 << 20


def test_whatever_goes_wrong_in_its_thread_reaches_who_waits(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdlab.lab.journeys.complete", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        lab.submit("Hello").wait(5)


# A lab ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda lab: lab.reset(), lambda lab: lab.usage(), lambda lab: lab.prefill.metric("x"),
        lambda lab: lab.prefill.bootstrap_query(), lambda lab: lab.decode.bootstrap_query(),
        lambda lab: lab.decode.facts, lambda lab: lab.decode.registered_kv, lambda lab: lab.decode.kv(0, 0),
        lambda lab: lab.decode.kv_digests([0], [0]), lambda lab: lab.decode.metric(None),
    ],
)  # fmt: skip
def test_a_lab_that_is_down(lab: Lab, call: Callable[[Lab], Any]) -> None:
    refused(lambda: call(lab))
    assert not lab.status()["up"]


@pytest.mark.parametrize("point", [None, 3, "", "nowhere", [], {}])
def test_a_hold_at_no_point(lab: Lab, point: Any) -> None:
    assert "there is no gate" in refused(lambda: lab.hold(point))


@pytest.mark.parametrize(
    "how", [{"match": None}, {"match": 3}, {"match": ""}, {"seconds": 0}, {"seconds": "x"}, {"seconds": float("inf")}]
)
def test_a_hold_that_cannot_be_leaves_nothing(lab: Lab, how: dict[str, Any]) -> None:
    refused(lambda: lab.hold("before_write", **how))
    assert lab.trace_folder and not list(lab.trace_folder.rglob("*.*"))


@pytest.mark.parametrize("how", [{"count": None}, {"count": "x"}, {"count": -1}, {"seconds": None}, {"seconds": "x"}])
def test_waiting_for_a_hold(lab: Lab, how: dict[str, Any]) -> None:
    with lab.hold("before_write") as hold:
        refused(lambda: hold.wait(**how))


@pytest.mark.parametrize("journey", [*WRONG, Journey("x"), sample("plain")])
def test_comparing_what_is_not_held(lab: Lab, journey: Any) -> None:
    refused(lambda: lab.compare(journey))


@pytest.mark.parametrize("place", [(None, 0), ("x", 0), (0, -1), (1.5, 0), (0, object())])
def test_no_block(lab: Lab, place: Any) -> None:
    assert "is" in refused(lambda: lab.decode.kv(*place)).split()
    refused(lambda: lab.decode.kv_digests([place[1]], [place[0]]))


def test_no_list_of_blocks(lab: Lab) -> None:
    for blocks, layers in ((None, None), (3, [0]), ("x", [0]), ([0], 3), ([0], "x")):
        refused(lambda blocks=blocks, layers=layers: lab.decode.kv_digests(blocks, layers))  # type: ignore[misc]


def test_no_bytes() -> None:
    block = FakeInstance("decode").kv(0, 0)
    for call in (lambda: block.hexdump("x"), lambda: block.hexdump(-1), lambda: block.differing(None)):  # type: ignore[arg-type]
        refused(call)


# Bringing one up ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_model_len": 1.5}, {"max_model_len": "x"}, {"max_model_len": True}, {"abort_timeout": 1.5},
        {"block_size": "x"}, {"kv_cache_bytes": "x"}, {"dtype": 3}, {"dtype": "nope"}, {"model": 3},
        {"model": "/nope"}, {"model": Path("/nope")}, {"model": "~nobody-here/x"}, {"profile": "é"}, {"protocol": 3},
        {"prefill_args": [3]},
    ],
)  # fmt: skip
def test_settings_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(PdlabError):
        profile.settings(**{"model": "org/name", "profile": "cpu", **wrong})


@pytest.mark.parametrize("name", [None, 3, "", "a/b", "é!", "x" * 300, ".x"])
def test_no_name_of_a_lab(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDLAB_RUN", "live")
    assert "cannot be called" in refused(lambda: pdlab.attach(name))


def test_a_place_where_no_lab_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pdlab.lab.record import locked

    (tmp_path / "file").touch()
    monkeypatch.setenv("PDLAB_STATE", str(tmp_path / "file"))
    assert "cannot make a folder" in refused(locked("default").__enter__)


@pytest.mark.parametrize("url", [None, 3, "x", "http://", "http://a b:x", b"http://a", "ftp://a"])
def test_no_url(url: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDLAB_RUN", "live")
    assert "is not a URL" in refused(lambda: pdlab.join(prefill=url, decode=DOWN, bootstrap=DOWN))


@pytest.mark.parametrize("run", [3, "", "a/b", "none"])
def test_no_recorded_run(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PDLAB_RUN", "recorded")
    monkeypatch.setenv("PDLAB_DATA", str(tmp_path))
    assert "recorded run" in refused(lambda: pdlab.up(run=run or " "))


@pytest.mark.parametrize(
    "call",
    [
        lambda lab: lab.send(None), lambda lab: lab.send(object()), lambda lab: lab.submit("x", -1),
        lambda lab: lab.hold("nowhere"), lambda lab: lab.hold([]), lambda lab: lab.compare(None),
        lambda lab: lab.prefill.kv("x", -1), lambda lab: lab.decode.kv_digests(3), lambda lab: lab.prefill.process,
        lambda lab: lab.decode.complete({"a": object()}), lambda lab: lab.decode.metric("none"),
    ],
)  # fmt: skip
def test_a_recorded_lab(call: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDLAB_RUN", "recorded")
    refused(lambda: call(pdlab.up(run="journey", report=lambda *_: None)))
    refused(lambda: pdlab.up(name=object(), report=lambda *_: None))  # type: ignore[arg-type]


# Journeys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [None, "x", 0, -1, 24, [], 1.5])
def test_no_step(number: Any) -> None:
    refused(lambda: sample("plain").step(number))
    refused(lambda: Journey("x", feed=lambda _: None).until(number))  # at once: nobody waits ten seconds for it


@pytest.mark.parametrize("seconds", [None, "x", [], float("nan")])
def test_no_seconds(seconds: Any) -> None:
    refused(lambda: sample("plain").wait(seconds))
    refused(lambda: sample("plain").until(3, seconds))


def test_nothing_more_comes_of_a_journey_that_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("it waited"))
    assert "step 23 has not happened" in refused(lambda: Journey("x").until(23))


@pytest.mark.parametrize("path", [None, 3, "", "\0", "none/x.json", "."])
def test_no_file(path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused(lambda: sample("plain").save(path))
    refused(lambda: Trace([sample("plain")], []).save_chrome_trace(path))
    refused(lambda: Journey.load(path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fields", [None, 3, "", [], {}, {"schema": 9}, {**sample("plain").as_dict(), "about": 3}])
def test_no_journey(fields: Any) -> None:
    refused(lambda: Journey.from_dict(fields))


def test_no_trace(tmp_path: Path) -> None:
    for folder, since in ((None, 0), (3, 0), (tmp_path, "x"), (tmp_path, None)):
        refused(lambda folder=folder, since=since: read(folder, since))  # type: ignore[misc]
    assert len(read(str(tmp_path))) == 0


# Views ----------------------------------------------------------------------------------------------------------------

OF_A_JOURNEY = (
    views.stepper, views.sequence_view, views.blocks_view, views.memory_view, views.status_view, views.source_view,
    views.bench,
)  # fmt: skip


@pytest.mark.parametrize("view", [*OF_A_JOURNEY, views.timeline_view, views.gate_panel])
def test_a_view_of_something_else(view: Callable[[Any], Any]) -> None:
    for wrong in WRONG:
        assert "this is no" in refused(lambda wrong=wrong: view(wrong))  # type: ignore[misc]


@pytest.mark.parametrize("view", OF_A_JOURNEY)
def test_a_view_of_a_journey_that_is_empty_or_under_way(view: Callable[[Any], Any]) -> None:
    whole = sample("plain")
    for events in ([], whole.events[:9], [event for event in whole.events if event.actor.startswith("D")]):
        assert repr(view(Journey("x", events, transfer_id=whole.transfer_id, feed=lambda _: None)))


def test_a_view_with_something_else() -> None:
    journey = sample("plain")
    for call in (
        lambda: views.blocks_view(journey, "x"), lambda: views.bench(journey, None, 3),
        lambda: views.bench(journey, "x"), lambda: views.memory_view(journey, 99),  # type: ignore[arg-type]
        lambda: views.memory_view(journey, []), lambda: views.memory_view(journey, None),  # type: ignore[arg-type]
    ):  # fmt: skip
        refused(call)


@pytest.mark.parametrize(
    "asked",
    [
        ("q", ["a"], "b"), ("q", [], "x"), ("q", "abc", "b"), ("q", [1, 2], 1), ("q", None, "a"), (3, ["a"], "a"),
        ("q", ["a"], "a", 3), (None, None, None),
    ],
)  # fmt: skip
def test_no_question(asked: Any) -> None:
    refused(lambda: views.predict(*asked))


# Commands -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["", "nonsense", "1;2", "--help"])
def test_no_version_to_compare_with(version: str) -> None:
    assert "is no version" in refused(lambda: drift(version, False))


def test_no_run_to_record() -> None:
    assert "there is no run 'nope'" in refused(lambda: chosen(["journey", "nope"]))
    assert chosen() == chosen(chosen())


def command(tmp_path: Path, words: list[str], run: str) -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, "PDLAB_RUN": run, "PDLAB_STATE": str(tmp_path / "state")}
    return subprocess.run(
        [sys.executable, "-m", "pdlab", *words], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "run", "code", "line"),
    [
        (["status"], "nonsense", 1, "pdlab: PDLAB_RUN is 'nonsense'"),
        (["claims"], "recorded", 1, "pdlab: claims needs engines"),
        (["serve", "prefill"], "recorded", 1, "pdlab: serve needs engines"),
        (["send", "é 🙂"], "recorded", 1, "pdlab: this call is not in the recorded run"),
        (["send", ""], "recorded", 1, "pdlab: this call is not in the recorded run"),
        (["send", "hi", "--max-tokens", "0"], "recorded", 2, "Invalid value for '--max-tokens'"),
        (["send", "hi", "--max-tokens", "x"], "recorded", 2, "Invalid value for '--max-tokens'"),
        (["up"], "recorded", 1, "pdlab: up needs engines"),
        (["tour", "--model", "é"], "recorded", 1, "pdlab: the recorded run"),
        (["drift", "--against", "nonsense"], "recorded", 1, "pdlab: there is no vLLM nonsense"),
        (["nope"], "recorded", 2, "No such command 'nope'"),
        (["status", "--name", "../x"], "live", 1, "pdlab: a lab cannot be called '../x'"),
        (["send", "hi"], "live", 1, "pdlab: no lab 'default' is running"),
        (["send", "hi", "--name", "a b"], "live", 1, "pdlab: a lab cannot be called 'a b'"),
        (["down", "--name", ""], "live", 1, "pdlab: a lab cannot be called ''"),
    ],
)
def test_a_command_says_it_in_one_line(tmp_path: Path, words: list[str], run: str, code: int, line: str) -> None:
    ended = command(tmp_path, words, run)
    assert ended.returncode == code and line in ended.stderr and "Traceback" not in ended.stderr
    assert not ended.stdout and not (tmp_path / "state").exists()


def test_status_and_down_where_there_is_no_lab(tmp_path: Path) -> None:
    status, down = command(tmp_path, ["status"], "live"), command(tmp_path, ["down"], "live")
    assert (status.returncode, down.returncode) == (1, 0)
    assert "is not running" in status.stdout and "was not running" in down.stdout
    assert not (tmp_path / "state").exists()
