"""The source of the current step, read from the installed vLLM now, and beside it the values the probe saw.

vLLM's text goes to the page as a message, when the page asks for it: nothing of it is in the widget's state, its text
form or its bundle, so nothing of it can be stored with a notebook.
"""

from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any

import anywidget
import traitlets
from pygments import highlight  # type: ignore[import-untyped]
from pygments.formatters import HtmlFormatter  # type: ignore[import-untyped]
from pygments.lexers import PythonLexer  # type: ignore[import-untyped]

from pdlab.errors import PdlabError
from pdlab.source.anchor import Anchor, Place
from pdlab.source.anchors import ANCHORS
from pdlab.trace.journey import Journey
from pdlab.trace.steps import Step
from pdlab.views.sequence import ROLES
from pdlab.views.shown import palette, themed

HERE = Path(__file__).parent
AROUND = 40  # lines that are shown of a longer symbol
ITEMS, LETTERS = 6, 140  # what is shown of a captured value


def stylesheet() -> str:
    """source.css, and pygments' colours for light and for dark pages; see `pdlab.views.shown.palette`."""
    light, dark = _colours("default"), _colours("github-dark")
    return "\n".join(
        [palette(".pdlab-source"), (HERE / "source.css").read_text(), themed(".pdlab-source", light, dark)]
    )


def _colours(name: str) -> Any:
    """The token colours of a pygments style, as a function of the selector that they are beneath."""
    formatter: Any = HtmlFormatter(style=name, classprefix="pdlab-token-")
    return lambda selector: "\n".join(formatter.get_token_style_defs(selector))


class Source(anywidget.AnyWidget):
    """Attributes:
    step: index of the step whose source is shown.
    whole: whether all of the symbol is shown, or about AROUND lines.
    """

    _esm = HERE / "source.js"
    _css = stylesheet()
    step = traitlets.Int(0).tag(sync=True)
    whole = traitlets.Bool(False).tag(sync=True)

    def __init__(self, journey: Journey, step: int | None = None) -> None:
        self.journey, self._steps = journey, journey.steps
        super().__init__(step=max(len(self._steps) - 1, 0) if step is None else step)
        self.on_msg(self._answer)

    def grow(self) -> None:
        """Take in the steps that have come. On the last one it goes on to the new last one."""
        at_end = self.step >= len(self._steps) - 1
        self._steps = self.journey.steps
        if at_end:
            self.step = max(len(self._steps) - 1, 0)

    def html(self) -> str:
        """What the page shows. It is made of vLLM's source: it goes to the page and nowhere else."""
        if not self._steps:
            return '<div class="muted">nothing has happened yet</div>'
        try:
            step = self._now
            return _shown(step, ANCHORS[step.anchor], self.whole)
        except Exception as error:  # a callback: there is nobody else to show it
            return _problem(error)

    @property
    def _now(self) -> Step:
        return self._steps[min(max(self.step, 0), len(self._steps) - 1)]

    def _answer(self, _: Any, content: dict[str, Any], __: Any) -> None:
        """The page asks for what it shows, or for more or less of it: it asks again when `whole` has changed."""
        if "whole" in content:
            self.whole = bool(content["whole"])
        else:
            self.send({"html": self.html()})

    def __repr__(self) -> str:
        if not self._steps:
            return "<source: nothing has happened yet>"
        step = self._now
        anchor = ANCHORS[step.anchor]
        return f"<source of step {step.number}: {anchor.qualname}, {anchor.module.replace('.', '/')}.py>"


def _shown(step: Step, anchor: Anchor, whole: bool) -> str:
    role = ROLES[step.actor]
    try:
        place = anchor.resolve()
        head, code = _head(anchor, place, whole), _code(place, whole)
    except (PdlabError, OSError) as error:  # recorded mode: no vLLM here
        name = f"<b>{escape(anchor.qualname)}</b> <span class='muted'>{escape(anchor.module)}</span>"
        head, code = name, f'<div style="white-space: normal">{_problem(error)}</div>'
    # Names of roles are also the colours of the mark.
    return (
        f'<div class="{role}"><div class="head">{head}</div><div class="panes">'
        f'<div class="code" tabindex="0" role="region" aria-label="source">{code}</div>'
        f'<div class="facts">{_facts(step)}</div></div></div>'
    )


def _problem(error: Exception) -> str:
    kind = "" if isinstance(error, PdlabError) else f"{type(error).__name__}: "
    return f'<span class="unequal">⚠ {escape(kind + str(error))}</span>'


def _head(anchor: Anchor, place: Place, whole: bool) -> str:
    count = place.last_line - place.first_line + 1
    words = f"<b>{escape(anchor.qualname)}</b> <span class='muted'>{escape(place.file)}:{place.marked_first}</span>"
    if count <= AROUND:
        return words
    offer = "only the lines around the statement" if whole else f"all {count:,} lines of {anchor.qualname}"
    return f"{words} · <button>{escape(offer)}</button>"


def lines_shown(place: Place, whole: bool) -> range:
    """The numbers of the lines that are shown: the marked statement in the middle, inside its symbol."""
    count = place.last_line - place.first_line + 1
    if whole or count <= AROUND:
        return range(place.first_line, place.last_line + 1)
    room = max(AROUND - (place.marked_last - place.marked_first + 1), 0)
    first = min(max(place.marked_first - room // 2, place.first_line), place.last_line - AROUND + 1)
    return range(first, max(first + AROUND, place.marked_last + 1))


def _code(place: Place, whole: bool) -> str:
    marked = range(place.marked_first, place.marked_last + 1)
    lines = _highlighted(place.text())
    return "".join(
        f"<div{' class=marked' if number in marked else ''}><i>{number}</i>{lines[number - place.first_line]}</div>"
        for number in lines_shown(place, whole)
    )


@lru_cache(maxsize=8)
def _highlighted(text: str) -> list[str]:
    """Its lines as HTML. All of it is read by the lexer: a line of a long string is no code."""
    lexer, formatter = PythonLexer(stripnl=False), HtmlFormatter(nowrap=True, classprefix="pdlab-token-")
    return str(highlight(text, lexer, formatter)).split("\n")


def _facts(step: Step) -> str:
    rows = "".join(
        f"<tr><td>{escape(str(name))}</td><td>{escape(shortened(value))}</td></tr>"
        for name, value in step.facts.items()
    )
    return f'<div class="muted">what the probe saw</div><table>{rows}</table>'


def shortened(value: Any) -> str:
    """A captured value in few letters: long lists by their first items and their length."""
    words = _short(value)
    return words if len(words) <= LETTERS else f"{words[:LETTERS]}…"


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_short(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        items = [_short(item) for item in value[:ITEMS]]
        more = [f"… {len(value)} in all"] if len(value) > ITEMS else []
        return f"[{', '.join([*items, *more])}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
