"""Where pdlab keeps what it makes. Standard library only; nothing here creates a folder."""

import os
from contextlib import suppress
from pathlib import Path


def repo_root() -> Path:
    """The folder that holds the `pdlab` package: the checkout, where pdlab runs from one."""
    return Path(__file__).resolve().parent.parent


def cache_dir() -> Path:
    """What can be made again (prepared models): $PDLAB_CACHE, $XDG_CACHE_HOME/pdlab or ~/.cache/pdlab."""
    return _user_dir("PDLAB_CACHE", "XDG_CACHE_HOME", ".cache")


def state_dir() -> Path:
    """What a running lab leaves (its record, its logs): $PDLAB_STATE, $XDG_STATE_HOME/pdlab or ~/.local/state/pdlab."""
    return _user_dir("PDLAB_STATE", "XDG_STATE_HOME", ".local/state")


def _user_dir(own: str, xdg: str, default: str) -> Path:
    if os.environ.get(own):
        given = Path(os.environ[own])
        with suppress(RuntimeError):  # ~nobody: a folder of that name, then
            given = given.expanduser()
        return given.absolute()
    base = os.environ.get(xdg, "")
    # The XDG specification: a relative path is to be ignored.
    home = Path(base) if Path(base).is_absolute() else Path.home() / default
    return home / "pdlab"
