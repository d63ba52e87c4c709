"""A virtual environment in the checkout: made once, from a lock, and brought up to a lock that changed.

There is one for each profile, with engines; and a light one without, in which recorded runs play.
"""

import importlib.util
import platform
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pdlab.setup import pins
from pdlab.setup.console import Progress, SetupError
from pdlab.setup.pip import Pip
from pdlab.setup.profile import PROFILES
from pdlab.setup.runner import guard, run

LIGHT = "recorded"  # in place of a profile
FOLDERS = {"cpu": ".venv", "cuda": ".venv-cuda", LIGHT: ".venv-recorded"}
TORCH = {"cpu": "190 MB", "cuda": "530 MB"}  # to fetch over the network…
REST = {"cpu": "640 MB", "cuda": "3.7 GB", LIGHT: "90 MB"}  # …and everything else

Step = tuple[str, Callable[[Progress], None]]  # its title, and what it does


class Environment:
    """The virtual environment of one profile, or LIGHT, in the checkout `repo`."""

    def __init__(self, repo: Path, profile: str) -> None:
        self.repo = repo
        self.profile = profile
        self.folder = repo / FOLDERS[profile]
        self.python = self.folder / "bin" / "python"
        self.notes = self.folder / "pdlab"
        self.log = self.notes / "setup.log"
        self.stamp = self.notes / "stamp"  # the digest of the lock that was installed to the end

    @property
    def _engines(self) -> bool:
        return self.profile in PROFILES

    @property
    def _pip(self) -> Pip:
        return Pip(self.python, self.log)

    @property
    def sites(self) -> list[str]:
        """Its site-packages folder, in a list; empty before it is made."""
        return [str(folder) for folder in self.folder.glob("lib/python3.*/site-packages")]

    @property
    def runs_us(self) -> bool:
        """True if this very interpreter is the environment's."""
        return Path(sys.prefix).resolve() == self.folder.resolve()

    @property
    def stands(self) -> bool:
        """True if the lock, as it is today, was installed to the end and pdlab is registered: a run starts at once."""
        made = self.python.exists() and self.stamp.is_file() and pins.registered(self.repo, self.sites)
        return made and self.stamp.read_text() == pins.lock_digest(self.profile)

    def ensure(self) -> None:
        """Bring the environment up to the lock; what an interrupted run has installed is kept.

        Raises SetupError with one line if that fails.
        """
        if self.stands:
            return
        if self._engines and (sys.platform, platform.machine()) != ("linux", "x86_64"):
            here = f"{platform.system()} on {platform.machine()}"
            raise SetupError(
                f"this is {here}, pdlab's engines are for Linux on x86-64: use such a machine or container, "
                "or PDLAB_RUN=recorded, which plays recorded runs"
            )
        with guard(self.notes / "lock", f"another set-up is at work in {self.folder}; waiting for it"):
            if not self.stands:
                self._install()

    def _install(self) -> None:
        # Gone first: a lock that changes and changes back in mid-install must not look installed.
        self.stamp.unlink(missing_ok=True)
        self._sweep()
        steps = self._steps()
        for number, (title, act) in enumerate(steps, 1):
            with Progress(f"[{number}/{len(steps)}] {title}") as progress:
                act(progress)
        self.stamp.write_text(pins.lock_digest(self.profile))

    def _steps(self) -> list[Step]:
        steps: list[Step] = [(f"a Python environment in {self.folder}", self._create)]
        packages = "vLLM, Mooncake, JupyterLab" if self._engines else "JupyterLab, what plays recorded runs, the tests"
        if self._engines:
            pin = f"torch=={pins.locked(self.profile)['torch']}"
            steps.append((f"{pin} (about {TORCH[self.profile]} to fetch)", partial(self._pip.install_torch, pin)))
        steps.append((f"{packages} (about {REST[self.profile]} to fetch)", self._install_lock))
        return [*steps, ("pdlab itself", self._register)]

    def _install_lock(self, progress: Progress) -> None:
        lock = str(pins.lock_path(self.profile))
        self._pip.install("the packages of the lock", "-r", lock, progress=progress, note=self._how_far)

    def _register(self, progress: Progress) -> None:
        self._pip.install("pdlab itself", "--no-build-isolation", "-e", str(self.repo), progress=progress)

    def _sweep(self) -> None:
        """Take out the records of packages that a killed pip hadn't finished: RECORD is what it writes last."""
        for record in self._records():
            if not (record / "RECORD").is_file():
                shutil.rmtree(record)

    def _create(self, progress: Progress) -> None:
        if self.python.exists() and pins.find("pip", self.sites):
            return
        if not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):  # Debian splits them off
            raise SetupError(
                f"{sys.executable} can't make virtual environments: run `apt-get install python3-venv` as root "
                "(elsewhere: your Python's venv package), then the same command again"
            )
        result = run([sys.executable, "-I", "-m", "venv", str(self.folder)], self.log, progress)
        if result.error:
            raise SetupError(f"couldn't make {self.folder}: {result.error}; remove that folder and try again")

    def _how_far(self, output: str) -> str:
        total = len(pins.locked(self.profile))
        if "Installing collected packages" in output:
            return f"installing {min(len(self._records()), total)} of {total}"
        return f"fetching {min(output.count('Collecting ') + output.count('already satisfied'), total)} of {total}"

    def _records(self) -> list[Path]:
        return [record for site in self.sites for record in Path(site).glob("*.dist-info")]
