"""What differs between machines, and nothing else: `cpu` where no GPU is found, `cuda` where there is one or two."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from pdlab.errors import PdlabError
from pdlab.lab.settings import Settings, checked
from pdlab.setup.model import resolve
from pdlab.setup.pins import profile_of

ABORT_TIMEOUT = 15


def settings(
    model: str | None = None,
    profile: str | None = None,
    *,
    dtype: str | None = None,
    max_model_len: int = 4096,
    kv_cache_bytes: int | None = None,
    block_size: int | None = None,
    abort_timeout: int = ABORT_TIMEOUT,
    protocol: str | None = None,
    trace: bool = True,
    prefill_args: Sequence[str] = (),
    decode_args: Sequence[str] = (),
) -> Settings:
    """The settings for this machine; what is given wins.

    Raises:
        PdlabError: an unknown profile or protocol, a cuda profile without a GPU, or a value no engine would take.
    """
    profile = profile or os.environ.get("PDLAB_PROFILE") or profile_of() or ("cuda" if visible_gpus() else "cpu")
    if profile not in ("cpu", "cuda"):
        raise PdlabError(f"there is no profile {profile!r}", "choose cpu or cuda")
    if protocol not in (None, "tcp", "rdma"):
        raise PdlabError(f"there is no protocol {protocol!r}", "choose tcp or rdma")
    if not isinstance(model, str | os.PathLike | None):
        raise PdlabError(f"there is no model {model!r}", "give a folder with a checkpoint, or a hub name")
    common: dict[str, Any] = {
        "model": resolve(model and os.fspath(model)), "profile": profile, "max_model_len": max_model_len,
        "abort_timeout": abort_timeout, "trace": trace, "prefill_args": words(prefill_args),
        "decode_args": words(decode_args),
    }  # fmt: skip
    if profile == "cpu":
        return checked(Settings(
            **common, dtype=dtype or "float32", block_size=32 if block_size is None else block_size,
            kv_cache_bytes=512 << 20 if kv_cache_bytes is None else kv_cache_bytes,
            protocol=protocol or "tcp",  # type: ignore[arg-type]
        ))  # fmt: skip
    return checked(Settings(
        **common, dtype=dtype or "auto", block_size=block_size, kv_cache_bytes=kv_cache_bytes,
        protocol=protocol or ("rdma" if rdma_devices() else "tcp"), gpus=choose_gpus(visible_gpus()),  # type: ignore[arg-type]
    ))  # fmt: skip


def words(arguments: Sequence[str]) -> tuple[str, ...]:
    """Arguments of a command line; a string would be taken apart into letters."""
    return (arguments,) if isinstance(arguments, str) else tuple(arguments)


def choose_gpus(visible: Sequence[str]) -> tuple[str, str]:
    """GPU of the prefill and of the decode instance; one that is alone is shared."""
    if not visible:
        raise PdlabError(
            "the cuda profile needs a GPU and none is visible", "use --profile cpu: same engines, same connector, TCP"
        )
    return visible[0], visible[1 if len(visible) > 1 else 0]


def visible_gpus() -> list[str]:
    """GPUs that the driver lists and CUDA_VISIBLE_DEVICES leaves, by the names that it takes; none without a driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=20).stdout
    every = [str(index) for index in range(sum(line.startswith("GPU ") for line in listed.splitlines()))]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not every:
        return every
    names = (name.strip() for name in visible.split(","))
    # CUDA reads the list up to the first name that it does not know.
    return list(takewhile(lambda name: name in every or name.startswith(("GPU-", "MIG-")), names))


def rdma_devices() -> list[str]:
    """RDMA devices with a port that is up, if this machine lets processes use them (/dev/infiniband)."""
    if not Path("/dev/infiniband").is_dir():
        return []
    states = Path("/sys/class/infiniband").glob("*/ports/*/state")
    return sorted({state.parts[-4] for state in states if "ACTIVE" in state.read_text()})


def cores_for(role: str) -> tuple[int, ...]:
    """One core for each instance where there are two or more; all of them (here: none pinned) where there is one."""
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) < 2:
        return ()
    return (mine[0],) if role == "prefill" else (mine[1],)
