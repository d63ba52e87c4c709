"""Which set of packages this machine gets: `cpu` or `cuda`."""

import os
import shutil
import subprocess
from pathlib import Path

from pdlab.setup.console import SetupError

PROFILES = ("cpu", "cuda")


def choose() -> str:
    """$PDLAB_PROFILE; without it `cuda` where an NVIDIA driver answers, else `cpu`.

    Raises SetupError if $PDLAB_PROFILE names no profile.
    """
    asked = os.environ.get("PDLAB_PROFILE", "")
    if asked and asked not in PROFILES:
        raise SetupError(f"PDLAB_PROFILE is {asked!r}: set it to one of {', '.join(PROFILES)}, or unset it")
    return asked or ("cuda" if nvidia_driver() else "cpu")


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
