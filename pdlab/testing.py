"""`python3 -m pdlab test`: the tests, and every notebook under strict nbval, in one session on one lab."""

import os
import subprocess
import sys
from collections.abc import Sequence

from pdlab.errors import PdlabError
from pdlab.paths import repo_root

NBVAL = ["--nbval", "--nbval-sanitize-with=notebooks/sanitize.cfg", "--nbval-cell-timeout=300", "--nbval-current-env"]


def run_tests(arguments: Sequence[str]) -> int:
    """Run pytest with `arguments`, or over everything if there are none, and return its exit code.

    Raises:
        PdlabError: this is no checkout.
    """
    root = repo_root()
    if not (root / "tests").is_dir():
        raise PdlabError("there are no tests beside the package", "run it from a clone of the repository")
    chosen = list(arguments) or ["tests", "notebooks"]
    environment = {**os.environ, "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *NBVAL, *chosen], cwd=root, env=environment, check=False
    ).returncode
