"""Each chapter's Python file, which a review reads: the cells of its notebook, as they are now."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jupytext
import pytest

from notebooks.paired import HEAD, HERE, paired, stale, write

NOTEBOOKS = sorted(HERE.glob("[0-9][0-9]_*.ipynb"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the notebooks, paired, and of what pairs them."""
    for path in (*NOTEBOOKS, HERE / "paired.py"):
        shutil.copy(path, tmp_path)
    write(tmp_path)
    return tmp_path


def cells(notebook: Any) -> list[tuple[str, str, list[str]]]:
    """Kind, source and tags of its cells."""
    return [(cell.cell_type, cell.source, cell.metadata.get("tags", [])) for cell in notebook.cells]


def change(notebook: Path, cell: int, **of: Any) -> None:
    content = json.loads(notebook.read_text())
    content["cells"][cell].update(of)
    notebook.write_text(json.dumps(content))


def test_every_chapter_s_is_as_the_notebook() -> None:
    assert stale() == [], "python notebooks/paired.py writes them"


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_has_the_cells_and_no_output(notebook: Path) -> None:
    text = notebook.with_suffix(".py").read_text()
    assert text.startswith(HEAD)
    assert cells(jupytext.reads(text.removeprefix(HEAD), fmt="py:percent")) == cells(jupytext.read(notebook))
    compile(text, notebook.stem, "exec")


def test_a_change_of_either_is_found_and_put_right(folder: Path) -> None:
    notebook = folder / NOTEBOOKS[0].name
    python = notebook.with_suffix(".py")
    assert stale(folder) == []
    change(notebook, 2, source="1 + 1")
    assert stale(folder) == [python]
    assert write(folder) == [python]
    assert "\n# %%\n1 + 1\n" in python.read_text()
    python.write_text(python.read_text() + "\n2 + 2\n")
    assert write(folder) == [python]
    assert python.read_text() == paired(notebook)


def test_outputs_and_counts_change_nothing(folder: Path) -> None:
    output = {"output_type": "stream", "name": "stdout", "text": "else\n"}
    change(folder / NOTEBOOKS[0].name, 2, execution_count=77, outputs=[output])
    assert stale(folder) == []


def test_a_file_of_no_notebook_and_a_notebook_without_one(folder: Path) -> None:
    orphan, missing = folder / "98_gone.py", folder / "99_new.py"
    orphan.write_text("")
    shutil.copy(folder / NOTEBOOKS[0].name, missing.with_suffix(".ipynb"))
    assert stale(folder) == [orphan, missing]
    write(folder)
    assert stale(folder) == []
    assert missing.exists()
    assert not orphan.exists()


def test_check_says_which_and_writes_nothing(folder: Path) -> None:
    python = (folder / NOTEBOOKS[0].name).with_suffix(".py")
    command = [sys.executable, str(folder / "paired.py"), "--check"]
    assert subprocess.run(command, capture_output=True).returncode == 0
    python.write_text("")
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, f"differs from its notebook: {python.name}\n")
    assert python.read_text() == ""
    done = subprocess.run(command[:-1], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"written: {python.name}\n")
