"""The health of a lab: which servers are up, what each engine holds, and buttons that bring it back."""

from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING, Any

import ipywidgets

from pdlab.errors import PdlabError
from pdlab.views.shown import guarded, said
from pdlab.views.watching import Watching, is_recorded

if TYPE_CHECKING:
    from pdlab.lab.lab import Lab
    from pdlab.lab.usage import Usage

SERVERS = {"prefill": "P", "decode": "D", "proxy": "proxy"}  # the colour of each
COUNTS = ("running", "waiting", "parked", "kept", "sends")
HEADS = ("", "", "KV blocks", *COUNTS)


class HealthPanel(Watching):
    """One live table of a lab. Unlike other panels it goes on when the proxy has died: that can be healed."""

    def __init__(self, lab: "Lab") -> None:
        super().__init__(lab, "pdlab-health-panel")
        self._any_up = True
        self._table, self._did = ipywidgets.HTML(), ipywidgets.HTML()
        self._buttons = [
            self.button(words, callback)
            for words, callback in (("Heal", self._on_heal), ("Reset", self._on_reset), ("Release", self._on_release))
        ]
        row = ipywidgets.HBox(self._buttons, layout={"flex_flow": "row wrap"})
        self.begin(self._table, row, self._did)

    def look(self, *_: Any) -> None:
        """See which servers are up, what the engines hold, and who is held."""
        states = self.lab.status()["servers"]
        self._any_up = any(state["up"] for state in states.values())
        rows = "".join(self._row(server, states.get(server, {"up": False})) for server in SERVERS)
        heads = "".join(f"<th class='muted'>{head}</th>" for head in HEADS)
        held = self._held() if self._any_up else ""
        html = said(f"<table><tr>{heads}</tr>{rows}</table>{held}")
        if html != self._table.value:
            self._table.value = html

    def is_over(self) -> bool:
        """Whether nothing of it was up at the last look, and nothing is being done about that."""
        return not self._any_up and not self._buttons[0].disabled

    def _row(self, server: str, state: dict[str, Any]) -> str:
        role = SERVERS[server]
        name = f"<td><b class='{role}'>{server}</b></td>"
        if not state["up"]:
            return f"<tr>{name}{_down(state.get('ended', ''))}</tr>"
        if server == "proxy":
            return f"<tr>{name}{_UP}</tr>"
        try:
            usage = getattr(self.lab, server).usage()
        except PdlabError as error:
            if is_recorded(self.lab):  # it was up, but nobody had asked it
                return f"<tr>{name}{_UP}<td colspan='{len(HEADS) - 2}' class='muted'>{escape(error.message)}</td></tr>"
            return f"<tr>{name}{_down(error.message)}</tr>"
        return f"<tr>{name}{_UP}{_used(usage, role)}</tr>"

    def _held(self) -> str:
        """Who is held, and where. A lab that is not traced cannot tell, which is no error here."""
        try:
            held = self.lab.held()
        except PdlabError as error:
            return f"<div class='muted'>{escape(error.message)}</div>"
        if not held:
            return "<div class='muted'>□ nothing is held</div>"
        words = ", ".join(f"{escape(transfer)} at {escape(point)}" for transfer, point in held.items())
        return f"<div><b class='unequal'>■ holds {len(held)}</b> <span class='muted'>{words}</span></div>"

    def _on_heal(self, _: Any) -> None:
        self._act("healing", lambda: repr(self.lab.heal(self._tell)))

    def _on_reset(self, _: Any) -> None:
        def reset() -> str:
            self.lab.reset()
            return "reset: nothing is held or under way, both prefix caches are empty"

        self._act("resetting", reset)

    def _on_release(self, _: Any) -> None:
        def release() -> str:
            self.lab.release()
            return "released: no hold stands any more"

        self._act("releasing", release)

    def _act(self, words: str, act: Callable[[], str]) -> None:
        """Do it, and say what came of it. Until it is done no button can be clicked: each may undo another's work."""
        self._say(f"… {words}")
        self._enable(False)
        came = ""
        try:
            came = act()
        finally:
            self._say(came)
            guarded(self._error, self.look)()
            self._enable(True)
            self.watch()  # it may have come up again

    def _tell(self, server: str, stage: str, seconds: float) -> None:
        """How far a heal has come."""
        self._say(f"… healing: {server} {stage}, {seconds:.0f} s")

    def _say(self, words: str) -> None:
        self._did.value = said(escape(words)) if words else ""

    def _enable(self, on: bool) -> None:
        for button in self._buttons:
            button.disabled = not on

    def __repr__(self) -> str:
        return f"<health panel: {len(SERVERS)} servers>"


# In words and in signs: not by colour alone.
_UP = "<td><span class='equal'>✓ up</span></td>"


def _down(why: str) -> str:
    words = f" <span class='muted'>{escape(why)}</span>" if why else ""
    return f"<td colspan='{len(HEADS) - 1}'><b class='unequal'>✗ down</b>{words}</td>"


def _used(usage: "Usage", role: str) -> str:
    share = 100 * usage.used_blocks / max(usage.blocks, 1)
    bar = f"<div class='bar {role}'><div style='width: {share:.0f}%'></div></div>"
    counts = [str(getattr(usage, name)) for name in COUNTS]
    cells = [f"{bar} {usage.used_blocks} of {usage.blocks}", *counts]
    return "".join(f"<td>{cell}</td>" for cell in cells)
