"""What `pdlab.up()` shows where it plays a recorded run, in the place of a start's progress."""

import sys
from typing import TYPE_CHECKING, Any

from pdlab.lab.progress import in_notebook

if TYPE_CHECKING:
    from pdlab.lab.startup import Report


def tell(run: str, said: str, report: "Report | None") -> None:
    """Say that nothing runs: to `report`, in a notebook, or on stderr.

    Args:
        run: its name.
        said: the note of everything it displays.
    """
    words = f"plays the run {run!r}{said}"
    if report is not None:
        report("lab", words, 0.0)
    elif in_notebook():
        _display(words, said)
    else:
        print(f"  {0:5.1f} s  {'lab':<8} {words}", file=sys.stderr, flush=True)


def _display(words: str, said: str) -> None:
    from html import escape

    from IPython.display import display
    from ipywidgets import HTML

    class Progress(HTML):
        # As a live one, and the note: the stored output of a notebook is the same.
        def __repr__(self) -> str:
            return f"<Progress of the lab's start{said}>"

        # ipywidgets would cut it after 110 characters.
        def _repr_mimebundle_(self, **kwargs: Any) -> Any:
            return {**super()._repr_mimebundle_(**kwargs), "text/plain": repr(self)}

    display(Progress(f"<b>lab</b> {escape(words)}: nothing runs here, all of it did there"))
