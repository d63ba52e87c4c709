"""Which set of packages this machine gets: `cpu` or `cuda`."""

import os
import subprocess
from collections.abc import Sequence
from itertools import pairwise

from pdlab.setup.console import SetupError

PROFILES = ("cpu", "cuda")
NO_GPU = "the cuda profile needs a GPU and none is visible: use --profile cpu: same engines, same connector, TCP"


def asked(arguments: Sequence[str]) -> str:
    """The profile that the user asked for, with --profile or else $PDLAB_PROFILE; "" for none.

    Raises SetupError if there is no such profile.
    """
    source, name = "PDLAB_PROFILE", os.environ.get("PDLAB_PROFILE", "")
    for word, following in pairwise([*arguments, ""]):
        if word.partition("=")[0] == "--profile":
            source, name = "--profile", word.partition("=")[2] if "=" in word else following
    if name and name not in PROFILES:
        raise SetupError(f"{source} is {name!r}: there are the profiles {' and '.join(PROFILES)}")
    return name


def default() -> str:
    """`cuda` where an NVIDIA driver answers, else `cpu`."""
    return "cuda" if nvidia_driver() else "cpu"


def nvidia_driver() -> bool:
    """True where an NVIDIA driver answers, and lists a GPU."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.startswith("GPU ")
