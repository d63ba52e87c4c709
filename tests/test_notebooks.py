"""The stored notebooks: fit to be compared, to be published, and to be read where nothing runs."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.live import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request: pytest.FixtureRequest) -> Any:
    return json.loads(request.param.read_text())


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_there_are_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS][:1] == ["00_the_lab"]


def test_every_cell_was_run(notebook: Any) -> None:
    counts = [cell["execution_count"] for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1))


def test_no_widget_state_and_no_view_of_a_dead_widget(notebook: Any) -> None:
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    assert "widget-view" not in json.dumps(notebook)


def test_no_path_of_the_machine_it_was_run_on_and_no_source_of_vllm(notebook: Any) -> None:
    text = json.dumps(notebook)
    assert not re.search(r"(?<![\w.~/])/(home|root|work|Users)/", text)
    assert "SPDX" not in text


def test_statements_are_asserted(notebook: Any) -> None:
    assert sum("assert " in "".join(cell["source"]) for cell in code_cells(notebook)) >= 5


def nbval(notebook: Any, folder: Path) -> subprocess.CompletedProcess[str]:
    """Strict nbval over `notebook`, with the guard of conftest.py, in a folder of its own."""
    (folder / "conftest.py").write_text((ROOT / "conftest.py").read_text())
    (folder / "tried.ipynb").write_text(json.dumps(notebook))
    command = [sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env", "-q", "-p", "no:cacheprovider", "."]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def small_notebook(count: int | None, output: str) -> Any:
    outputs = [{"output_type": "stream", "name": "stdout", "text": output}]
    cell = {"cell_type": "code", "id": "a", "metadata": {}, "source": "print(1 + 1)", "outputs": outputs}
    return {"cells": [{**cell, "execution_count": count}], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


def test_nbval_compares_outputs(tmp_path: Path) -> None:
    assert nbval(small_notebook(1, "2\n"), tmp_path).returncode == 0
    assert nbval(small_notebook(1, "3\n"), tmp_path).returncode == 1


def test_a_cell_that_was_never_run_is_an_error(tmp_path: Path) -> None:
    done = nbval(small_notebook(None, "3\n"), tmp_path)  # nbval alone would pass it
    assert done.returncode == 4
    assert "was never run" in done.stderr
