"""PDLAB_RUN: live engines, live ones that are recorded, or a recorded run; also where no engine could run."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pdlab
from pdlab.errors import PdlabError
from pdlab.lab import lab as live
from pdlab.recorded import player, recorder
from pdlab.recorded.recorder import Recorder
from tests.live import ROOT
from tests.recording import ABOUT, NOTE, PROMPT, FakeLab, sample

WHERE = f"'tiny' of {ABOUT['when']}"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No tape but this test's, and no engines."""
    monkeypatch.setenv("PDLAB_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(recorder, "_recorders", {})
    for module in (recorder, player):
        monkeypatch.setattr(module, "_last", ["journey"])


@pytest.fixture
def tape(tmp_path: Path) -> Path:
    """A run "tiny": a journey that was sent, and one that was held, compared and let go."""
    fake = FakeLab(tmp_path / "trace", "plain", "was_held")
    recording: Any = Recorder(tmp_path / "data" / "tiny.json.gz", ABOUT).take(fake)  # type: ignore[arg-type]
    recording.send(PROMPT, max_tokens=6, fresh=True)
    with recording.hold("before_write") as hold:
        journey = recording.submit(PROMPT, max_tokens=3, fresh=True)
        hold.wait()
        recording.compare(journey).rewritten()
    recording.processes()
    return Path(recording.keep())


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """What live labs were asked for: there are fakes in their place."""
    asked: list[dict[str, Any]] = []

    def up(model: Any = None, profile: Any = None, *, name: str = "default", report: Any = None, **choices: Any) -> Any:
        asked.append({"model": model, "profile": profile, "name": name, "report": report, **choices})
        return FakeLab(tmp_path / "trace", "plain", name=name)

    monkeypatch.setattr(live, "up", up)
    monkeypatch.setattr(live, "attach", lambda name="default": up(name=name))
    return asked


@pytest.mark.parametrize("value", [None, "", "live"])
def test_live_is_as_ever(monkeypatch: pytest.MonkeyPatch, fakes: list[dict[str, Any]], value: str | None) -> None:
    monkeypatch.setenv("PDLAB_RUN", value) if value is not None else monkeypatch.delenv("PDLAB_RUN", raising=False)
    assert isinstance(pdlab.up(run="any name", dtype="bfloat16", name="x"), FakeLab)
    assert isinstance(pdlab.attach("y"), FakeLab)
    assert [each["name"] for each in fakes] == ["x", "y"]
    assert fakes[0] == {"model": None, "profile": None, "name": "x", "report": None, "dtype": "bfloat16"}
    assert not Path(os.environ["PDLAB_DATA"]).exists()


@pytest.mark.parametrize("call", [pdlab.up, pdlab.attach, pdlab.join])
def test_anything_else_is_an_error(monkeypatch: pytest.MonkeyPatch, call: Any) -> None:
    monkeypatch.setenv("PDLAB_RUN", "replay")
    with pytest.raises(PdlabError) as caught:
        call(**({"prefill": "", "decode": "", "bootstrap": ""} if call is pdlab.join else {}))
    assert caught.value.message == "PDLAB_RUN is 'replay'"
    assert caught.value.hint == "choose one of live, recorded, record; unset it for engines that are live"


class TestRecorded:
    @pytest.fixture(autouse=True)
    def recorded(self, monkeypatch: pytest.MonkeyPatch, tape: Path) -> None:
        monkeypatch.setenv("PDLAB_RUN", "recorded")

    def test_up_and_attach_play(self) -> None:
        for lab in (pdlab.up(run="tiny"), pdlab.attach(run="tiny"), pdlab.up(), pdlab.attach()):
            assert lab.send(PROMPT, 6, True).text == sample("plain").text

    def test_a_run_that_is_not_there(self) -> None:
        with pytest.raises(PdlabError, match="no recorded run 'journey'") as caught:
            pdlab.up()
        assert str(caught.value.hint).startswith("there are: tiny; record one")

    def test_settings_that_it_had_and_that_it_had_not(self) -> None:
        same = {"dtype": "float32", "max_model_len": 4096, "prefill_args": [], "profile": "cpu"}
        assert pdlab.up("SmolLM2-135M-Instruct", run="tiny", **same).name == "default"  # type: ignore[arg-type]
        with pytest.raises(PdlabError) as caught:
            pdlab.up(dtype="bfloat16")
        assert caught.value.message == f"the recorded run {WHERE} has dtype float32 (asked for: bfloat16)"
        assert "unset PDLAB_RUN" in str(caught.value.hint)
        with pytest.raises(PdlabError, match="has model"):
            pdlab.up("gpt2")
        with pytest.raises(PdlabError, match="does not take colour"):
            pdlab.up(colour="red")

    def test_a_lab_of_another_name(self) -> None:
        with pytest.raises(PdlabError, match=r"not in the recorded run 'tiny' .*: pdlab.up\('small'\)"):
            pdlab.up(name="small", run="tiny")

    def test_join_is_live_only(self) -> None:
        with pytest.raises(PdlabError, match="live only"):
            pdlab.join(prefill="http://a", decode="http://b", bootstrap="http://c")

    def test_it_says_on_stderr_that_nothing_runs(self, capsys: pytest.CaptureFixture[str]) -> None:
        pdlab.up(run="tiny")
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err == f"    0.0 s  lab      plays the run 'tiny'{NOTE}\n"

    def test_or_to_whom_it_is_told(self, capsys: pytest.CaptureFixture[str]) -> None:
        told: list[Any] = []
        pdlab.up(run="tiny", report=lambda *words: told.append(words))
        assert told == [("lab", f"plays the run 'tiny'{NOTE}", 0.0)] and capsys.readouterr().err == ""

    def test_one_that_is_recorded_anew_is_read_anew(self, tmp_path: Path) -> None:
        assert pdlab.up(run="tiny").prefill.alive
        fake = FakeLab(tmp_path / "trace")
        fake.prefill.alive = False
        path = Recorder(tmp_path / "data" / "tiny.json.gz", ABOUT).take(fake).keep()  # type: ignore[arg-type]
        os.utime(path, ns=(1, 1))
        assert not pdlab.up(run="tiny").prefill.alive


class TestRecord:
    @pytest.fixture(autouse=True)
    def record(self, monkeypatch: pytest.MonkeyPatch, fakes: list[dict[str, Any]]) -> None:
        monkeypatch.setenv("PDLAB_RUN", "record")

    def test_live_and_noted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        lab = pdlab.up(run="new")
        assert lab.send("a").text == sample("plain").text
        monkeypatch.setenv("PDLAB_RUN", "recorded")
        played = pdlab.up(run="new")
        assert played.send("a").text == sample("plain").text
        about = played.send("a").about
        assert about["where"] and about["versions"]["vllm"] == "0.32.0" and about["model"] == "SmolLM2-135M-Instruct"

    def test_labs_of_one_process_share_the_tape_of_the_run_named_last(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pdlab.up(run="new").prefill.metric("x")
        pdlab.up(name="small", decode_args=["--x"]).decode.complete("b")
        pdlab.attach().status()
        monkeypatch.setenv("PDLAB_RUN", "recorded")
        assert pdlab.up(run="new").prefill.metric("x") == 1
        assert pdlab.up(name="small").decode.complete("b").text == " yes"
        assert pdlab.attach().status()["up"]

    def test_a_lab_that_is_not_default_is_another(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pdlab.up(name="small", run="new").decode.metric("x")
        monkeypatch.setenv("PDLAB_RUN", "recorded")
        with pytest.raises(PdlabError, match=r"recorded: pdlab.up\('small'\)"):
            pdlab.up(run="new")

    def test_join_cannot_be_recorded(self) -> None:
        with pytest.raises(PdlabError, match="live only"):
            pdlab.join(prefill="http://a", decode="http://b", bootstrap="http://c")


ABSENT = [
    "vllm", "torch", "mooncake", "fcntl", "psutil", "zmq", "uvicorn", "starlette", "typer", "resource", "termios",
    "pwd", "grp",
]  # fmt: skip
PLAY = """
import sys
for name in ABSENT:
    sys.modules[name] = None
import pdlab
lab = pdlab.up(run="tiny")
prompt = list(range(1000, 1143))
assert lab.send(prompt, max_tokens=6, fresh=True).step(15).says.startswith("7,372,800 bytes")
with lab.hold("before_write") as hold:
    journey = lab.submit(prompt, max_tokens=3, fresh=True)
    assert hold.wait() and journey.held == "before_write" and lab.held()
    comparison = lab.compare(journey)
    assert comparison.equal and not journey.done
assert journey.wait().text and comparison.rewritten()[0].bytes == 3
assert lab.processes()[0].what == "EngineCore" and lab.status()["up"]
assert lab.prefill.command and lab.prefill.facts["vllm_version"] == "0.32.0" and lab.settings.dtype == "float32"
try:
    lab.send("Hello")
except pdlab.PdlabError as error:
    print(error)
assert not {"pdlab.inside", "pdlab.lab.lab", "pdlab.lab.instance", "pdlab.lab.process"} & set(sys.modules)
"""


def test_where_no_engine_could_ever_run(tape: Path) -> None:
    environment = {"PDLAB_RUN": "recorded", "PDLAB_DATA": str(tape.parent), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PLAY.replace("ABSENT", repr(ABSENT))], env=environment, cwd=tape.parent,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == f"this call is not in the recorded run {WHERE}: lab.send('Hello')"
