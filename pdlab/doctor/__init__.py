"""What this machine has, and what each finding means for a prefill/decode lab.

One small function a finding. Each takes its readers as parameters, so a test can hand it another machine's text.
"""

from collections.abc import Callable
from functools import cache

from pdlab.doctor import devices, libraries, machine, packages, storage
from pdlab.doctor.check import Check, safely
from pdlab.doctor.report import as_json, render, verdict
from pdlab.setup import pins
from pdlab.setup.profile import default

__all__ = ["Check", "as_json", "examine", "render", "verdict"]


def examine() -> list[Check]:
    """Every check, in reading order. Never raises: a check that could not look says so in its line."""
    # That of the vLLM that is installed; without one, that which set-up would choose.
    profile = cache(lambda: pins.profile_of() or default())
    return [safely(name, look) for name, look in _looks(profile).items()]


def _looks(profile: Callable[[], str]) -> dict[str, Callable[[], Check]]:
    return {
        "system": machine.check_system,
        "Python": machine.check_python,
        "CPU flags": lambda: machine.check_cpu_flags(profile()),
        "cores": machine.check_cores,
        "memory": machine.check_memory,
        "disk": storage.check_disk,
        "GPUs": lambda: devices.check_gpus(profile()),
        "RDMA devices": devices.check_rdma,
        "locked memory": devices.check_locked_memory,
        "libibverbs": libraries.check_libibverbs,
        "libnuma, libcurl": libraries.check_other_libraries,
        "vLLM": lambda: packages.check_vllm(pins.locked(profile())),
        "torch": lambda: packages.check_torch(pins.locked(profile())),
        "Mooncake": lambda: packages.check_mooncake(pins.locked(profile())),
        "vLLM plugin": packages.check_plugin,
        "ports": machine.check_ports,
        "/dev/shm": storage.check_shared_memory,
        "model": storage.check_model,
        "Jupyter": packages.check_jupyter,
    }
