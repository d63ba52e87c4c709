"""On what and with what a run is recorded, in words."""

import os
import platform
import re
import subprocess
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pdlab.lab.lab import Lab

DISTRIBUTIONS = {
    "mooncake": ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine-cuda13"),
    "torch": ("torch",),
    "pdlab": ("pdlab",),
}


def about(lab: Lab) -> dict[str, Any]:
    """What a tape says of itself: when, where, versions, model, profile."""
    profile = lab.settings.profile if lab.settings else "unknown"
    return {
        "when": datetime.now().strftime("%Y-%m-%d %H:%M"),
        "where": re.sub(r"[<>\s]+", " ", ", ".join([*(gpus() if profile == "cuda" else ()), processor(), system()])),
        "versions": {"vllm": str(lab.decode.facts["vllm_version"]), **versions()},
        "model": Path(lab.settings.model).name if lab.settings else "unknown",
        "profile": profile,
    }


def versions() -> dict[str, str]:
    """Of the distributions that are installed."""
    found = {}
    for name, distributions in DISTRIBUTIONS.items():
        for distribution in distributions:
            try:
                found[name] = version(distribution)
            except PackageNotFoundError:
                continue
    return found


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's model, and how many cores of it this process may use."""
    named = re.search(r"^model name\s*: (.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    cores = len(os.sched_getaffinity(0))
    return f"{named[1] if named else platform.machine()}, {cores} core{'s' * (cores != 1)}"


def system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def gpus() -> list[str]:
    """Their models, each once."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    names = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20).stdout.splitlines()
    return [f"{names.count(name)} × {name}" for name in dict.fromkeys(names)]
