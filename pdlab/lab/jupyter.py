"""JupyterLab as a server of `python3 -m pdlab lab`."""

import json
import os
import secrets
import sys
import time
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import httpx

from pdlab.checks import make_folder
from pdlab.errors import PdlabError, StartError
from pdlab.lab.http import client
from pdlab.lab.ports import Ports
from pdlab.lab.process import Process, myself, spawn
from pdlab.paths import repo_root, state_dir

FIRST = "notebooks/00_the_lab.ipynb"
USUAL_PORT = 8888
PATIENCE = 60.0


@dataclass
class Jupyter:
    """A JupyterLab server on loopback; `url` opens the first notebook and holds the token."""

    url: str
    process: Process


def start_jupyter(port: int | None = None) -> Jupyter:
    """Start JupyterLab at the checkout, return when it answers. It ends with this process.

    Args:
        port: None: 8888 if it is free, else any free one.

    Raises:
        PdlabError: the port is taken, or this is no checkout.
        StartError: it did not come up.
    """
    ports = Ports("127.0.0.1")
    port, folder = _prepare(ports, port)
    token = secrets.token_hex(16)
    process = spawn(
        "jupyter", _argv(port, folder), folder=folder, ports=ports, owner=myself(),
        # Not on the command line, where every user of the machine could read it.
        env={**os.environ, "JUPYTER_TOKEN": token},
    )  # fmt: skip
    ports.close()
    root = f"http://127.0.0.1:{port}"
    try:
        _wait(process, f"{root}/api/status?token={token}")
    except BaseException:
        process.stop()
        raise
    return Jupyter(f"{root}/lab/tree/{FIRST}?token={token}", process)


def run_jupyter(port: int | None = None, browser: bool = True) -> NoReturn:
    """Become JupyterLab, which says its address itself: a nanny needs Linux, and recorded runs play anywhere.

    Raises:
        PdlabError: as `start_jupyter`.
    """
    ports = Ports("127.0.0.1")
    port, folder = _prepare(ports, port)
    ports.close()
    sys.stdout.flush()
    os.execv(sys.executable, [*_argv(port, folder, browser), f"--LabApp.default_url=/lab/tree/{FIRST}"])


def _prepare(ports: Ports, port: int | None) -> tuple[int, Path]:
    """The port that it gets, and the folder with its settings."""
    if not (repo_root() / FIRST).is_file():
        raise PdlabError(f"there is no {FIRST} beside the package", "run it from a clone of the repository")
    folder = state_dir() / "jupyter"
    _write_settings(folder)
    return _take(ports, port), folder


def _take(ports: Ports, port: int | None) -> int:
    if port is not None:
        return ports.take("JupyterLab", port)
    try:
        return ports.take("JupyterLab", USUAL_PORT)
    except PdlabError:
        return ports.take("JupyterLab")


def _write_settings(folder: Path) -> None:
    """Defaults of this server alone, beneath the reader's own settings: nothing is fetched, and no news are offered."""
    quiet = {"fetchNews": "false", "checkForUpdates": False}
    overrides = make_folder(folder, "JupyterLab") / "overrides.json"
    overrides.write_text(json.dumps({"@jupyterlab/apputils-extension:notification": quiet}))


def _argv(port: int, folder: Path, browser: bool = False) -> list[str]:
    options = {
        "ServerApp.ip": "127.0.0.1", "ServerApp.port": port, "ServerApp.port_retries": 0,
        "ServerApp.root_dir": str(repo_root()), "ServerApp.open_browser": browser,
        "LabApp.app_settings_dir": str(folder),
    }  # fmt: skip
    argv = [sys.executable, "-m", "jupyterlab", *(f"--{key}={value}" for key, value in options.items())]
    return [*argv, "--allow-root"] if os.geteuid() == 0 else argv


def _wait(process: Process, status: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if not process.alive:
            raise StartError("JupyterLab did not start", f"see {process.log}")
        try:
            if client().get(status, timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise StartError(f"JupyterLab does not answer after {PATIENCE:.0f} s", f"see {process.log}")


def open_browser(url: str) -> bool:
    """Open `url` in the reader's browser; False where there is none, or no screen."""
    if sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return False
    try:
        return webbrowser.open(url)
    except webbrowser.Error:
        return False
