"""`doctor` on GPUs, RDMA ports and locked memory: the recorded answers of several machines."""

import resource
import tomllib
from pathlib import Path

import pytest

from pdlab.doctor import devices
from pdlab.doctor.check import MIB
from pdlab.paths import repo_root

TWO_H200 = """0, NVIDIA H200, 143771 MiB, 143156 MiB, 580.95.05, 9.0
1, NVIDIA H200, 143771 MiB, 143156 MiB, 580.95.05, 9.0
"""
OLD_DRIVER = "0, NVIDIA RTX 5880 Ada Generation, 49140 MiB, 48512 MiB, 570.86.15, 8.9\n"
VOLTA = "0, NVIDIA TITAN V, 12288 MiB, 12042 MiB, 580.95.05, 7.0\n"
UNIFIED_MEMORY = "0, NVIDIA GB10, [N/A], [N/A], 580.95.05, [N/A]\n"
BLACKWELL = "0, NVIDIA B200, 183359 MiB, 182632 MiB, 580.95.05, 10.0\n"


def test_two_gpus_give_prefill_and_decode_one_each() -> None:
    check = devices.check_gpus("cuda", lambda: TWO_H200)
    assert check.status == "ok"
    assert "0: NVIDIA H200, 143156 MiB of 143771 MiB free; 1: NVIDIA H200" in check.found
    assert check.found.endswith("driver 580.95.05")
    assert "one each" in check.meaning


def test_one_gpu_is_shared() -> None:
    assert "share it" in devices.check_gpus("cuda", lambda: TWO_H200.splitlines()[0]).meaning


def test_no_gpu_is_the_cpu_profile_or_stops_a_cuda_build() -> None:
    none = devices.check_gpus("cpu", lambda: "")
    assert (none.status, none.found) == ("info", "none")
    assert "cpu profile" in none.meaning
    assert devices.check_gpus("cuda", lambda: "").status == "fail"


def test_gpus_beside_the_cpu_build_stay_idle() -> None:
    check = devices.check_gpus("cpu", lambda: TWO_H200)
    assert check.status == "info" and "idle" in check.meaning


def test_a_driver_too_old_for_the_pinned_cuda() -> None:
    check = devices.check_gpus("cuda", lambda: OLD_DRIVER)
    assert check.status == "warn" and "CUDA 13 wants driver 580" in check.meaning
    project = tomllib.loads((repo_root() / "pyproject.toml").read_text())["project"]
    assert any("-cuda13==" in pin for pin in project["optional-dependencies"]["cuda"]), "another CUDA, another driver"


def test_a_gpu_too_old_one_that_does_not_tell_and_a_new_one() -> None:
    assert "7.5" in devices.check_gpus("cuda", lambda: VOLTA).meaning
    assert devices.check_gpus("cuda", lambda: UNIFIED_MEMORY).status == "ok"
    assert devices.check_gpus("cuda", lambda: BLACKWELL).status == "ok"


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "nvidia-smi").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path / "nvidia-smi"


@pytest.mark.parametrize(("profile", "status"), [("cuda", "fail"), ("cpu", "warn")])
def test_an_nvidia_smi_that_fails_is_quoted(nvidia_smi: Path, profile: str, status: str) -> None:
    said = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    nvidia_smi.write_text(f'#!/bin/sh\necho "{said}"\necho more\nexit 9\n')
    check = devices.check_gpus(profile)
    assert (check.status, check.found) == (status, said)


def test_nvidia_smi_is_asked_for_the_fields_that_are_parsed(nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi.write_text('#!/bin/sh\necho "$@"\n')
    assert devices.query_gpus().split()[0].partition("=")[2].split(",") == [
        "index", "name", "memory.total", "memory.free", "driver_version", "compute_cap",
    ]  # fmt: skip
    monkeypatch.setenv("PATH", "/nowhere")
    assert devices.query_gpus() == ""


def test_rdma_ports_are_read_from_sysfs(tmp_path: Path) -> None:
    assert devices.rdma_ports(tmp_path / "absent") == []
    for device, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / device / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "link_layer").write_text("InfiniBand\n")
    ports = devices.rdma_ports(tmp_path)
    assert ports == ["mlx5_0 port 1: InfiniBand, ACTIVE", "mlx5_1 port 1: InfiniBand, DOWN"]
    assert devices.check_rdma(lambda: ports).status == "ok"
    assert devices.check_rdma(lambda: ports[1:]).status == "warn"
    assert devices.check_rdma(lambda: []).status == "info"


@pytest.mark.parametrize(
    ("limit", "ports", "status", "found"),
    [
        (8 * MIB, [], "info", "8 MiB"),
        (64 * 1024, ["mlx5_0 port 1: InfiniBand, ACTIVE"], "warn", "64 KiB"),
        (resource.RLIM_INFINITY, ["mlx5_0 port 1: InfiniBand, ACTIVE"], "ok", "unlimited"),
    ],
)
def test_the_locked_memory_limit_matters_only_with_rdma(limit: int, ports: list[str], status: str, found: str) -> None:
    check = devices.check_locked_memory(limit, lambda: ports)
    assert (check.status, check.found) == (status, found)
