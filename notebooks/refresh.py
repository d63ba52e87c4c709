"""`python notebooks/refresh.py [NOTEBOOK ...]`: run notebooks on the live lab and store their outputs, clean.

What is stored is what nbval compares against: outputs and execution counts. Widget state, timings and versions of the
kernel are left out: they differ from run to run, and a widget's stored view shows an error where no kernel runs.
"""

import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def refresh(path: Path) -> None:
    """Run the notebook in its folder and write it back."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": path.parent}}).execute()
    text = nbformat.writes(cleaned(notebook))
    path.write_text(text.replace(str(Path.home()), "~") + "\n")  # of no interest to anybody else


def cleaned(notebook: Any) -> Any:
    """The notebook without what differs from run to run."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = {key: value for key, value in cell.metadata.items() if key == "tags"}
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for count, cell in enumerate(code, 1):
        cell.execution_count = count
        for output in cell.outputs:
            output.get("data", {}).pop(WIDGET_VIEW, None)
            output.pop("transient", None)
            if output.output_type == "error":
                output.traceback = []  # holds paths of the machine, and is not compared
            if "execution_count" in output:
                output.execution_count = count
    return notebook


if __name__ == "__main__":
    here = Path(__file__).parent
    for name in [Path(argument) for argument in sys.argv[1:]] or sorted(here.glob("*.ipynb")):
        refresh(name)
        print("refreshed", name)
