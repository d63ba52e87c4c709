"""The `vllm.general_plugins` entry point: runs in the API server, in EngineCore and in every worker of an engine.

It does nothing unless pdlab started the engine (`PDLAB_INSTANCE` names its role), and then only what an engine on a
reader's machine needs. The connector under study stays vLLM's stock `MooncakeConnector`.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path


def register() -> None:
    """Prepare this process; called by `vllm.plugins.load_general_plugins`, possibly more than once."""
    if "PDLAB_INSTANCE" not in os.environ:
        return
    die_with_parent()
    fix_missing_accelerator()
    if os.environ.get("VLLM_HOST_IP", "").startswith("127."):
        bind_bootstrap_to(os.environ["VLLM_HOST_IP"])
    count_usage()
    if os.environ.get("PDLAB_TRACE"):
        trace_into(Path(os.environ["PDLAB_TRACE"]))


def die_with_parent() -> None:
    """Have the kernel end this process when its parent dies, so that a killed API server leaves no EngineCore behind.

    The API server itself is left out: its parent, pdlab's nanny, looks after it.
    """
    from multiprocessing import parent_process

    parent = parent_process()
    if parent is None or not sys.platform.startswith("linux"):
        return
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:  # it died before we asked
        os._exit(1)


def fix_missing_accelerator() -> None:
    """Let `MooncakeConnectorWorker.__init__` run where there is no accelerator.

    It calls `torch.accelerator.current_device_index()`, which raises on a CPU-only machine; index 0 is what the CPU
    platform's `set_device` expects. Guarded by the call itself: where torch answers, nothing is replaced.
    """
    import torch

    try:
        torch.accelerator.current_device_index()
    except Exception:
        torch.accelerator.current_device_index = lambda: 0


def bind_bootstrap_to(host: str) -> None:
    """Bind `MooncakeBootstrapServer` of an instance on loopback to loopback.

    vLLM 0.32.0 binds it to 0.0.0.0 whatever `VLLM_HOST_IP` says, and it has no authentication. An instance for other
    hosts keeps that: P's own worker registers at 127.0.0.1, D asks at P's address.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_utils import MooncakeBootstrapServer

    original = MooncakeBootstrapServer.__init__
    if getattr(original, "_pdlab", False):
        return

    def init(self: MooncakeBootstrapServer, asked: str, port: int) -> None:
        original(self, host if asked == "0.0.0.0" else asked, port)

    init._pdlab = True  # type: ignore[attr-defined]
    MooncakeBootstrapServer.__init__ = init


def count_usage() -> None:
    """Let EngineCore say what it holds; an API server has none."""
    from multiprocessing import parent_process

    if parent_process() is not None:
        from pdlab.inside.usage import count_in_engine_core

        count_in_engine_core()


def trace_into(folder: Path) -> None:
    """Install the probes and the gates, in EngineCore and in the workers; an API server has neither."""
    from multiprocessing import parent_process

    if parent_process() is None or getattr(trace_into, "done", False):
        return
    trace_into.done = True  # type: ignore[attr-defined]
    from pdlab.inside.gates import Gates
    from pdlab.inside.probes import PROBES
    from pdlab.inside.tracer import Tracer, extra_probes

    trace = Tracer("P" if os.environ["PDLAB_INSTANCE"] == "prefill" else "D", folder)
    trace.install(PROBES)
    try:
        trace.install(extra_probes())
    except Exception as error:  # a table that is not there is the reader's mistake, and no reason not to start
        trace.failed("PDLAB_PROBES", error)
    Gates(trace, folder / "gates").install()
