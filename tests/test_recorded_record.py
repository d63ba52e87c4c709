"""`python3 -m pdlab record`: notebooks run on live engines (here: on fakes) and their tapes; and what the scenes do."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from notebooks.refresh import cleaned
from pdlab.errors import PdlabError, RequestError
from pdlab.lab import lab as live
from pdlab.recorded import machine, record, scenes
from pdlab.recorded.player import Run
from pdlab.recorded.tape import Tape
from tests.live import ROOT
from tests.recording import ABOUT, FakeLab

# In the place of engines: what pdlab.up() finds are fakes, where it asks for a live lab.
FAKES = """
import sys, tempfile, pathlib
import pdlab.lab.lab
from pdlab.lab.progress import progress
from tests.recording import PROMPT, FakeLab

def up(*args, **kwargs):
    with progress():
        return FakeLab(pathlib.Path(tempfile.mkdtemp()), "plain", "was_held")

pdlab.lab.lab.up = up
"""
CELLS = (
    'import pdlab\n\nlab = pdlab.up(run="chapter")',
    "lab",
    "journey = lab.send(PROMPT, 6, fresh=True)\njourney",
    "journey.answer",
    'with lab.hold("before_write") as hold:\n    held = lab.submit(PROMPT, 3)\n    hold.wait()\n    print(held)\n'
    "    comparison = lab.compare(held)\ncomparison",
    "held.wait().text",
    "lab.prefill.metric('x')",
    "lab.prefill.metric('x')",
    "lab.prefill.kv(0, 3)",
    "lab.processes()",
    "lab.send(PROMPT, n=2)",
)


def notebook(path: Path, *cells: str) -> Path:
    """A notebook, not run yet; the last cell may fail."""
    code = [nbformat.v4.new_code_cell(cell) for cell in (FAKES, *cells)]
    code[-1].metadata["tags"] = ["raises-exception"]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    path.write_text(nbformat.writes(nbformat.v4.new_notebook(cells=code, metadata=kernel)))
    return path


@pytest.fixture
def chapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("PDLAB_RUN", raising=False)
    return notebook(tmp_path / "chapter.ipynb", *CELLS)


class TestNotebooks:
    def test_a_notebook_is_recorded_to_its_end(self, chapter: Path, tmp_path: Path) -> None:
        record.run_notebook(chapter, tmp_path / "chapter.json.gz")
        tape = Tape.load(tmp_path / "chapter.json.gz")
        made = [call.path for call in tape.calls if not call.spare and call.arguments]
        assert made == ["send", "hold", "submit", "compare", "prefill.metric", "prefill.metric", "prefill.kv", "send"]

    def test_a_journey_that_fills_up_at_its_end_is_whole(self, chapter: Path, tmp_path: Path) -> None:
        """The kernel is told to end, so that the tape is written once more."""
        up = 'import pdlab\nlab = pdlab.up(run="chapter")\nlab.send("b")'
        notebook(chapter, up, "hold = lab.hold('before_write')\nlab.submit('a').held", "hold.release()")
        record.run_notebook(chapter, tmp_path / "chapter.json.gz")
        tape = Tape.load(tmp_path / "chapter.json.gz")
        assert next(call for call in tape.calls if call.path == "submit").result["answer"]["text"]

    def test_its_stored_outputs_are_those_of_the_live_and_of_the_recorded_run(
        self, chapter: Path, tmp_path: Path
    ) -> None:
        """Strict nbval, with the patterns of notebooks/sanitize.cfg: the outputs that were stored live are compared."""
        record.run_notebook(chapter, tmp_path / "chapter.json.gz")
        text = nbformat.read(chapter, as_version=4)
        NotebookClient(text, resources={"metadata": {"path": tmp_path}}).execute()
        chapter.write_text(nbformat.writes(cleaned(text)))
        assert "recorded" not in chapter.read_text()
        assert self.nbval(chapter, PDLAB_RUN="recorded") == (0, "")

        assert self.nbval(chapter, PDLAB_RUN="live") == (0, "")

    def test_other_outputs_are_seen(self, chapter: Path, tmp_path: Path) -> None:
        record.run_notebook(chapter, tmp_path / "chapter.json.gz")
        text = nbformat.read(chapter, as_version=4)
        client = NotebookClient(text, resources={"metadata": {"path": tmp_path}})
        client.execute(env={**os.environ, "PDLAB_RUN": "recorded", "PDLAB_DATA": str(tmp_path)})
        assert "recorded 20" in json.dumps(text)
        chapter.write_text(nbformat.writes(cleaned(text)).replace("5 blocks moved", "4 blocks moved"))
        code, _ = self.nbval(chapter, PDLAB_RUN="recorded")
        assert code == 1

    @staticmethod
    def nbval(chapter: Path, **environment: str) -> tuple[int, str]:
        """Its exit code, and what it says of a difference."""
        command = [
            sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env", "-q", "-p", "no:cacheprovider",
            f"--nbval-sanitize-with={ROOT / 'notebooks' / 'sanitize.cfg'}", "--rootdir", str(chapter.parent),
            str(chapter),
        ]  # fmt: skip
        environment = {**os.environ, "PDLAB_DATA": str(chapter.parent), **environment}
        done = subprocess.run(command, env=environment, cwd=chapter.parent, capture_output=True, text=True, timeout=120)
        return done.returncode, "" if done.returncode == 0 else done.stdout

    def test_one_that_fails_is_named_with_its_last_line(self, chapter: Path, tmp_path: Path) -> None:
        notebook(chapter, 'import pdlab\nlab = pdlab.up(run="chapter")', "assert lab.name == 'other'", "1")
        with pytest.raises(PdlabError, match=r"chapter.ipynb failed: AssertionError"):
            record.run_notebook(chapter, tmp_path / "data" / "chapter.json.gz")

    def test_one_that_does_not_name_its_run_is_told_how(self, chapter: Path, tmp_path: Path) -> None:
        notebook(chapter, "import pdlab\nlab = pdlab.up()", "1")
        (tmp_path / "data").mkdir()
        with pytest.raises(PdlabError) as caught:
            record.run_notebook(chapter, tmp_path / "data" / "chapter.json.gz")
        assert caught.value.message == "chapter.ipynb recorded journey.json.gz, not chapter.json.gz"
        assert caught.value.hint == 'it has to say pdlab.up(run="chapter")'


class TestRecord:
    @pytest.fixture(autouse=True)
    def checkout(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "notebooks").mkdir()
        (tmp_path / "data").mkdir()
        for name in ("01_b", "00_a"):
            (tmp_path / "notebooks" / f"{name}.ipynb").touch()
        monkeypatch.setattr(record, "repo_root", lambda: tmp_path)
        monkeypatch.setenv("PDLAB_DATA", str(tmp_path / "data"))
        monkeypatch.setattr(record, "run_notebook", lambda path, tape: tape.write_bytes(path.name.encode()))
        monkeypatch.setattr(record, "run_scenes", lambda tape: tape.write_bytes(b"scenes"))

    def test_all_runs_in_order(self, tmp_path: Path) -> None:
        told: list[Path] = []
        kept = record.record(tell=told.append)
        assert kept == told == [tmp_path / "data" / f"{name}.json.gz" for name in ("00_a", "01_b", "journey")]
        assert [path.read_text() for path in kept] == ["00_a.ipynb", "01_b.ipynb", "scenes"]

    def test_those_that_are_named(self, tmp_path: Path) -> None:
        assert [path.name for path in record.record(["journey", "00_a"])] == ["journey.json.gz", "00_a.json.gz"]
        assert not (tmp_path / "data" / "01_b.json.gz").exists()

    def test_one_that_does_not_exist(self) -> None:
        with pytest.raises(PdlabError, match="no run 'x'") as caught:
            record.record(["00_a", "x"])
        assert caught.value.hint == "choose of 00_a, 01_b, journey"

    def test_one_that_fails_leaves_its_former_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(path: Path, tape: Path) -> None:
            tape.write_bytes(b"half")
            raise PdlabError("a cell failed")

        (former := tmp_path / "data" / "00_a.json.gz").write_bytes(b"former")
        monkeypatch.setattr(record, "run_notebook", fails)
        with pytest.raises(PdlabError, match="a cell failed"):
            record.record(["00_a"])
        assert former.read_bytes() == b"former"


class SceneLab(FakeLab):
    """Gives each scene the sample that is most like it."""

    def send(self, prompt: Any, max_tokens: int = 16, fresh: bool = False, **body: Any) -> Any:
        if not body.get("n"):
            self.samples.append("plain")
        return super().send(prompt, max_tokens, fresh, **body)

    def hold(self, point: str, match: str = "*", seconds: float | None = None) -> Any:
        self.samples.append("p_first" if point == "before_decode_send" else "was_held")
        return super().hold(point, match, seconds)


def test_scenes_can_be_recorded_and_played_again_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "up", lambda: SceneLab(tmp_path / "trace"))
    record.run_scenes(tmp_path / "journey.json.gz")
    for order in (1, -1):  # no scene depends on what was played before it
        lab = Run("journey", tmp_path / "journey.json.gz").play(None, "up", {})
        results = {name: scene(lab) for name, scene in list(scenes.SCENES.items())[::order]}
        assert list(results)[::order] == [
            "whole",
            "again",
            "fragmented",
            "held",
            "compared",
            "p_first",
            "refused",
            "toured",
        ]
        assert isinstance(results["refused"], RequestError) and results["toured"][1]["single_engine_text"] == " yes"  # type: ignore[index]
        assert results["p_first"].has_text and results["held"].has_text  # type: ignore[attr-defined]


def test_a_scene_fails_where_its_step_never_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenes, "PATIENCE", 0.05)
    lab: Any = FakeLab(tmp_path / "trace", "held")
    monkeypatch.setattr(FakeLab, "_feed", lambda self, whole, journey: journey.fill(whole.events[:5], "x"))
    monkeypatch.setattr("tests.recording.FakeHold.wait", lambda self: [])
    with pytest.raises(PdlabError, match="step 6 has not happened"):
        scenes.p_first(lab)


def test_a_scene_fails_where_the_proxy_takes_what_it_should_refuse(tmp_path: Path) -> None:
    lab: Any = FakeLab(tmp_path / "trace", "plain")
    send = lab.send
    lab.send = lambda prompt, n: send(prompt)
    with pytest.raises(PdlabError, match="took a request for two answers"):
        scenes.refused(lab)


class TestMachine:
    def test_about(self, tmp_path: Path) -> None:
        about = machine.about(FakeLab(tmp_path))  # type: ignore[arg-type]
        assert set(about) == set(ABOUT) and about["profile"] == "cpu" and about["model"] == "SmolLM2-135M-Instruct"
        assert not set("<>\n") & set(about["where"]) and " core" in about["where"]
        assert (
            set(about["versions"]) <= {"vllm", "mooncake", "torch", "pdlab"} and about["versions"]["vllm"] == "0.32.0"
        )

    def test_a_processor(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
        (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: Some CPU @ 2 GHz\nflags : a\n")
        assert machine.processor(tmp_path / "cpuinfo") == "Some CPU @ 2 GHz, 1 core"
        monkeypatch.setattr(machine.platform, "machine", lambda: "aarch64")
        assert machine.processor(tmp_path / "none") == "aarch64, 1 core"

    def test_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        out = subprocess.CompletedProcess([], 0, "NVIDIA X\nNVIDIA X\n", "")
        monkeypatch.setattr(machine.subprocess, "run", lambda *args, **kwargs: out)
        assert machine.gpus() == ["2 × NVIDIA X"]
