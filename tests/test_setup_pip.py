"""pip as set-up calls it: where torch comes from, and what a failure says."""

from pathlib import Path

import pytest

from pdlab.setup.console import Progress, SetupError
from pdlab.setup.pip import CPU_INDEX, NOT_FOUND, Pip
from pdlab.setup.runner import Result

FOUND = Result(0, "Successfully installed torch")
ABSENT = Result(1, f"ERROR: Could not find a version\nERROR: {NOT_FOUND} for torch==2.13.0+cpu")
BROKEN = Result(1, "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device")


class Answers(Pip):
    """A pip that answers with `results`, one a call."""

    def __init__(self, *results: Result) -> None:
        self.results = list(results)
        self.calls: list[tuple[str, ...]] = []

    def run(self, *arguments: str, progress: Progress, note: object = None) -> Result:
        self.calls.append(arguments)
        return self.results.pop(0)


@pytest.fixture
def progress() -> Progress:
    return Progress("step")


def test_pips_own_configuration_is_asked_first(progress: Progress) -> None:
    pip = Answers(FOUND)
    pip.install_torch("torch==2.13.0+cpu", progress)
    assert pip.calls == [("torch==2.13.0+cpu",)]


def test_pytorchs_index_is_asked_where_pips_configuration_has_none(progress: Progress) -> None:
    pip = Answers(ABSENT, FOUND)
    pip.install_torch("torch==2.13.0+cpu", progress)
    assert pip.calls[1] == ("--index-url", CPU_INDEX, "torch==2.13.0+cpu")


def test_neither_is_one_line_that_names_both(progress: Progress) -> None:
    with pytest.raises(SetupError, match=CPU_INDEX) as caught:
        Answers(ABSENT, ABSENT).install_torch("torch==2.13.0+cpu", progress)
    assert "\n" not in str(caught.value)


def test_another_failure_asks_no_other_index(progress: Progress) -> None:
    pip = Answers(BROKEN)
    with pytest.raises(SetupError, match="No space left on device"):
        pip.install_torch("torch==2.13.0+cpu", progress)
    assert len(pip.calls) == 1


def test_a_cuda_torch_never_comes_from_the_cpu_index(progress: Progress) -> None:
    pip = Answers(ABSENT)
    with pytest.raises(SetupError):
        pip.install_torch("torch==2.13.0", progress)
    assert len(pip.calls) == 1


def test_an_unreachable_network_is_named(progress: Progress) -> None:
    pip = Answers(Result(1, "WARNING: Retrying (Retry(total=0)) after connection broken\nERROR: No matching x"))
    with pytest.raises(SetupError, match="the lock: No matching x; check the network"):
        pip.install("the lock", "-r", "x", progress=progress)


def test_pip_resolves_nothing_and_runs_apart_from_the_users_python_path(
    progress: Progress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_USER", "1")
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@" user=$PIP_USER\nexit 3\n')
    python.chmod(0o755)
    pip = Pip(python, tmp_path / "log")
    result = pip.run("x", progress=progress, note=lambda output: "")
    assert result == Result(3, "-I -m pip install --no-deps x user=0\n")
    assert (tmp_path / "log").read_text() == result.output
    with pytest.raises(SetupError, match="couldn't install it: -I -m pip"):
        pip.install("it", "x", progress=progress)
