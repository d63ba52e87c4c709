"""`python3 -m pdlab bench start`: how long until both engines answer, against a stock pair.

The stock pair is what one would start by hand: the same model and connector, upstream's default arguments, both
started side by side. One default must give way on a CPU: an engine takes 92 % of the memory there, and two do not fit,
so each gets 1 GiB of KV space. Ready means the same for both: each engine has answered a completion.
"""

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pdlab
from pdlab.lab import record as records
from pdlab.lab.answer import complete
from pdlab.lab.command import inherited_env
from pdlab.lab.ports import Ports
from pdlab.lab.process import Process, myself, spawn
from pdlab.lab.profile import rdma_devices
from pdlab.lab.settings import KV_ROLES, ROLES, Role
from pdlab.lab.startup import wait_until_serving
from pdlab.setup.model import resolve

LAB = f"bench-{os.getpid()}"
# Arguments of each kind beyond model, address and connector; None: pdlab's own lab.
KINDS: dict[str, tuple[str, ...] | None] = {"pdlab": None, "stock": (), "stock_eager": ("--enforce-eager",)}


def measure(rounds: int, model: str | None = None) -> dict[str, Any]:
    """Start each kind `rounds` times, in turns, and end it again.

    Returns:
        pdlab_seconds, stock_seconds, stock_eager_seconds (a list each); ratio and ratio_eager: pdlab's median to that
        of the stock pair, without and with `--enforce-eager`; load_before.
    """
    checkpoint = resolve(model)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="pdlab-bench-") as cache:
        for number in range(rounds):
            for kind in KINDS if number % 2 == 0 else reversed(KINDS):
                options = KINDS[kind]
                seconds[kind].append(_ours(checkpoint) if options is None else _stock(checkpoint, options, Path(cache)))
                print(f"  {kind:<11} {seconds[kind][-1]:6.1f} s", file=sys.stderr, flush=True)
    median = {kind: statistics.median(values) for kind, values in seconds.items()}
    return {
        "ratio": round(median["pdlab"] / median["stock"], 3),
        "ratio_eager": round(median["pdlab"] / median["stock_eager"], 3),
        **{f"{kind}_seconds": [round(value, 2) for value in values] for kind, values in seconds.items()},
        "load_before": round(load, 2),
    }


def render(facts: dict[str, Any]) -> str:
    """The result as text."""
    median = {kind: statistics.median(facts[f"{kind}_seconds"]) for kind in KINDS}
    return (
        f"until both engines answer (medians): pdlab {median['pdlab']:.1f} s\n"
        f"  stock pair, upstream's defaults   {median['stock']:6.1f} s: ratio {facts['ratio']:.2f}\n"
        f"  stock pair with --enforce-eager   {median['stock_eager']:6.1f} s: ratio {facts['ratio_eager']:.2f}"
    )


def _ours(model: str) -> float:
    os.environ["PDLAB_OWNER"] = myself()
    began = time.monotonic()
    try:
        with pdlab.up(model, name=LAB, report=lambda *_: None):
            return time.monotonic() - began
    finally:
        shutil.rmtree(records.folder(LAB), ignore_errors=True)


def _stock(model: str, options: tuple[str, ...], folder: Path) -> float:
    """Seconds of one start; `folder` keeps what vLLM compiles, so that none of it stays on the machine."""
    ports = Ports("127.0.0.1")
    numbers = {name: ports.take(name) for name in (*ROLES, "bootstrap")}
    processes: dict[str, tuple[Process, str]] = {}
    began = time.monotonic()
    try:
        for role in ROLES:
            argv = [*_stock_argv(role, model, ports.host, numbers[role]), *options]
            env = _stock_env(numbers["bootstrap"], folder)
            process = spawn(role, argv, folder=folder, env=env, ports=ports, owner=myself())
            processes[role] = (process, f"http://{ports.host}:{numbers[role]}")
        wait_until_serving(processes, lambda *_: None)
        for name, (_, url) in processes.items():
            complete(url, "Hello", 1, {}, who=f"the {name} instance")
        return time.monotonic() - began
    finally:
        for process, _ in processes.values():
            process.stop()
        ports.close()


def _stock_argv(role: Role, model: str, host: str, port: int) -> list[str]:
    transfer: dict[str, Any] = {"kv_connector": "MooncakeConnector", "kv_role": KV_ROLES[role]}
    if not rdma_devices():
        transfer["kv_connector_extra_config"] = {"mooncake_protocol": "tcp"}
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    return [*argv, "--host", host, "--port", str(port), "--kv-transfer-config", json.dumps(transfer)]


def _stock_env(bootstrap_port: int, cache: Path) -> dict[str, str]:
    return {
        **inherited_env(),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(bootstrap_port),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        # Without pdlab's plugin the stock connector does not start where there is no accelerator.
        "PDLAB_INSTANCE": "stock",
        "VLLM_PLUGINS": "pdlab",
    }
