"""The faults and what came of each, as a table: from the checks' own outcomes, not typed."""

from collections.abc import Iterator
from typing import Any

from pdlab.faults.faults import FAULTS, stored
from pdlab.paths import repo_root

BEGIN, END = "<!-- faults: written by python3 -m pdlab faults --keep -->\n", "\n<!-- end of faults -->"


class Table:
    """What `data/faults.json` says came of the faults; in a terminal a block of lines each, in a notebook a table.

    Args:
        names: of those to show; none: all.
    """

    def __init__(self, *names: str) -> None:
        kept = stored()
        self.about: dict[str, Any] = kept["about"]
        self.rows = {name: row for name, row in kept["faults"].items() if name in (names or FAULTS)}

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for name, row in self.rows.items():
            yield f"{name}: {row['title']}"
            yield from (f"  {key:<9} {row[key]}" for key in ("stock", "pdlab", "after", "upstream") if row[key])

    def _repr_markdown_(self) -> str:
        return self.markdown()

    def markdown(self) -> str:
        """A table of a row for each fault."""
        version = self.about["versions"]["vllm"]
        head = f"| fault | stock vLLM {version} | through pdlab's proxy | the lab, afterwards |\n|---|---|---|---|"
        return "\n".join([head, *(self._row(name, row) for name, row in self.rows.items())])

    def _row(self, name: str, row: dict[str, str]) -> str:
        upstream = f" ({row['upstream']})" if row["upstream"] else ""
        cells = (f"`{name}`: {row['title']}", row["stock"] + upstream, row["pdlab"], row["after"])
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def into_readme() -> None:
    """Write the table where README.md marks the place for it."""
    path = repo_root() / "README.md"
    head, begin, rest = path.read_text().partition(BEGIN)
    _, end, tail = rest.partition(END)
    if begin and end:
        path.write_text(f"{head}{begin}{Table().markdown()}{end}{tail}")
