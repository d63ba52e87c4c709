"""The machine: system, Python, CPU, memory, ports."""

import os
import platform
import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import psutil
from packaging.specifiers import SpecifierSet

from pdlab.doctor.check import GIB, Check, read_text, size
from pdlab.errors import PdlabError
from pdlab.lab.ports import Ports

# What /proc/cpuinfo calls it, what the field calls it.
FLAGS = {"avx2": "AVX2", "avx512f": "AVX512", "avx512_bf16": "AVX512-BF16", "amx_tile": "AMX"}


def check_system(system: str | None = None) -> Check:
    system = system or platform.system()
    found = f"{system} {platform.release()}, {platform.machine()}"
    meaning = "Mooncake and the vLLM wheels are built for Linux."
    if system == "Linux":
        return Check("system", "ok", found, meaning)
    return Check("system", "fail", found, meaning, "use a Linux machine, a container, or WSL 2")


def check_python(version: str | None = None) -> Check:
    version = version or platform.python_version()
    wanted = SpecifierSet(metadata.metadata("pdlab")["Requires-Python"])
    meaning = f"pdlab asks for {', '.join(sorted(map(str, wanted), reverse=True))}."
    if wanted.contains(version, prereleases=True):
        return Check("Python", "ok", version, meaning)
    return Check("Python", "fail", version, meaning, "start pdlab with such a Python; environment.yml names one")


def check_cpu_flags(profile: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> Check:
    line = re.search(r"^flags\s*:(.*)$", read_text(cpuinfo), re.MULTILINE)
    labels = [label for flag, label in FLAGS.items() if line and flag in line[1].split()]
    found = ", ".join(labels) or "none of those that matter"
    if profile == "cuda":
        return Check("CPU flags", "info", found, "On GPUs the CPU only schedules; its vector units do not matter.")
    if line is None:
        meaning = f"{cpuinfo} names no x86 flags, so nobody can say which kernels will run."
        return Check("CPU flags", "warn", "unknown", meaning)
    if not labels:
        meaning = "vLLM's CPU kernels need AVX2; without it an engine dies of SIGILL."
        return Check("CPU flags", "fail", found, meaning, "use a newer CPU; in a VM, pass the host's CPU on")
    kernels = next(label for label in ("AVX512-BF16", "AVX512", "AVX2") if label in labels)
    slower = " They work, more slowly than the AVX512 ones." if kernels == "AVX2" else ""
    return Check("CPU flags", "ok", found, f"vLLM loads its {kernels} kernels here.{slower}")


def usable_cores(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> float:
    """The cores this process may use: its affinity, and the container's CPU quota where there is one."""
    cores = float(len(os.sched_getaffinity(0)))
    quota, _, period = read_text(cpu_max).strip().partition(" ")
    return min(cores, int(quota) / int(period)) if quota.isdigit() else cores


def check_cores(cores: Callable[[], float] = usable_cores) -> Check:
    count = cores()
    if count >= 2:
        return Check("cores", "ok", f"{count:g}", "The prefill and the decode instance get a core each.")
    meaning = "Prefill and decode share one core: all answers stay right, but the times mean little."
    return Check("cores", "warn", f"{count:g}", meaning, "give the machine or the container two cores")


def available_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can still be taken, by the machine's count and by the container's, whichever is less."""
    available = psutil.virtual_memory().available
    limit, used = read_text(cgroup / "memory.max").strip(), read_text(cgroup / "memory.current").strip()
    if not (limit.isdigit() and used.isdigit()):
        return available
    page_cache = re.search(r"^inactive_file (\d+)$", read_text(cgroup / "memory.stat"), re.MULTILINE)
    return min(available, int(limit) - int(used) + int(page_cache[1] if page_cache else 0))


def check_memory(available: Callable[[], int] = available_memory) -> Check:
    free = available()
    found = f"{size(free)} available"
    meaning = "A lab holds about 5.5 GB with the small model, most of it Python and torch."
    if free >= 6 * GIB:
        return Check("memory", "ok", found, meaning)
    remedy = "close other programs (a running lab's own share is already counted as taken: python3 -m pdlab status)"
    return Check("memory", "warn", found, meaning, remedy)


def check_ports(host: str = "127.0.0.1") -> Check:
    meaning = "P, D, the proxy and the bootstrap server listen there, on free ports; none wants Mooncake's 8998."
    ports = Ports(host)
    try:
        ports.take("the lab")
    except PdlabError as error:
        return Check("ports", "fail", error.message, meaning, "bring the loopback interface up: ip link set lo up")
    ports.close()
    return Check("ports", "ok", f"{host} can be bound", meaning)
