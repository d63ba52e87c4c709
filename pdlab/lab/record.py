"""The record of a running lab on disk, by which any process finds it again."""

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pdlab.checks import make_folder
from pdlab.errors import PdlabError
from pdlab.lab.process import Process
from pdlab.lab.settings import Settings
from pdlab.paths import state_dir

FORMAT = 1
SERVERS = ("prefill", "decode", "proxy")


@dataclass
class Record:
    """Attributes:
    settings: what the lab was started with.
    processes: by server name.
    ports: by server name, and "bootstrap".
    ready: whether it came up; a record that is not is of a start that was interrupted.
    token: for reading the engines' KV memory.
    owner: the process with which all of it goes, as PID:START; None: none.
    """

    settings: Settings
    processes: dict[str, Process]
    ports: dict[str, int]
    ready: bool = False
    token: str = ""
    owner: str | None = None

    @property
    def dead(self) -> list[str]:
        """Names of the servers that are not running."""
        return [name for name in SERVERS if name not in self.processes or not self.processes[name].alive]

    def url(self, server: str) -> str:
        return f"http://127.0.0.1:{self.ports[server]}"


def folder(name: str) -> Path:
    """Where the lab called `name` keeps its record and its logs.

    Raises:
        PdlabError: not a name.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]{1,64}", name) or name.startswith("."):
        raise PdlabError(f"a lab cannot be called {name!r}", "use letters, digits, - and _")
    return state_dir() / "labs" / name


def load(name: str) -> Record | None:
    """The record of the lab called `name`; None if there is none.

    Raises:
        PdlabError: there is one that this version cannot read: engines may run that it does not know.
    """
    path = folder(name) / "lab.json"
    try:
        return _read(json.loads(path.read_text()))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # not JSON, or not a record's
        raise PdlabError(
            f"lab {name!r} has a record that cannot be read: {path}",
            "end it with the version of pdlab that started it; if nothing of it runs, remove that file",
        ) from None


def _read(fields: dict[str, Any]) -> Record:
    if fields.pop("format", None) != FORMAT:
        raise ValueError
    processes = {key: Process(**process) for key, process in fields["processes"].items()}
    return Record(
        Settings.from_dict(fields["settings"]), processes, fields["ports"], fields["ready"],
        fields.get("token", ""), fields.get("owner"),
    )  # fmt: skip


def save(name: str, record: Record) -> None:
    """Write the record, whole or not at all."""
    path = folder(name) / "lab.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.touch(mode=0o600)  # it holds the token
    draft.write_text(json.dumps({"format": FORMAT, **asdict(record)}, indent=1))
    draft.rename(path)


def remove(name: str) -> None:
    (folder(name) / "lab.json").unlink(missing_ok=True)


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the lab's lock: two that start or end it at once take turns."""
    with (make_folder(folder(name), "the lab") / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
