"""libibverbs: Mooncake's library is linked against it, for TCP too; no package of Python's brings it."""

import ctypes
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pdlab.setup.console import Progress, SetupError, say
from pdlab.setup.runner import run

LIBRARY = "libibverbs.so.1"
COMMANDS = {
    "apt-get": "apt-get install -y libibverbs1",
    "dnf": "dnf install -y libibverbs",
    "yum": "yum install -y libibverbs",
    "zypper": "zypper install -y libibverbs1",
    "pacman": "pacman -S rdma-core",
}


@dataclass(frozen=True)
class Remedy:
    """What brings libibverbs: a command, and whether set-up may run it itself."""

    command: str
    automatic: bool = False


def loads() -> bool:
    """True if the library is found where engines look for it; one in a conda environment is put on their path."""
    try:
        ctypes.CDLL(LIBRARY)
        return True
    except OSError:
        return _in_conda()


def _in_conda() -> bool:
    folder = Path(sys.base_prefix) / "lib"
    if not (folder / LIBRARY).exists():
        return False
    others = os.environ.get("LD_LIBRARY_PATH", "")
    os.environ["LD_LIBRARY_PATH"] = f"{folder}:{others}" if others else str(folder)
    return True


def remedy(root: bool, conda: bool, has: Callable[[str], object]) -> Remedy:
    """What to do where the library is missing; `has` tells whether a program is there."""
    if conda:
        return Remedy("conda install -c conda-forge rdma-core")
    manager = next((name for name in COMMANDS if has(name)), None)
    if manager is None:
        return Remedy("")
    command = COMMANDS[manager]
    if root:
        return Remedy(command, automatic=manager == "apt-get")
    return Remedy(f"sudo {command}" if has("sudo") else f"{command} (as root)")


def ensure(log: Path) -> None:
    """See to libibverbs: as root with apt install it, saying so.

    Raises SetupError with the command to type where that isn't possible.
    """
    if loads():
        return
    found = remedy(os.geteuid() == 0, (Path(sys.base_prefix) / "conda-meta").is_dir(), shutil.which)
    if found.automatic:
        _apt(log)
    if loads():
        return
    how = f"run `{found.command}`" if found.command else "install your system's package that holds it (rdma-core)"
    raise SetupError(f"{LIBRARY} is missing, and Mooncake needs it: {how}, then the same command again")


def _apt(log: Path) -> None:
    say("libibverbs.so.1 is missing, and Mooncake needs it: installing Debian's libibverbs1 with apt-get")
    progress = Progress("libibverbs1")
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    run(["apt-get", "-q", "update"], log, progress, env=environment)
    result = run(
        ["apt-get", "-q", "install", "-y", "--no-install-recommends", "libibverbs1"], log, progress, env=environment
    )
    progress.end("done" if result.ok else result.error)
