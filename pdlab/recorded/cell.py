"""Which cell of a notebook runs now, so that a cell that is run again plays again what it played."""

import sys
from typing import Any


def running_cell() -> tuple[str, str] | None:
    """The cell's id, and that of this run of it; None where no front end tells (a script, nbval, nbconvert)."""
    if "IPython" not in sys.modules:
        return None
    from IPython.core.getipython import get_ipython

    kernel: Any = getattr(get_ipython(), "kernel", None)
    if kernel is None or not hasattr(kernel, "get_parent"):
        return None
    request = kernel.get_parent("shell")
    cell, run = request.get("metadata", {}).get("cellId"), request.get("header", {}).get("msg_id")
    return (cell, run) if cell and run else None
