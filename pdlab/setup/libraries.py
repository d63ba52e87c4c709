"""System libraries that Mooncake is linked against (libibverbs for TCP too) and that no package of Python's brings."""

import ctypes
import os
import shutil
import sys
from pathlib import Path

from pdlab.setup.console import Progress, SetupError, say
from pdlab.setup.runner import run

PREFIX = Path(sys.base_prefix)
LIBRARIES = ("libibverbs.so.1", "libnuma.so.1", "libcurl.so.4")
APT = "apt-get install -y"
CONDA = "conda install -c conda-forge"
# What brings them, in the same order.
PACKAGES = {
    APT: ("libibverbs1", "libnuma1", "libcurl4"),
    "dnf install -y": ("libibverbs", "numactl-libs", "libcurl"),
    "zypper install -y": ("libibverbs1", "libnuma1", "libcurl4"),
    "pacman -S": ("rdma-core", "numactl", "curl"),
    CONDA: ("rdma-core", "libnuma", "libcurl"),
}


def absent() -> list[str]:
    """The libraries that engines wouldn't find."""
    # In conda's folder too: the run path of its Python leads Mooncake there, not always ctypes.
    return [name for name in LIBRARIES if not (_loads(name) or (_conda() and (PREFIX / "lib" / name).exists()))]


def remedy(missing: list[str]) -> str:
    """The command that brings the libraries `missing` to this machine; "" where no package manager is known."""
    managers = [CONDA] if _conda() else [name for name in PACKAGES if name != CONDA and shutil.which(name.split()[0])]
    if not managers:
        return ""
    wanted = [package for name, package in zip(LIBRARIES, PACKAGES[managers[0]], strict=True) if name in missing]
    command = " ".join([managers[0], *wanted])
    if managers[0] == CONDA or os.geteuid() == 0:
        return command
    return f"sudo {command}" if shutil.which("sudo") else f"su -c '{command}'"


def ensure(log: Path) -> None:
    """See to the libraries: as root with apt install them, saying so.

    Raises SetupError with the command to type where that isn't possible.
    """
    missing = absent()
    if not missing:
        return
    command, problem = remedy(missing), ""
    if command.startswith(APT):
        problem = _apt(missing, command, log)
        missing = absent()
    if missing:
        how = f"run `{command}`" if command else "install your system's packages that hold them"
        raise SetupError(f"Mooncake needs {', '.join(missing)}: {how}, then the same command again{problem}")


def _apt(missing: list[str], command: str, log: Path) -> str:
    """Install with apt-get; gives what went wrong, if anything."""
    say(f"Mooncake needs {', '.join(missing)}: installing{command.removeprefix(APT)} with apt-get")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with Progress("apt-get") as progress:
        run(["apt-get", "-q", "update"], log, progress, env=environment)
        result = run([*command.split(), "--no-install-recommends"], log, progress, env=environment)
    return result.error and f" (apt-get: {result.error})"


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _conda() -> bool:
    return (PREFIX / "conda-meta").is_dir()
