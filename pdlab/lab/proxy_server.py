"""The double-send proxy (pdlab/lab/proxy.py) as a process of a lab."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from pdlab.lab.ports import Ports
from pdlab.lab.process import Process, spawn


@dataclass
class ProxyServer:
    """`lab.proxy`: where a client sends its requests."""

    url: str
    process: Process

    @property
    def alive(self) -> bool:
        return self.process.alive

    @property
    def log(self) -> Path:
        return Path(self.process.log)

    def __repr__(self) -> str:
        return f"<proxy {self.url} {'up' if self.alive else 'down'}>"


def spawn_proxy(
    folder: Path,
    ports: Ports,
    port: int,
    *,
    prefill: str,
    bootstrap: str,
    decode: str,
    owner: str | None,
    trace: bool = True,
) -> Process:
    """Start a proxy between one prefill and one decode instance, given by URL; does not wait for it."""
    argv = [sys.executable, "-m", "pdlab.lab.proxy", "--host", ports.host, "--port", str(port)]
    argv += ["--prefill", f"{prefill}={bootstrap}", "--decode", decode]
    env = {**os.environ, "PDLAB_TRACE": str(folder / "trace") if trace else ""}
    return spawn("proxy", argv, folder=folder, env=env, ports=ports, owner=owner)
