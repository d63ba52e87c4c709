"""A recorded run as a file: the calls of a lab in their order, each with what came of it."""

import gzip
import json
import os
import re
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdlab.errors import PdlabError
from pdlab.paths import repo_root
from pdlab.recorded.calls import Arguments
from pdlab.trace.event import SCHEMA as EVENTS

SCHEMA = 1
ENDING = ".json.gz"
HOW = "record one where engines run: python3 -m pdlab record"


@dataclass
class Call:
    """One call, as it was made.

    Attributes:
        path: dotted: "send", "prefill.metric", "compare().rewritten".
        of: index of the call that gave the object it is a call of; None: of `pdlab` itself ("up").
        arguments: see `pdlab.recorded.calls.named`.
        result: what it returned; error: what it raised instead. Both as `pdlab.recorded.codec` keeps them.
        spare: nobody made this call: it answers where none that was made does.
    """

    path: str
    of: int | None = None
    arguments: Arguments = field(default_factory=dict)
    result: Any = None
    error: Any = None
    spare: bool = False


@dataclass
class Tape:
    """Attributes:
    about: when (date and minute), where (the machine, in words), versions, model and profile.
    calls: in their order.
    pool: what several results share (events of a trace, bytes); these say where it stands.
    """

    about: dict[str, Any]
    calls: list[Call]
    pool: list[Any] = field(default_factory=list)

    def save(self, path: Path) -> Path:
        """Write it, whole or not at all."""
        fields = {
            "schema": SCHEMA, "events": EVENTS, "about": self.about, "calls": [_stored(call) for call in self.calls],
            "pool": self.pool,
        }  # fmt: skip
        text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_bytes(gzip.compress(text.encode(), mtime=0))
        draft.replace(path)
        return path

    @classmethod
    def load(cls, path: Path) -> "Tape":
        """The tape that `save` wrote.

        Raises:
            PdlabError: there is none, it is broken, or of another schema.
        """
        try:
            fields = json.loads(gzip.decompress(path.read_bytes()))
            schemas = fields["schema"], fields["events"]
            if schemas == (SCHEMA, EVENTS):
                return cls(fields["about"], [Call(**call) for call in fields["calls"]], fields["pool"])
        except FileNotFoundError:
            raise PdlabError(f"there is no recorded run {_name(path)!r}", there_are(path.parent)) from None
        except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, AttributeError) as error:
            what = f"{path.name} is no recorded run ({type(error).__name__}: {error})"
            raise PdlabError(what, there_are(path.parent)) from None
        raise PdlabError(
            f"{path.name} has schemas {schemas[0]} and {schemas[1]} (events); this pdlab reads {SCHEMA} and {EVENTS}",
            there_are(path.parent),
        )


def _stored(call: Call) -> dict[str, Any]:
    """Its fields, without those that are as in any other."""
    usual = vars(Call(""))
    return {key: value for key, value in vars(call).items() if value != usual[key]}


def data_dir() -> Path:
    """Where recorded runs are kept: $PDLAB_DATA, or data/ beside the package."""
    return Path(os.environ["PDLAB_DATA"]).absolute() if os.environ.get("PDLAB_DATA") else repo_root() / "data"


def path_of(name: str) -> Path:
    """The file of the run of that name, there or not.

    Raises:
        PdlabError: not a name.
    """
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]{0,63}", name):
        raise PdlabError(f"a recorded run cannot be called {name!r}", "use letters, digits, - and _")
    return data_dir() / f"{name}{ENDING}"


def there_are(folder: Path) -> str:
    """Which runs are in `folder`, and how to record one: for an error's second line."""
    runs = ", ".join(sorted(map(_name, folder.glob(f"*{ENDING}")))) if folder.is_dir() else ""
    return f"there {f'are: {runs}' if runs else 'are none'}; {HOW}"


def _name(path: Path) -> str:
    return path.name.removesuffix(ENDING)
