"""pip, as set-up calls it: never resolving, never asking, its warnings in the log and not on screen."""

import os
from collections.abc import Callable
from pathlib import Path

from pdlab.setup.console import Progress, SetupError, say
from pdlab.setup.runner import Result, run

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
NOT_FOUND = "No matching distribution found"
ENVIRONMENT = {
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_NO_INPUT": "1",
    "PIP_PROGRESS_BAR": "off",
    "PIP_ROOT_USER_ACTION": "ignore",
    # A user-wide `user = true` would refuse to install into a virtual environment.
    "PIP_USER": "0",
}

Pip = Callable[..., Result]


class Installer:
    """pip of one environment: its Python, its log, and the set-up lock that pip holds along with us."""

    def __init__(self, python: Path, log: Path, held: int | None = None) -> None:
        self.python = python
        self.log = log
        self.held = held

    def __call__(self, *arguments: str, progress: Progress, note: Callable[[str], str] = lambda output: "") -> Result:
        """Run pip. -I: a PYTHONPATH of the user's would count as installed what no engine of ours can rely on."""
        command = [str(self.python), "-I", "-m", "pip", *arguments]
        return run(command, self.log, progress, note, {**os.environ, **ENVIRONMENT}, self.held)


def install_torch(pip: Pip, pin: str, progress: Progress) -> None:
    """Install torch as pinned: from where pip's own configuration says, else (a +cpu build) from PyTorch's CPU index.

    Raises SetupError if neither has it.
    """
    first = pip("install", "--no-deps", pin, progress=progress)
    if first.ok:
        return
    if NOT_FOUND not in first.output or "+cpu" not in pin:
        raise failed(pin, first)
    second = pip("install", "--no-deps", "--index-url", CPU_INDEX, pin, progress=progress, note=lambda _: CPU_INDEX)
    if not second.ok:
        raise failed(f"{pin}: neither pip's own configuration nor {CPU_INDEX} gave it", second)


def install_lock(pip: Pip, requirements: Path, total: int, count: Callable[[], int], progress: Progress) -> None:
    """Install every line of `requirements`; `count` tells how many of the `total` packages are there.

    Raises SetupError if pip fails.
    """

    def note(output: str) -> str:
        if "Installing collected packages" not in output:
            return f"fetching {output.count('Collecting ') + output.count('already satisfied')} of {total}"
        return f"installing {count()} of {total}" if count() < total else "compiling"

    result = pip("install", "--no-deps", "-r", str(requirements), progress=progress, note=note)
    if not result.ok:
        raise failed("the packages of the lock", result)


def remove(pip: Pip, names: list[str], progress: Progress) -> None:
    """Uninstall `names`. Raises SetupError if pip fails."""
    say(f"taking out what belongs to the other profile: {', '.join(names)}")
    result = pip("uninstall", "--yes", *names, progress=progress)
    if not result.ok:
        raise failed("taking out the other profile's packages", result)


def add(pip: Pip, pin: str, progress: Progress) -> None:
    """Install one package without what it depends on. Raises SetupError if pip fails."""
    result = pip("install", "--no-deps", pin, progress=progress)
    if not result.ok:
        raise failed(pin, result)


def register(pip: Pip, repo: Path, isolated: bool, progress: Progress) -> None:
    """Install this checkout in editable form, so that vLLM finds its entry points. Raises SetupError if pip fails.

    `isolated`: let pip fetch the build backend, where the environment has none.
    """
    how = [] if isolated else ["--no-build-isolation"]
    result = pip("install", "--no-deps", *how, "-e", str(repo), progress=progress)
    if not result.ok:
        raise failed("pdlab itself", result)


def failed(what: str, result: Result) -> SetupError:
    """The one line for a pip that failed."""
    unreachable = "Retrying (Retry(" in result.output or "Connection" in result.error
    hint = "check the network, then " if unreachable else ""
    return SetupError(f"couldn't install {what}: {result.error}; {hint}run the same command again: it goes on")
