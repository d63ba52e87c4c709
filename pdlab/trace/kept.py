"""Journeys as files."""

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from pdlab.checks import write
from pdlab.errors import PdlabError
from pdlab.trace.answer import Answer
from pdlab.trace.event import SCHEMA, by_time, read_line


def made_of(fields: dict[str, Any]) -> dict[str, Any]:
    """What `Journey` is made of, from what `Journey.as_dict` gave. PdlabError if it is none, or of another schema."""
    try:
        if fields["schema"] != SCHEMA:
            raise PdlabError(
                f"this journey has trace schema {fields['schema']}; this pdlab reads {SCHEMA}",
                "read it with the pdlab that wrote it",
            )
        said = fields["answer"]
        return {
            "request_id": fields["request_id"],
            "events": by_time([read_line(json.dumps(line)) for line in fields["events"]]),
            "transfer_id": fields["transfer_id"],
            "answer": said and Answer(**{**said, "token_ids": tuple(said["token_ids"])}),
            "error": PdlabError(fields["error"]) if fields["error"] else None,
            "about": dict(fields["about"]),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise PdlabError(f"this is no journey ({type(error).__name__}: {error})", "journey.save writes one") from None


def save(fields: dict[str, Any], path: str | Path) -> Path:
    """Write them to a file: JSON, or compressed where the name ends in .gz."""
    data = json.dumps(fields, separators=(",", ":")).encode()
    return write(path, gzip.compress(data, mtime=0) if str(path).endswith(".gz") else data)


def load(path: str | Path) -> Any:
    """What `save` wrote. PdlabError if there is none."""
    try:
        raw = Path(path).read_bytes()
        return json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except (OSError, TypeError, ValueError, EOFError, zlib.error) as error:
        raise PdlabError(f"cannot read a journey from {path} ({error})", "journey.save writes one") from None
