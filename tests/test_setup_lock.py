"""The locks: complete, pinned, and free of what a machine without a GPU must never fetch."""

import re
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pdlab.setup import pins
from pdlab.setup.environment import LIGHT
from pdlab.setup.profile import PROFILES

LOCKS = [*PROFILES, LIGHT]
GPU_ONLY = re.compile(r"nvidia-|cuda|triton|torchvision|torchaudio|torchcodec|cupy|flashinfer|llama-cpp")


def names(profile: str) -> set[str]:
    return {line.split("==")[0] for line in pins.lock_lines(profile)}


def left_out(profile: str) -> set[str]:
    """What the overrides leave out of the lock on purpose."""
    overrides = pins.lock_path(profile).with_suffix(".overrides")
    text = overrides.read_text() if overrides.exists() else ""
    return {line.split(";")[0].strip() for line in text.splitlines() if "python_version" in line}


def test_the_cpu_lock_holds_nothing_of_a_gpu() -> None:
    assert [line for line in pins.lock_lines("cpu") if GPU_ONLY.match(line)] == []
    assert pins.locked("cpu")["torch"].endswith("+cpu")


def test_the_cuda_lock_takes_plain_torch() -> None:
    assert "+" not in pins.locked("cuda")["torch"]


@pytest.mark.parametrize("profile", LOCKS)
def test_every_line_is_a_pin(profile: str) -> None:
    pin = re.compile(r"[a-z0-9-]+==[A-Za-z0-9.+]+( ; [a-z_]+ .*)?")
    assert [line for line in pins.lock_lines(profile) if not pin.fullmatch(line)] == []
    assert left_out(profile).isdisjoint(names(profile))


@pytest.mark.parametrize("profile", LOCKS)
def test_a_package_has_one_line_for_each_python(profile: str) -> None:
    lines = [Requirement(line) for line in pins.lock_lines(profile)]
    for version in ("3.11.2", "3.11.9", "3.12.1", "3.13.1"):
        # Markers compare the two-number version too: 3.13.1 is in 3.13.*.
        python = {"python_full_version": version, "python_version": version.rpartition(".")[0]}
        found = [line.name for line in lines if line.marker is None or line.marker.evaluate(python)]
        assert len(found) == len(set(found)), version


def test_what_is_installed_satisfies_every_bound_but_those_left_out() -> None:
    """What `pip check` would say, read against the overrides."""
    profile = pins.profile_of() or LIGHT
    wrong = []
    for name in sorted(names(profile)):
        dist = pins.find(name)
        for text in (dist.requires or []) if dist else []:
            wrong += unmet(Requirement(text), left_out(profile), by=name)
    assert wrong == []


def unmet(requirement: Requirement, allowed: set[str], by: str) -> list[str]:
    if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
        return []
    dist = pins.find(canonicalize_name(requirement.name)) or pins.find(requirement.name)
    if dist is None:
        return [] if requirement.name in allowed else [f"{by} wants {requirement}, which is missing"]
    met = requirement.specifier.contains(metadata.version(dist.name), prereleases=True)
    return [] if met else [f"{by} wants {requirement}, {dist.version} is installed"]
