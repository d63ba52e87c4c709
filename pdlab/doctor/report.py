"""The findings as a whole: for a terminal, as JSON, as an exit code."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pdlab.doctor.check import Check, Status

STYLES: dict[Status, str] = {"ok": "green", "info": "cyan", "warn": "yellow", "fail": "bold red"}


def verdict(checks: Iterable[Check]) -> int:
    """The exit code: 1 if anything found stops the lab from working, else 0."""
    return int(any(check.status == "fail" for check in checks))


def as_json(checks: Sequence[Check]) -> dict[str, Any]:
    return {"ok": verdict(checks) == 0, "counts": _counts(checks), "checks": [asdict(check) for check in checks]}


def _counts(checks: Iterable[Check]) -> dict[str, int]:
    counts = Counter(check.status for check in checks)
    return {status: counts[status] for status in STYLES}


def render(checks: Sequence[Check]) -> RenderableType:
    """A line a finding, what it means beneath it, and a last line that says whether the lab can run here."""
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        word = "FAIL" if check.status == "fail" else check.status
        table.add_row(Text(word, STYLES[check.status]), Text(check.name, "bold"), _story(check))
    return Group(table, Text(), _summary(checks))


def _story(check: Check) -> Text:
    story = Text(check.found)
    story.append(f"\n{check.meaning}", "dim")
    if check.remedy:
        story.append(f"\nfix: {check.remedy}", STYLES[check.status])
    return story


def _summary(checks: Sequence[Check]) -> Text:
    counts = ", ".join(f"{count} {status}" for status, count in _counts(checks).items() if count)
    if stops := [check.name for check in checks if check.status == "fail"]:
        return Text(f"{counts}. The lab cannot run here yet: {', '.join(stops)}.", STYLES["fail"])
    return Text(f"{counts}. The lab can run here.", STYLES["ok"])
