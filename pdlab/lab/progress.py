"""Showing where a start has come, while the reader waits: lines in a terminal, one widget in a notebook."""

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # where recorded runs play, nothing starts
    from pdlab.lab.startup import Report


@contextlib.contextmanager
def progress(report: "Report | None" = None) -> "Iterator[Report]":
    """Yield what to call with (server, stage, seconds): `report` if given, else what suits where this runs."""
    if report is not None:
        yield report
    elif in_notebook():
        with _notebook() as tell:
            yield tell
    else:
        yield in_terminal


def in_terminal(server: str, stage: str, seconds: float) -> None:
    """One line on stderr, so that stdout holds nothing but results."""
    print(f"  {seconds:5.1f} s  {server:<8} {stage}", file=sys.stderr, flush=True)


def in_notebook() -> bool:
    try:
        from IPython.core.getipython import get_ipython
    except ImportError:
        return False
    return type(get_ipython()).__name__ == "ZMQInteractiveShell"


@contextlib.contextmanager
def _notebook() -> "Iterator[Report]":
    from IPython.display import display
    from ipywidgets import HTML

    class Progress(HTML):
        # A stable repr: what a notebook stores of it must not depend on timing.
        def __repr__(self) -> str:
            return "<Progress of the lab's start>"

    stages: dict[str, str] = {}
    panel = Progress()
    display(panel)

    def tell(server: str, stage: str, seconds: float) -> None:
        stages[server] = f"<tr><td><b>{server}</b>&nbsp;</td><td>{stage}&nbsp;</td><td>{seconds:.0f} s</td></tr>"
        panel.value = f"<table>{''.join(stages.values())}</table>"

    yield tell
