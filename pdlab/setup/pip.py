"""pip, as set-up calls it: never resolving, never asking, its warnings in the log and not on screen."""

import os
from collections.abc import Callable
from pathlib import Path

from pdlab.setup.console import Progress, SetupError
from pdlab.setup.runner import Result, run

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
NOT_FOUND = "No matching distribution found"
ENVIRONMENT = {
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_NO_INPUT": "1",
    "PIP_PROGRESS_BAR": "off",
    "PIP_ROOT_USER_ACTION": "ignore",
    "PIP_USER": "0",  # a user-wide `user = true` would refuse to install into a virtual environment
}

Note = Callable[[str], str]  # what pip printed so far → how far it is


class Pip:
    """`pip install` of one environment: its Python, its log."""

    def __init__(self, python: Path, log: Path) -> None:
        self.python = python
        self.log = log

    def install(self, what: str, *arguments: str, progress: Progress, note: Note = lambda output: "") -> None:
        """Install what `arguments` say. Raises SetupError, which calls it `what`, if pip fails."""
        result = self.run(*arguments, progress=progress, note=note)
        if result.error:
            unreachable = "Retrying (Retry(" in result.output or "Connection" in result.error
            hint = "check the network, then " if unreachable else ""
            raise SetupError(f"couldn't install {what}: {result.error}; {hint}run the same command again: it goes on")

    def install_torch(self, pin: str, progress: Progress) -> None:
        """Install torch as pinned: from where pip's own configuration says, else (a +cpu build) from CPU_INDEX.

        Raises SetupError if neither has it.
        """
        try:
            self.install(pin, pin, progress=progress)
        except SetupError as error:
            if NOT_FOUND not in str(error) or "+cpu" not in pin:
                raise
            what = f"{pin}: neither pip's own configuration nor {CPU_INDEX} gave it"
            self.install(what, "--index-url", CPU_INDEX, pin, progress=progress, note=lambda _: CPU_INDEX)

    def run(self, *arguments: str, progress: Progress, note: Note) -> Result:
        """Run `pip install`. -I: a PYTHONPATH of the user's would count as installed what no engine can rely on."""
        command = [str(self.python), "-I", "-m", "pip", "install", "--no-deps", *arguments]
        return run(command, self.log, progress, note, {**os.environ, **ENVIRONMENT})
