"""Where things lie: disk, the prepared model, shared memory."""

import shutil
from collections.abc import Callable
from pathlib import Path

from pdlab.doctor.check import GIB, MIB, Check, Status, size
from pdlab.paths import cache_dir
from pdlab.setup.model import prepared

Usage = Callable[[Path], tuple[int, int, int]]  # total, used, free


def check_disk(folder: Path | None = None, usage: Usage = shutil.disk_usage) -> Check:
    folder = folder or cache_dir()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    _, _, free = usage(there)
    found = f"{size(free)} free at {there}"
    meaning = "The model takes 0.3 GiB in your cache folder, logs and traces a few MiB a run."
    if free >= 2 * GIB:
        return Check("disk", "ok", found, meaning)
    status: Status = "warn" if free >= GIB // 2 else "fail"
    return Check("disk", status, found, meaning, "free some space, or set PDLAB_CACHE to a folder that has it")


def check_model(find: Callable[[], Path | None] = prepared) -> Check:
    folder = find()
    if folder is None:
        return Check("model", "info", "not prepared yet", "The first start makes it, from a package, in seconds.")
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    meaning = "Prefill and decode load the same checkpoint; no hub is asked."
    return Check("model", "ok", f"{folder.name}: {size(weights)}", meaning)


def check_shared_memory(shm: Path = Path("/dev/shm"), usage: Usage = shutil.disk_usage) -> Check:
    total, _, free = usage(shm)
    found = f"{size(free)} of {size(total)} free"
    meaning = "vLLM's processes pass work through shared memory when an instance has more than one worker."
    if free < 256 * MIB:
        return Check("/dev/shm", "warn", found, meaning, "Docker: --shm-size=1g")
    return Check("/dev/shm", "ok", found, meaning)
