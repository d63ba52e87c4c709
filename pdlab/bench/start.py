"""`python3 -m pdlab bench start`: how long until both engines answer, against a stock pair.

The stock pair is what one would start by hand: the same model and connector, upstream's default arguments, both
started side by side. Ready means the same for both: each engine has answered a completion.
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
from pdlab.lab.answer import complete
from pdlab.lab.command import UNWANTED
from pdlab.lab.ports import Ports
from pdlab.lab.process import Process, myself, spawn
from pdlab.lab.profile import rdma_devices
from pdlab.lab.settings import KV_ROLES, ROLES, Role
from pdlab.lab.startup import wait_until_serving
from pdlab.setup.model import resolve

LAB = f"bench-{os.getpid()}"


def measure(rounds: int, model: str | None = None) -> dict[str, Any]:
    """Start each kind `rounds` times, alternating, and end it again.

    Returns:
        pdlab_seconds and stock_seconds (a list each), ratio (of the medians; below 1: pdlab is quicker), load before.
    """
    checkpoint = resolve(model)
    seconds: dict[str, list[float]] = {"pdlab": [], "stock": []}
    load = os.getloadavg()[0]
    for number in range(2 * rounds):
        kind = ("pdlab", "stock", "stock", "pdlab")[number % 4]
        seconds[kind].append(_ours(checkpoint) if kind == "pdlab" else _stock(checkpoint))
        print(f"  {kind:<6} {seconds[kind][-1]:6.1f} s", file=sys.stderr, flush=True)
    ratio = statistics.median(seconds["pdlab"]) / statistics.median(seconds["stock"])
    return {
        "ratio": round(ratio, 3),
        "pdlab_seconds": [round(s, 2) for s in seconds["pdlab"]],
        "stock_seconds": [round(s, 2) for s in seconds["stock"]],
        "load_before": round(load, 2),
    }


def render(facts: dict[str, Any]) -> str:
    """The result as text."""
    pdlab_median, stock_median = (statistics.median(facts[f"{kind}_seconds"]) for kind in ("pdlab", "stock"))
    return (
        f"until both engines answer: pdlab {pdlab_median:.1f} s, stock pair {stock_median:.1f} s (medians): "
        f"ratio {facts['ratio']:.2f}"
    )


def _ours(model: str) -> float:
    began = time.monotonic()
    lab = pdlab.up(model, name=LAB, report=lambda *_: None)
    seconds = time.monotonic() - began
    lab.down()
    return seconds


def _stock(model: str) -> float:
    ports = Ports("127.0.0.1")
    folder = Path(tempfile.mkdtemp(prefix="pdlab-bench-"))
    numbers = {name: ports.take(name) for name in (*ROLES, "bootstrap")}
    processes: dict[str, tuple[Process, str]] = {}
    began = time.monotonic()
    try:
        for role in ROLES:
            argv = _stock_argv(role, model, ports.host, numbers[role])
            env = _stock_env(numbers["bootstrap"])
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
        shutil.rmtree(folder, ignore_errors=True)


def _stock_argv(role: Role, model: str, host: str, port: int) -> list[str]:
    transfer: dict[str, Any] = {"kv_connector": "MooncakeConnector", "kv_role": KV_ROLES[role]}
    if not rdma_devices():
        transfer["kv_connector_extra_config"] = {"mooncake_protocol": "tcp"}
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    return [*argv, "--host", host, "--port", str(port), "--kv-transfer-config", json.dumps(transfer)]


def _stock_env(bootstrap_port: int) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if key not in UNWANTED}
    return {
        **inherited,
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(bootstrap_port),
        "HF_HUB_OFFLINE": "1",
        # Without pdlab's plugin the stock connector does not start where there is no accelerator.
        "PDLAB_INSTANCE": "stock",
        "VLLM_PLUGINS": "pdlab",
    }
