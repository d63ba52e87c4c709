"""The gates: where requests can be held, who is held there now, and buttons to hold and to release."""

import threading
import time
from html import escape
from typing import TYPE_CHECKING, Any

import ipywidgets

from pdlab.views.shown import ErrorLine, guarded, said, style

if TYPE_CHECKING:
    from pdlab.lab.lab import Lab

LOOK = 0.5  # seconds between two looks at who is held


class GatePanel(ipywidgets.VBox):
    """The gates of a lab. What it holds, it holds until its Release button, `close()`, or the hold's own time."""

    def __init__(self, lab: "Lab") -> None:
        from pdlab.inside.points import POINTS

        self.lab, self.points = lab, POINTS
        self._holds: list[Any] = []
        self._table, self._error = ipywidgets.HTML(), ErrorLine()
        self._point = ipywidgets.Dropdown(options=list(POINTS), layout={"width": "190px"})
        self._match = ipywidgets.Text("*", description="request id", tooltip="a pattern: * stands for anything")
        self._hold = self._button("Hold", self._on_hold)
        self._release = self._button("Release", self._on_release)
        row = ipywidgets.HBox([self._point, self._match, self._hold, self._release], layout={"flex_flow": "row wrap"})
        super().__init__([style(), self._table, row, self._error])
        self._closed = threading.Event()
        self._draw({})
        guarded(self._error, self.look)()
        if not _is_recorded(lab):
            threading.Thread(target=self._watch, name="pdlab-gate-panel", daemon=True).start()

    def look(self, *_: Any) -> None:
        """See who is held now, and which holds of this panel stand."""
        self._draw(self.lab.held())

    def _draw(self, held: dict[str, str]) -> None:
        standing = {hold.point: hold.match for hold in self._holds}
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

    def _watch(self) -> None:
        """Look until it is closed or the lab is down. Slowly where a look takes long: the trace may be big."""
        pause = LOOK
        while not self._closed.wait(pause):
            began = time.monotonic()
            if _is_down(self.lab):
                return self._error.say("the lab is down")
            try:
                self.look()
            except Exception as error:
                return self._error.say(error)
            pause = max(LOOK, 5 * (time.monotonic() - began))
        return None

    def _button(self, words: str, callback: Any) -> ipywidgets.Button:
        button = ipywidgets.Button(description=words, layout={"width": "90px"})
        button.on_click(guarded(self._error, callback))
        return button

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


def _is_down(lab: Any) -> bool:
    """Whether its proxy has ended: without that nothing new comes, and `down()` ends it with the rest."""
    return not lab.proxy.process.alive


def _is_recorded(lab: Any) -> bool:
    from pdlab.recorded.player import RecordedLab

    return isinstance(lab, RecordedLab)
