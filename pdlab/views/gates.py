"""The gates: where requests can be held, who is held there now, and buttons to hold and to release."""

from html import escape
from typing import TYPE_CHECKING, Any

import ipywidgets

from pdlab.views.shown import guarded, said
from pdlab.views.watching import Watching

if TYPE_CHECKING:
    from pdlab.lab.lab import Lab


class GatePanel(Watching):
    """The gates of a lab. What it holds, it holds until its Release button, `close()`, or the hold's own time."""

    def __init__(self, lab: "Lab") -> None:
        from pdlab.inside.points import POINTS

        super().__init__(lab, "pdlab-gate-panel")
        self.points = POINTS
        self._holds: list[Any] = []
        self._table = ipywidgets.HTML()
        self._point = ipywidgets.Dropdown(options=list(POINTS), layout={"width": "190px"})
        self._match = ipywidgets.Text("*", description="request id", tooltip="a pattern: * stands for anything")
        self._hold = self.button("Hold", self._on_hold)
        self._release = self.button("Release", self._on_release)
        row = ipywidgets.HBox([self._point, self._match, self._hold, self._release], layout={"flex_flow": "row wrap"})
        self._draw({})
        self.begin(self._table, row)

    def look(self, *_: Any) -> None:
        """See who is held now, and which holds of this panel stand."""
        self._draw(self.lab.held())

    def _draw(self, held: dict[str, str]) -> None:
        standing = {hold.point: hold.match for hold in self._holds if hold.stands}
        rows = "".join(
            f"<tr><td><b>{point}</b></td><td class='muted'>{escape(where)}</td>"
            f"<td>{_of(point, held, standing)}</td></tr>"
            for point, where in self.points.items()
        )
        if (html := said(f"<table>{rows}</table>")) != self._table.value:
            self._table.value = html

    def close(self) -> None:
        """Release what it holds, and go."""
        self._closed.set()
        guarded(self._error, self._let_go)()
        super().close()

    def _on_hold(self, _: Any) -> None:
        self._holds.append(self.lab.hold(self._point.value, self._match.value or "*"))
        self.look()

    def _on_release(self, _: Any) -> None:
        """All of the lab's holds: those of a cell that was interrupted too."""
        try:
            self._let_go()
        finally:
            self.lab.release()
            self.look()

    def _let_go(self) -> None:
        holds, self._holds = self._holds, []
        for hold in holds:
            hold.release()

    def __repr__(self) -> str:
        return f"<gate panel: {len(self.points)} gates>"


def _of(point: str, held: dict[str, str], standing: dict[str, str]) -> str:
    """Who is held at a point. In words and in a sign: not by colour alone."""
    there = [transfer for transfer, at in held.items() if at == point]
    if there:
        return f"<b class='unequal'>■ holds {len(there)}</b> <span class='muted'>{escape(', '.join(there))}</span>"
    return f"□ closed for {escape(standing[point])}" if point in standing else "<span class='muted'>open</span>"
