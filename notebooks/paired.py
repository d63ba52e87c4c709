"""`python notebooks/paired.py [--check]`: each chapter as a Python file beside it, which is what a review reads.

The notebook is what runs, is compared and is published; NN_name.py holds its cells without outputs, in jupytext's
percent form. It is written, never edited: --check says which differ, and exits 1.
"""

import sys
from pathlib import Path

import jupytext
import nbformat

HERE = Path(__file__).parent
CHAPTERS = "[0-9][0-9]_*"
# Not for ruff: in a notebook an expression by itself is what is shown, and a paragraph is a line.
HEAD = "# Written by notebooks/paired.py from the notebook of the same name: edit that one.\n# ruff: noqa\n\n"
# Of a notebook nothing is kept; of a cell its tags, which say how it is compared.
FILTERS = {"notebook_metadata_filter": "-all", "cell_metadata_filter": "tags,-all"}


def paired(notebook: Path) -> str:
    """The Python file of a notebook."""
    cells = nbformat.read(notebook, as_version=4)
    cells.metadata["jupytext"] = FILTERS
    return HEAD + jupytext.writes(cells, fmt="py:percent")


def stale(folder: Path = HERE) -> list[Path]:
    """Python files that are not what their notebook says; those that are missing; and those that have no notebook."""
    notebooks = sorted(folder.glob(f"{CHAPTERS}.ipynb"))
    wanted = {notebook.with_suffix(".py"): paired(notebook) for notebook in notebooks}
    there = set(folder.glob(f"{CHAPTERS}.py"))
    return sorted(path for path in there | set(wanted) if path not in there or path.read_text() != wanted.get(path))


def write(folder: Path = HERE) -> list[Path]:
    """Write the Python files that are stale, and remove those of no notebook. Returns which these were."""
    found = stale(folder)
    for path in found:
        notebook = path.with_suffix(".ipynb")
        if notebook.exists():
            path.write_text(paired(notebook))
        else:
            path.unlink()
    return found


if __name__ == "__main__":
    check = "--check" in sys.argv[1:]
    paths = stale() if check else write()
    for path in paths:
        print("differs from its notebook:" if check else "written:", path.name)
    sys.exit(bool(check and paths))
