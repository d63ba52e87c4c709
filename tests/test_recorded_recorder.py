"""Noting the calls of a live lab (here: of fakes) on a tape."""

import inspect
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from pdlab.errors import PdlabError, RequestError
from pdlab.lab.comparison import Comparison
from pdlab.lab.instance import Instance
from pdlab.lab.lab import Lab
from pdlab.lab.proxy_server import ProxyServer
from pdlab.recorded.player import Run
from pdlab.recorded.recorder import CONSTANT, NOTED, SPARE, Recorder, Recording
from pdlab.recorded.tape import Call, Tape
from tests.live import ROOT
from tests.recording import ABOUT, PROMPT, FakeLab, sample


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "run.json.gz"


def recording(path: Path, *samples: str) -> tuple[Recording, FakeLab]:
    live = FakeLab(path.parent.parent / "trace", *samples)
    return Recorder(path, ABOUT).take(live), live  # type: ignore[arg-type]


def made(path: Path) -> list[Call]:
    """The calls that somebody made."""
    constant = {prefix + name for prefix, names in CONSTANT.items() for name in names}
    return [call for call in Tape.load(path).calls if not call.spare and call.path not in {"up", *constant}]


def test_results_are_those_of_the_live_lab(path: Path) -> None:
    lab, live = recording(path, "plain")
    journey = lab.send(PROMPT, 6, fresh=True)
    assert journey is live.sent[0]
    assert lab.prefill.metric("x", source="y") == 1.0
    assert lab.decode.kv_digests([3], layers=[4]) == [["4:3"]]
    assert (lab.prefill.alive, lab.prefill.role, lab.name, lab.decode.token) == (True, "prefill", "default", "a secret")
    assert repr(lab) == repr(live)
    assert "keep" in dir(lab) and "submit" in dir(lab)


def test_each_call_is_on_the_tape_at_once(path: Path) -> None:
    lab, _ = recording(path, "plain")
    assert made(path) == []
    lab.send(PROMPT, max_tokens=6, request_id="mine", fresh=True)
    assert [(call.path, call.arguments) for call in made(path)] == [
        ("send", {"prompt": PROMPT, "max_tokens": 6, "fresh": True})
    ]
    lab.prefill.metric("vllm:x")
    _ = lab.proxy.alive
    paths = [call.path for call in made(path)]
    assert paths == ["send", "prefill.metric", "proxy.alive"]


def test_errors_are_noted_and_raised(path: Path) -> None:
    lab, _ = recording(path)
    with pytest.raises(RequestError, match="more than one answer"):
        lab.send(PROMPT, n=2)
    with pytest.raises(PdlabError, match="no metric"):
        lab.prefill.metric("none")
    refused, absent = made(path)
    assert refused.error["type"] == "RequestError" and refused.error["status"] == 400 and refused.result is None
    assert absent.error["message"] == "it has no metric none"


def test_a_mistaken_call_is_a_mistake_and_not_noted(path: Path) -> None:
    lab, _ = recording(path)
    with pytest.raises(TypeError):
        lab.send()
    for name in ("sendd", "_feed"):  # the one is not there, the other is nobody's business
        with pytest.raises(AttributeError):
            getattr(lab, name)
    assert made(path) == []


def test_what_is_not_noted_passes(path: Path) -> None:
    lab, live = recording(path)
    with lab as same:
        assert same is lab
    assert live.ended and lab.trace_folder is live.trace_folder and made(path) == []


def test_a_journey_is_kept_as_it_is_when_the_tape_is(path: Path) -> None:
    lab, _ = recording(path, "was_held")
    with lab.hold("before_write") as hold:
        journey = lab.submit(PROMPT, 3)
        assert hold.wait() and journey.held == "before_write"
        before = len(made(path)[1].result["events"])
    assert len(made(path)[1].result["events"]) == before  # nobody has kept it since
    lab.keep()
    stored = made(path)[1].result
    assert len(stored["events"]) == len(sample("was_held").events) > before
    assert stored["answer"]["text"] == sample("was_held").text


def test_a_hold_is_the_live_one(path: Path) -> None:
    lab, live = recording(path)
    with lab.hold("before_write", seconds=7) as hold:
        assert hold is live.standing[0]
    assert made(path)[0].arguments == {"point": "before_write", "seconds": 7}
    assert made(path)[0].result == {"$": "Hold", "point": "before_write", "match": "*", "seconds": 7, "name": hold.name}


def test_a_comparison_can_be_asked_what_was_rewritten(path: Path) -> None:
    lab, _ = recording(path, "held")
    comparison = lab.compare(lab.send(PROMPT))
    assert isinstance(comparison, Comparison) and isinstance(lab, FakeLab)
    assert comparison.equal and comparison.rewritten()[0].bytes == 3
    assert [call.path for call in made(path)] == ["send", "compare", "compare().rewritten"]


def test_there_is_no_secret_on_the_tape(path: Path) -> None:
    lab, _ = recording(path)
    _ = lab.prefill.token
    assert "a secret" not in json.dumps([vars(call) for call in Tape.load(path).calls])


def test_a_reader_finds_what_nobody_asked_for(path: Path) -> None:
    recording(path)
    calls = {call.path: call for call in Tape.load(path).calls}
    for table, spare in ((CONSTANT, False), (SPARE, True)):
        for prefix, names in table.items():
            assert all(calls[prefix + name].spare == spare for name in names)


def test_what_a_reader_does_to_a_result_is_not_recorded(path: Path) -> None:
    lab, _ = recording(path)
    lab.status().pop("up")
    lab.keep()
    assert made(path)[0].result["up"] is True


def test_what_cannot_be_recorded_is_said_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeLab, "status", lambda self: {1, 2} if self.ended else {})
    lab, live = recording(path)
    live.ended = True
    with pytest.raises(PdlabError, match="a set cannot be recorded"):
        lab.status()


def test_calls_of_several_threads_are_all_noted(path: Path) -> None:
    lab, _ = recording(path)
    threads = [threading.Thread(target=lab.decode.complete, args=(f"prompt {i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(call.arguments["prompt"] for call in made(path)) == [f"prompt {i}" for i in range(8)]


PUBLIC = {
    "": (Lab, {"name", "settings", *CONSTANT[""]}, {"prefill", "decode", "proxy", "started", "trace_folder"}),
    "prefill.": (Instance, set(CONSTANT["prefill."]), {"process", "token", "log"}),
    "proxy.": (ProxyServer, set(CONSTANT["proxy."]), {"process", "log"}),
}
# Worked out from what is noted: of the journeys' events, of the facts; or nothing to play.
DERIVED = {"": {"engines", "held", "release", "down"}, "prefill.": {"engine_id", "registered_kv"}, "proxy.": set()}


@pytest.mark.parametrize("prefix", PUBLIC)
def test_everything_a_live_object_has_is_noted_derived_or_named_as_live_only(prefix: str) -> None:
    kind, constant, live_only = PUBLIC[prefix]
    fields = {name for name in getattr(kind, "__dataclass_fields__", {}) if not name.startswith("_")}
    public = fields | {name for name in vars(kind) if not name.startswith("_")}
    assert public == ({*NOTED[prefix], *constant, *live_only, *DERIVED[prefix]} - {"__repr__"})


def test_the_tape_is_written_when_the_interpreter_ends(tmp_path: Path) -> None:
    """And so it is where a notebook's kernel is told to end (nbclient)."""
    code = f"""
import pdlab.lab.lab
from pathlib import Path
from tests.recording import FakeLab
pdlab.lab.lab.up = lambda *args, **kwargs: FakeLab(Path({str(tmp_path)!r}) / "trace", "was_held")
import pdlab
lab = pdlab.up(run="ends")
hold = lab.hold("before_write")
hold.__enter__()
journey = lab.submit("a")
assert journey.held
hold.release()
"""
    environment = {"PATH": "/usr/bin:/bin", "PDLAB_RUN": "record", "PDLAB_DATA": str(tmp_path), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, check=True, timeout=60)
    tape = Tape.load(tmp_path / "ends.json.gz")
    assert {"vllm", "torch", "mooncake", "pdlab"} >= set(tape.about["versions"]) >= {"vllm", "pdlab"}
    assert tape.about["model"] == "SmolLM2-135M-Instruct" and tape.about["profile"] == "cpu"
    submitted: Any = Run("ends", tmp_path / "ends.json.gz").play(0, "submit", {"prompt": "a"})
    assert submitted.text == sample("was_held").text


def test_signatures_can_be_asked(path: Path) -> None:
    lab, _ = recording(path)
    assert list(inspect.signature(lab.send).parameters) == ["prompt", "max_tokens", "fresh", "body"]
