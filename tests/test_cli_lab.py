"""`python3 -m pdlab lab`: how JupyterLab ends, and what runs where no nanny can. No engines, no JupyterLab."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from pdlab import cli
from pdlab.errors import PdlabError
from pdlab.lab import jupyter, nanny
from pdlab.lab.jupyter import FIRST, Jupyter


def ends_with(code: int | None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have JupyterLab end so; what is done with it meanwhile."""
    done: list[str] = []
    process = SimpleNamespace(
        wait=lambda: done.append("wait"), stop=lambda: done.append("stop"), exit_code=code, log="jupyter.log",
        why_ended=lambda: f"server ended (exit code {code})",
    )  # fmt: skip

    @contextmanager
    def running_lab(**_: object) -> Iterator[tuple[str, bool]]:
        yield "a lab", True

    monkeypatch.setattr(cli, "running_lab", running_lab)
    monkeypatch.setattr(jupyter, "start_jupyter", lambda port: Jupyter("http://here", process))  # type: ignore[arg-type]
    return done


def test_shut_down_in_its_menu_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    done = ends_with(0, monkeypatch)
    cli.lab(browser=False)
    assert done == ["wait", "stop"]


@pytest.mark.parametrize("code", [1, -9, None])
def test_to_end_otherwise_is(code: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    ends_with(code, monkeypatch)
    with pytest.raises(PdlabError, match="JupyterLab ended: server ended") as raised:
        cli.lab(browser=False)
    assert raised.value.hint == "see jupyter.log"


class Became(Exception):
    """In place of another program."""


def test_off_linux_a_recorded_lab_is_played_without_a_nanny(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    became: list[list[str]] = []

    def execv(program: str, words: list[str]) -> None:
        became.append([program, *words])
        raise Became

    monkeypatch.setenv("PDLAB_RUN", "recorded")
    monkeypatch.setenv("PDLAB_STATE", str(tmp_path))
    monkeypatch.setenv("PDLAB_OWNER", "")  # put back after the test
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(nanny, "start_time", lambda pid: None)  # there is no /proc
    monkeypatch.setattr(jupyter, "spawn", lambda *_, **__: pytest.fail("it wants a nanny"))
    monkeypatch.setattr(jupyter.os, "execv", execv)
    with pytest.raises(Became):
        cli.lab(port=None, browser=True)
    ((program, *words),) = became
    assert program == words[0] == sys.executable and words[1:3] == ["-m", "jupyterlab"]
    assert "--ServerApp.open_browser=True" in words and words[-1] == f"--LabApp.default_url=/lab/tree/{FIRST}"
    assert "; recorded 2" in capsys.readouterr().out
