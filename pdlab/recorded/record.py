"""`python3 -m pdlab record`: run the notebooks, and the scenes of "journey", on live engines; keep what they did."""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, cast

from pdlab.errors import PdlabError
from pdlab.paths import repo_root
from pdlab.recorded.tape import path_of

if TYPE_CHECKING:
    from pdlab.lab.lab import Lab

JOURNEY = "journey"
PATIENCE = 600  # seconds, of a cell


def record(names: Sequence[str] = (), tell: Callable[[Path], None] = lambda path: None) -> list[Path]:
    """Record runs anew and return their files, data/NAME.json.gz. Where one fails, its former file stays.

    Args:
        names: of notebooks, without .ipynb, and "journey"; none: all of them.
        tell: called with each file as soon as it is kept.

    Raises:
        PdlabError: there is no such notebook, a cell of it failed, or it records another run than its name.
    """
    notebooks, kept = _notebooks(), []
    for name in chosen(names):
        with TemporaryDirectory(prefix="pdlab-record-") as folder:
            draft = Path(folder) / path_of(name).name
            run_notebook(notebooks[name], draft) if name in notebooks else run_scenes(draft)
            kept.append(Path(shutil.move(draft, path_of(name))))
        tell(kept[-1])
    return kept


def chosen(names: Sequence[str] = ()) -> list[str]:
    """The runs of these names; all of them if there are none. PdlabError where there is no such run."""
    every = [*_notebooks(), JOURNEY]
    if unknown := [name for name in names if name not in every]:
        raise PdlabError(f"there is no run {unknown[0]!r} to record", f"choose of {', '.join(every)}")
    return list(names or every)


def _notebooks() -> dict[str, Path]:
    return {path.stem: path for path in sorted((repo_root() / "notebooks").glob("*.ipynb"))}


def run_notebook(notebook: Path, tape: Path) -> None:
    """Run a notebook on the live lab, in its folder, so that it writes `tape`."""
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellControlSignal, CellExecutionError, DeadKernelError

    cells = nbformat.read(notebook, as_version=4)
    client = NotebookClient(cells, timeout=PATIENCE, resources={"metadata": {"path": notebook.parent}})
    try:
        client.execute(env={**os.environ, "PDLAB_RUN": "record", "PDLAB_DATA": str(tape.parent)})
    except (CellControlSignal, DeadKernelError) as error:
        what = f"{error.ename}: {error.evalue}" if isinstance(error, CellExecutionError) else str(error)
        raise PdlabError(f"{notebook.name} failed: {what}", "see its cells in JupyterLab") from None
    if not tape.exists():
        wrote = ", ".join(path.name for path in tape.parent.iterdir()) or "nothing"
        raise PdlabError(
            f"{notebook.name} recorded {wrote}, not {tape.name}", f'it has to say pdlab.up(run="{notebook.stem}")'
        )


def run_scenes(tape: Path) -> None:
    """Play the scenes on the live lab, so that it is on `tape`."""
    from pdlab.lab.lab import up
    from pdlab.recorded.machine import about
    from pdlab.recorded.recorder import Recorder
    from pdlab.recorded.scenes import SCENES

    live = up()
    recorder = Recorder(tape, about(live))
    lab = cast("Lab", recorder.take(live))
    for scene in SCENES.values():
        scene(lab)
    recorder.keep()
