"""Which set of packages this machine gets: `cpu` or `cuda`."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from pdlab.setup.console import SetupError

PROFILES = ("cpu", "cuda")


def asked(arguments: Sequence[str]) -> str:
    """The profile that the user asked for, with --profile or else $PDLAB_PROFILE; "" for none.

    Raises SetupError if there is no such profile.
    """
    source, name = _option(arguments) or ("PDLAB_PROFILE", os.environ.get("PDLAB_PROFILE", ""))
    if name and name not in PROFILES:
        raise SetupError(f"{source} is {name!r}: there are the profiles {' and '.join(PROFILES)}")
    return name


def default() -> str:
    """`cuda` where an NVIDIA driver answers, else `cpu`."""
    return "cuda" if nvidia_driver() else "cpu"


def nvidia_driver() -> bool:
    """True where an NVIDIA driver is at work (its device file, or nvidia-smi where there is none, as under WSL)."""
    if Path("/dev/nvidiactl").exists():
        return True
    if not shutil.which("nvidia-smi"):
        return False
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _option(arguments: Sequence[str]) -> tuple[str, str] | None:
    """("--profile", its value), if it is given."""
    for place, word in enumerate(arguments):
        if word == "--profile":
            return word, "".join(arguments[place + 1 : place + 2])
        if word.startswith("--profile="):
            return "--profile", word.partition("=")[2]
    return None
