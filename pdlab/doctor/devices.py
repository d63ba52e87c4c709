"""What computes and what carries the bytes: GPUs, RDMA ports, the locked memory that RDMA asks for."""

import resource
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pdlab.doctor.check import Check, Status, read_text, size

FIELDS = "index,name,memory.total,memory.free,driver_version,compute_cap"
# Of CUDA 13, for which the pinned vLLM and Mooncake are built (NVIDIA, "CUDA compatibility").
OLDEST_DRIVER = 580


@dataclass(frozen=True)
class Gpu:
    """One line of nvidia-smi's answer: what FIELDS asks for."""

    index: str
    name: str
    total: str
    free: str
    driver: str
    compute_capability: str


def query_gpus() -> str:
    """What nvidia-smi prints, a line a GPU; "" where there is none. Raises RuntimeError with its words if it fails."""
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if answer.returncode != 0:
        raise RuntimeError((answer.stdout + answer.stderr).strip().partition("\n")[0] or "nvidia-smi failed")
    return answer.stdout


def check_gpus(profile: str, query: Callable[[], str] = query_gpus) -> Check:
    try:
        gpus = [Gpu(*(field.strip() for field in line.split(","))) for line in query().splitlines()]
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        meaning = "nvidia-smi is installed but does not answer, so its GPUs are taken to be out of reach."
        status: Status = "fail" if profile == "cuda" else "warn"
        return Check("GPUs", status, str(error), meaning, "reload or update the NVIDIA driver")
    found = "; ".join(f"{gpu.index}: {gpu.name}, {gpu.free} of {gpu.total} free" for gpu in gpus)
    found = f"{found}; driver {gpus[0].driver}" if gpus else "none"
    return _on_cpu(found) if profile == "cpu" else _on_gpus(gpus, found)


def _on_cpu(found: str) -> Check:
    if found == "none":
        meaning = "cpu profile: the connector is the same one, and the KV blocks lie in main memory."
        return Check("GPUs", "info", found, meaning)
    remedy = "to use them, install the cuda profile: PDLAB_PROFILE=cuda python3 -m pdlab lab"
    return Check("GPUs", "info", found, "The CPU build of vLLM is installed, so the GPUs stay idle.", remedy)


def _on_gpus(gpus: list[Gpu], found: str) -> Check:
    if not gpus:
        meaning = "This is a CUDA build of vLLM, and it finds no device to run on."
        remedy = "install the NVIDIA driver, or the CPU build instead: PDLAB_PROFILE=cpu python3 -m pdlab lab"
        return Check("GPUs", "fail", found, meaning, remedy)
    if int(gpus[0].driver.partition(".")[0]) < OLDEST_DRIVER:
        meaning = f"CUDA 13 wants driver {OLDEST_DRIVER} or newer; an older one needs NVIDIA's cuda-compat package."
        return Check("GPUs", "warn", found, meaning, f"update the NVIDIA driver to {OLDEST_DRIVER} or newer")
    if any(float(gpu.compute_capability) < 7.5 for gpu in gpus if gpu.compute_capability != "[N/A]"):
        meaning = "vLLM's CUDA kernels want compute capability 7.5 (Turing) or newer."
        return Check("GPUs", "warn", found, meaning, "use a newer GPU, or the CPU build")
    share = "get one each" if len(gpus) > 1 else "share it, each with 0.4 of its memory"
    return Check("GPUs", "ok", found, f"cuda profile: prefill and decode {share}.")


def rdma_ports(infiniband: Path = Path("/sys/class/infiniband")) -> list[str]:
    """Each RDMA port as `mlx5_0 port 1: InfiniBand, ACTIVE`."""
    return [
        f"{port.parent.parent.name} port {port.name}: {read_text(port / 'link_layer').strip()}, "
        f"{read_text(port / 'state').partition(':')[2].strip()}"
        for port in sorted(infiniband.glob("*/ports/*"))
    ]


def check_rdma(ports: Callable[[], list[str]] = rdma_ports) -> Check:
    found = "; ".join(ports())
    if not found:
        meaning = "KV bytes travel over TCP: same connector, same code path, slower wire."
        return Check("RDMA devices", "info", "none", meaning)
    if "ACTIVE" in found:
        return Check("RDMA devices", "ok", found, "P's NIC can write KV bytes straight into D's memory.")
    remedy = "bring the link up (ibstat shows why it is down), or go on over TCP"
    return Check("RDMA devices", "warn", found, "There is a NIC, but no port of it is up.", remedy)


def check_locked_memory(limit: int | None = None, ports: Callable[[], list[str]] = rdma_ports) -> Check:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    unlimited = limit == resource.RLIM_INFINITY
    found = "unlimited" if unlimited else size(limit)
    meaning = "RDMA pins the KV memory that it registers, and this limit caps it; TCP pins nothing."
    if ports() and not unlimited:
        return Check("locked memory", "warn", found, meaning, "ulimit -l unlimited   (Docker: --ulimit memlock=-1)")
    return Check("locked memory", "ok" if ports() else "info", found, meaning)
