"""`serve` around its engine: what is left when it is interrupted, and where nothing can be kept. No engines."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdlab.errors import PdlabError
from pdlab.lab import serve as serves
from pdlab.lab.process import Process, spawn
from pdlab.lab.serve import serve
from tests.recording import SETTINGS

SLEEP = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Process]]:
    """The servers that `serve` started: they sleep."""
    processes: list[Process] = []

    def sleeping(role: str, argv: list[str], *, folder: Path, **_: Any) -> Process:
        processes.append(spawn(role, SLEEP, folder=folder, env=dict(os.environ)))
        return processes[-1]

    monkeypatch.setenv("PDLAB_STATE", str(tmp_path))
    monkeypatch.setattr(serves, "spawn", sleeping)
    yield processes
    for process in processes:
        process.stop()


def test_an_interrupt_removes_the_folder_once_nobody_writes_into_it(
    started: list[Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: dict[Path, bool] = {}
    rmtree = shutil.rmtree

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def remove(path: Path | str, **options: Any) -> None:
        removed[Path(path)] = started[0].alive
        rmtree(path, **options)

    monkeypatch.setattr(serves, "_follow", interrupted)
    monkeypatch.setattr(shutil, "rmtree", remove)
    with pytest.raises(KeyboardInterrupt):
        serve("decode", SETTINGS, say=lambda _: None)
    folder = Path(started[0].log).parent
    assert removed[folder] is False and not folder.exists()


def test_a_place_where_nothing_can_be_kept(
    started: list[Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PDLAB_STATE", str(tmp_path / "file"))
    with pytest.raises(PdlabError, match="cannot make a folder for decode") as raised:
        serve("decode", SETTINGS, say=lambda _: None)
    assert "PDLAB_STATE" in str(raised.value.hint) and not started
