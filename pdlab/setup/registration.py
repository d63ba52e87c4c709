"""Is this checkout of pdlab registered in an environment, so that vLLM's processes there find its entry points?"""

import json
from importlib import metadata
from pathlib import Path

from pdlab.setup import pins


def registered(repo: Path, path: list[str] | None = None) -> bool:
    """True if the environment's pdlab is this checkout, in editable form, with the entry points of today.

    `path`: the environment's site-packages folders; None: this interpreter's.
    """
    dist = pins.find("pdlab", path)
    if dist is None or dist.version != pins.project()["version"]:
        return False
    return _origin(dist) == repo.as_uri() and _entry_points(dist) == _declared()


def _origin(dist: metadata.Distribution) -> str:
    """Where an editable distribution's source lies, as a file URL; "" for one that was copied in."""
    record = json.loads(dist.read_text("direct_url.json") or "{}")
    return str(record["url"]) if record.get("dir_info", {}).get("editable") else ""


def _entry_points(dist: metadata.Distribution) -> set[tuple[str, str, str]]:
    return {(point.group, point.name, point.value) for point in dist.entry_points}


def _declared() -> set[tuple[str, str, str]]:
    groups = {**pins.project().get("entry-points", {}), "console_scripts": pins.project().get("scripts", {})}
    return {(group, name, value) for group, points in groups.items() for name, value in points.items()}
