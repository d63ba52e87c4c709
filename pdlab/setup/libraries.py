"""System libraries that Mooncake is linked against (libibverbs for TCP too) and that no package of Python's brings."""

import ctypes
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pdlab.setup.console import Progress, SetupError, say
from pdlab.setup.runner import run

LIBRARIES = ("libibverbs.so.1", "libnuma.so.1", "libcurl.so.4")
# What brings them, in the same order.
PACKAGES = {
    "apt-get install -y": ("libibverbs1", "libnuma1", "libcurl4"),
    "dnf install -y": ("libibverbs", "numactl-libs", "libcurl"),
    "yum install -y": ("libibverbs", "numactl-libs", "libcurl"),
    "zypper install -y": ("libibverbs1", "libnuma1", "libcurl4"),
    "pacman -S": ("rdma-core", "numactl", "curl"),
    "conda install -c conda-forge": ("rdma-core", "libnuma", "libcurl"),
}
CONDA = "conda install -c conda-forge"
APT = "apt-get install -y"


@dataclass(frozen=True)
class Remedy:
    """What brings the missing libraries: a command, and whether set-up may run it itself."""

    command: str
    automatic: bool = False


def absent() -> list[str]:
    """The libraries that engines wouldn't find; those in a conda environment are put on their path."""
    missing = [name for name in LIBRARIES if not _loads(name)]
    folder = Path(sys.base_prefix) / "lib"
    in_conda = [name for name in missing if _in_conda() and (folder / name).exists()]
    others = os.environ.get("LD_LIBRARY_PATH", "")
    if in_conda and str(folder) not in others.split(":"):
        os.environ["LD_LIBRARY_PATH"] = f"{folder}:{others}" if others else str(folder)
    return [name for name in missing if name not in in_conda]


def remedy(missing: list[str], root: bool, conda: bool, has: Callable[[str], object]) -> Remedy:
    """What to do about the libraries `missing`; `has` tells whether a program is there."""
    managers = [CONDA] if conda else [manager for manager in PACKAGES if has(manager.split()[0])]
    if not managers:
        return Remedy("")
    wanted = [package for name, package in zip(LIBRARIES, PACKAGES[managers[0]], strict=True) if name in missing]
    command = " ".join([managers[0], *wanted])
    if managers[0] == CONDA or root:
        return Remedy(command, automatic=managers[0] == APT)
    return Remedy(f"sudo {command}" if has("sudo") else f"su -c '{command}'")


def ensure(log: Path) -> None:
    """See to the libraries: as root with apt install them, saying so.

    Raises SetupError with the command to type where that isn't possible.
    """
    missing = absent()
    if not missing:
        return
    found = remedy(missing, os.geteuid() == 0, _in_conda(), shutil.which)
    if found.automatic:
        _apt(found.command.split(), missing, log)
        missing = absent()
    if missing:
        how = f"run `{found.command}`" if found.command else "install your system's packages that hold them"
        raise SetupError(f"Mooncake needs {', '.join(missing)}: {how}, then the same command again")


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _in_conda() -> bool:
    return (Path(sys.base_prefix) / "conda-meta").is_dir()


def _apt(command: list[str], missing: list[str], log: Path) -> None:
    say(f"Mooncake needs {', '.join(missing)}: installing {', '.join(command[3:])} with apt-get")
    progress = Progress("apt-get")
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    run(["apt-get", "-q", "update"], log, progress, env=environment)
    result = run([*command, "--no-install-recommends"], log, progress, env=environment)
    progress.end("done" if result.ok else result.error)
