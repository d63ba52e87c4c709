"""A profile's virtual environment in the checkout: made once, from the lock, and brought up to a lock that changed."""

import importlib.util
import platform
import shutil
import sys
from pathlib import Path

from pdlab.setup import pins
from pdlab.setup.console import Progress, SetupError
from pdlab.setup.pip import Pip
from pdlab.setup.runner import guard, run

FOLDERS = {"cpu": ".venv", "cuda": ".venv-cuda"}
FETCHED = {"cpu": ("190 MB", "640 MB"), "cuda": ("530 MB", "3.7 GB")}  # over the network: torch, and everything else


class Environment:
    """The virtual environment of one profile in the checkout `repo`."""

    def __init__(self, repo: Path, profile: str) -> None:
        self.repo = repo
        self.profile = profile
        self.folder = repo / FOLDERS[profile]
        self.python = self.folder / "bin" / "python"
        self.notes = self.folder / "pdlab"
        self.log = self.notes / "setup.log"
        self.stamp = self.notes / "stamp"  # the digest of the lock that was installed to the end

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
        if (sys.platform, platform.machine()) != ("linux", "x86_64"):
            here = f"{platform.system()} on {platform.machine()}"
            raise SetupError(f"this is {here}, pdlab's locks are for Linux on x86-64: use such a machine or container")
        with guard(self.notes / "lock", f"another set-up is at work in {self.folder}; waiting for it"):
            if not self.stands:
                self._install()

    def _install(self) -> None:
        # Gone first: a lock that changes and changes back in mid-install must not look installed.
        self.stamp.unlink(missing_ok=True)
        self._sweep()
        with Progress(f"[1/4] a Python environment in {self.folder}") as progress:
            self._create(progress)
        pip, (torch, rest) = Pip(self.python, self.log), FETCHED[self.profile]
        pin = f"torch=={pins.locked(self.profile)['torch']}"
        with Progress(f"[2/4] {pin} (about {torch} to fetch)") as progress:
            pip.install_torch(pin, progress)
        lock = str(pins.lock_path(self.profile))
        with Progress(f"[3/4] vLLM, Mooncake, JupyterLab (about {rest} to fetch)") as progress:
            pip.install("the packages of the lock", "-r", lock, progress=progress, note=self._how_far)
        with Progress("[4/4] pdlab itself") as progress:
            pip.install("pdlab itself", "--no-build-isolation", "-e", str(self.repo), progress=progress)
        self.stamp.write_text(pins.lock_digest(self.profile))

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
