"""`python3 -m pdlab test`: the tests, and every notebook under strict nbval, in one session on one lab."""

import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from pdlab.errors import PdlabError
from pdlab.paths import repo_root

NBVAL = ["--nbval", "--nbval-sanitize-with=notebooks/sanitize.cfg", "--nbval-cell-timeout=300", "--nbval-current-env"]


def run_tests(arguments: Sequence[str]) -> NoReturn:
    """Become pytest with `arguments`, over everything if they name no file: it gets the reader's Ctrl-C itself.

    Raises:
        PdlabError: this is no checkout.
    """
    root = repo_root()
    if not (root / "tests").is_dir():
        raise PdlabError("there are no tests beside the package", "run it from a clone of the repository")
    os.chdir(root)
    for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.default_int_handler if ending == signal.SIGINT else signal.SIG_DFL)
    environment = {**os.environ, "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    os.execve(sys.executable, [sys.executable, "-m", "pytest", *NBVAL, *arguments], environment)
