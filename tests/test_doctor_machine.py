"""`doctor` on system, Python, CPU, memory and ports: the recorded text of several machines, and this one."""

import os
from pathlib import Path

import pytest

from pdlab.doctor import machine
from pdlab.doctor.check import GIB, MIB

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


def cpuinfo(tmp_path: Path, text: str) -> Path:
    (tmp_path / "cpuinfo").write_text(text)
    return tmp_path / "cpuinfo"


def test_system() -> None:
    assert machine.check_system("Linux").status == "ok"
    mac = machine.check_system("Darwin")
    assert mac.status == "fail" and mac.found.startswith("Darwin ")
    assert mac.remedy


@pytest.mark.parametrize(("version", "status"), [("3.10.14", "fail"), ("3.11.0", "ok"), ("3.14.0", "fail")])
def test_python_is_held_against_requires_python(version: str, status: str) -> None:
    check = machine.check_python(version)
    assert (check.status, check.found) == (status, version)
    assert check.meaning == "pdlab asks for >=3.11, <3.14."


@pytest.mark.parametrize(
    ("text", "status", "found", "kernels"),
    [
        (SAPPHIRE_RAPIDS, "ok", "AVX2, AVX512, AVX512-BF16, AMX", "AVX512-BF16"),
        (SKYLAKE_X, "ok", "AVX2, AVX512", "AVX512 kernels"),
        (ZEN_2, "ok", "AVX2", "AVX2"),
        (IVY_BRIDGE, "fail", "none of those that matter", "SIGILL"),
        (CORTEX_A55, "warn", "unknown", "which kernels"),
    ],
    ids=["sapphire-rapids", "skylake-x", "zen-2", "ivy-bridge", "cortex-a55"],
)
def test_cpu_flags_say_which_kernels_run(tmp_path: Path, text: str, status: str, found: str, kernels: str) -> None:
    check = machine.check_cpu_flags("cpu", cpuinfo(tmp_path, text))
    assert (check.status, check.found) == (status, found)
    assert kernels in check.meaning


def test_cpu_flags_stop_nothing_on_gpus(tmp_path: Path) -> None:
    assert machine.check_cpu_flags("cuda", cpuinfo(tmp_path, IVY_BRIDGE)).status == "info"


def test_cores(tmp_path: Path) -> None:
    assert machine.check_cores(lambda: 2).status == "ok"
    assert machine.check_cores(lambda: 1.5).status == "warn"
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert machine.usable_cores(tmp_path / "cpu.max") == 0.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert machine.usable_cores(tmp_path / "cpu.max") == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("gib", "status"), [(6, "ok"), (5.9, "warn"), (3.9, "warn")])
def test_memory(gib: float, status: str) -> None:
    check = machine.check_memory(lambda: int(gib * GIB))
    assert check.status == status
    assert (check.remedy is None) == (status == "ok")


def test_memory_of_a_container_is_its_limit_less_what_cannot_be_reclaimed(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{500 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{400 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {150 * MIB}\nactive_file 3\n")
    assert machine.available_memory(tmp_path) == 250 * MIB
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.available_memory(tmp_path) > 250 * MIB


def test_ports_of_loopback_can_be_bound() -> None:
    assert machine.check_ports().status == "ok"


def test_an_address_that_cannot_be_bound_stops_the_lab() -> None:
    check = machine.check_ports("192.0.2.1")  # of no machine: kept for documentation
    assert check.status == "fail" and "Cannot assign requested address" in check.found
