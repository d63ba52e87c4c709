"""A real browser for tests: a bare page for one view, and JupyterLab with a notebook in it.

Both wait for what is to come, not for time to pass: a page says when it has drawn, JupyterLab's own application object
(`window.jupyterapp`) when a notebook is ready, when its cells have run, and what Python has.
"""

import ast
import json
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import anywidget
import nbformat
import pytest

from pdlab.bench.views import NoBrowser, bare_page, browser
from pdlab.lab.ports import Ports

HOMES = (
    "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTERLAB_SETTINGS_DIR",
    "JUPYTERLAB_WORKSPACES_DIR", "IPYTHONDIR",
)  # fmt: skip
# No news, no file written by itself; and every cell is in the page, also one out of sight.
SETTINGS: dict[str, dict[str, Any]] = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True},
    "notebook-extension/tracker": {"windowingMode": "none"},
    "docmanager-extension/plugin": {"autosave": False},
}
START = 90.0  # seconds: only how long a start that fails takes to fail
PATIENCE = 30.0  # seconds: likewise
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
READY = """(name) => {
  const shown = window.jupyterapp?.shell.currentWidget;
  return !!shown?.context?.isReady && shown.context.path.endsWith(name)
    && shown.sessionContext?.session?.kernel?.status === "idle";
}"""
NO_SPLASH = "document.getElementById('jupyterlab-splash') === null"
IDLE = """() => {
  const shown = window.jupyterapp.shell.currentWidget;
  return shown.sessionContext.session?.kernel?.status === "idle"
    && shown.content.widgets.every((cell) => cell.model.executionState !== "running");
}"""
ERRORS = """() => window.jupyterapp.shell.currentWidget.content.widgets
  .flatMap((cell) => cell.model.outputs?.toJSON() ?? [])
  .filter((output) => output.output_type === "error").map((error) => `${error.ename}: ${error.evalue}`)"""
VALUE = """async (expression) => {
  const { kernel } = window.jupyterapp.shell.currentWidget.sessionContext.session;
  const user_expressions = { value: `__import__("json").dumps(${expression})` };
  const reply = await kernel.requestExecute({ code: "", silent: true, store_history: false, user_expressions }).done;
  return reply.content.user_expressions.value;
}"""


@contextmanager
def chromium() -> Iterator[Any]:
    """A headless browser; the test is skipped, with the reason, where there is none."""
    try:
        with browser() as found:
            yield found
    except NoBrowser as reason:
        pytest.skip(str(reason))


@contextmanager
def page_of(browser: Any, **options: Any) -> Iterator[Any]:
    """A page of its own. It fails the test if its script raised anything; `options`: of Playwright's new_context."""
    context = browser.new_context(viewport={"width": 1280, "height": 1000}, reduced_motion="reduce", **options)
    context.set_default_timeout(30_000)
    page, errors = context.new_page(), []
    page.on("pageerror", lambda error: errors.append(error.stack or str(error)))
    try:
        yield page
        assert not errors, errors
    finally:
        context.close()


@contextmanager
def bare(browser: Any, widget: anywidget.AnyWidget, **options: Any) -> Iterator[Any]:
    """A page that shows `widget` without Jupyter: `window.model` is in the place of its model."""
    with page_of(browser, **options) as page:
        page.set_content(bare_page(widget))
        page.wait_for_function("window.first !== undefined")
        yield page


# JupyterLab -----------------------------------------------------------------------------------------------------------


@contextmanager
def jupyterlab(folder: Path, scratch: Path) -> Iterator[str]:
    """JupyterLab over `folder`; its settings, and all that it writes, are in `scratch`.

    Yields:
        the URL of a notebook in it, with {workspace} and {path} to be filled in.
    """
    with closing(Ports("127.0.0.1")) as ports:  # held for longer than the server takes to listen
        yield from _served(folder, scratch, ports.take("JupyterLab"))


def _served(folder: Path, scratch: Path, port: int) -> Iterator[str]:
    token = secrets.token_hex(16)
    command = [
        sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.port={port}", "--ServerApp.port_retries=0", f"--IdentityProvider.token={token}",
        f"--ServerApp.root_dir={folder}", "--LabApp.expose_app_in_browser=True", "--LabApp.news_url=",
        "--LabApp.extension_manager=readonly", "--ServerApp.terminals_enabled=False",
    ]  # fmt: skip
    log = scratch / "jupyterlab.log"
    with log.open("wb") as file:
        server = subprocess.Popen(command, env=_environment(scratch), stdout=file, stderr=file, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for(f"{url}/api/status?token={token}", server, log)
        yield f"{url}/lab/workspaces/{{workspace}}/tree/{{path}}?token={token}&reset"
    finally:
        _end(server)


def _environment(scratch: Path) -> dict[str, str]:
    homes = {name: str(scratch / name.lower()) for name in HOMES}
    for name, settings in SETTINGS.items():
        path = Path(homes["JUPYTERLAB_SETTINGS_DIR"], "@jupyterlab", f"{name}.jupyterlab-settings")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings))
    # What widgets need of the front end is installed beside this Python.
    return os.environ | homes | {"JUPYTER_PREFER_ENV_PATH": "1", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}


def _wait_for(url: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()[-3000:]
        with suppress(OSError), urllib.request.urlopen(url, timeout=2):
            return
        time.sleep(0.1)
    raise AssertionError(f"JupyterLab does not answer: {log.read_text()[-3000:]}")


def _end(server: "subprocess.Popen[bytes]") -> None:
    """SIGTERM: it ends its kernels too."""
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(20)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def write_notebook(path: Path, *cells: str) -> Path:
    """A notebook of code cells that were not run."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    notebook.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    nbformat.write(notebook, path)
    return path


class LabPage:
    """A notebook that is open in JupyterLab, in `page`."""

    def __init__(self, page: Any, url: str, path: str) -> None:
        self.page = page
        # A workspace of its own has no tabs of the last one.
        address = url.format(workspace=f"test{secrets.token_hex(4)}", path=path)
        page.goto(address, wait_until="domcontentloaded")
        page.wait_for_function(READY, arg=path, timeout=60_000)

    def command(self, name: str, **arguments: Any) -> None:
        """Run one of JupyterLab's commands and wait until it is done."""
        execute = "([name, of]) => window.jupyterapp.commands.execute(name, of).then(() => 0)"
        self.page.evaluate(execute, [name, arguments])

    def run_all(self) -> None:
        """Run all cells. AssertionError if one raised."""
        self.command("notebook:run-all-cells")
        self.page.wait_for_function(IDLE, timeout=60_000)
        assert self.page.evaluate(ERRORS) == []

    def value(self, expression: str) -> Any:
        """The value of a Python expression in the kernel."""
        reply = self.page.evaluate(VALUE, expression)
        assert reply["status"] == "ok", reply
        return json.loads(ast.literal_eval(reply["data"]["text/plain"]))

    def comes_to(self, expression: str, wanted: Any) -> None:
        """Wait until `expression` is `wanted`: a widget keeps its next word while the kernel is at the last."""
        deadline = time.monotonic() + PATIENCE
        while (value := self.value(expression)) != wanted:
            assert time.monotonic() < deadline, f"{expression} is {value}, not {wanted}"
            self.page.wait_for_timeout(20)

    def cell(self, index: int) -> Any:
        return self.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Notebook-cell").nth(index)

    def output(self, index: int) -> str:
        """What a cell's outputs say."""
        return "\n".join(self.cell(index).locator(".jp-OutputArea-output").all_inner_texts())

    def theme(self, name: str) -> None:
        """Change JupyterLab's theme: "light" or "dark"."""
        # JupyterLab shows its splash over a change, and takes it away twice, which raises, if the next comes too soon.
        self.page.wait_for_function(NO_SPLASH)
        self.command("apputils:change-theme", theme=THEMES[name])
        wanted = json.dumps(str(name == "light").lower())
        self.page.wait_for_function(f"document.body.dataset.jpThemeLight === {wanted}")

    def close(self) -> None:
        """End its kernel, which would be the next one's too; forget what was not saved."""
        self.page.evaluate("""async () => {
          const shown = window.jupyterapp.shell.currentWidget;
          await shown.sessionContext.shutdown();
          shown.context.model.dirty = false;
        }""")


@contextmanager
def opened(browser: Any, url: str, path: str) -> Iterator[LabPage]:
    with page_of(browser) as page:
        lab = LabPage(page, url, path)
        try:
            yield lab
        finally:
            lab.close()
