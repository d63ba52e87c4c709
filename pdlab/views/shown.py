"""What the widgets made of ipywidgets share: errors that are seen, and the colours of figure.css.

Whatever a callback raises shows nowhere in a notebook; so every callback here goes through `guarded`, and what it
raised stands in the widget, in one line.
"""

import warnings
from collections.abc import Callable
from functools import wraps
from html import escape
from typing import Any

import ipywidgets

from pdlab.views.picture import THEME

STYLE = """
.pdlab-said { font-variant-numeric: tabular-nums; color: var(--pdlab-text); line-height: 1.5; white-space: normal; }
.pdlab-said .muted { color: var(--pdlab-muted); }
.pdlab-said .unequal { color: var(--pdlab-unequal); }
.pdlab-said .equal { color: var(--pdlab-equal); }
.pdlab-said .proxy { color: var(--pdlab-proxy); }
.pdlab-said .P { color: var(--pdlab-P); }
.pdlab-said .D { color: var(--pdlab-D); }
.pdlab-said table { border-collapse: collapse; }
.pdlab-said td, .pdlab-said th { padding: 1px 16px 1px 0; text-align: left; font-weight: normal; }
.pdlab-said .bar { display: inline-block; width: 80px; height: 9px; border: 1px solid currentColor; }
.pdlab-said .bar div { height: 100%; background: currentColor; }
"""


def palette(selector: str) -> str:
    """The theme's colours as CSS variables of `selector`; see `themed`."""
    light, dark = ("".join(f"--pdlab-{role}:{colours[i]};" for role, colours in THEME.items()) for i in (0, 1))
    return themed(selector, lambda chosen: f"{chosen}{{{light}}}", lambda chosen: f"{chosen}{{{dark}}}")


def themed(selector: str, light: Callable[[str], str], dark: Callable[[str], str]) -> str:
    """Rules for a light and a dark page: as the system is, unless the page says; JupyterLab and VS Code do.

    Args:
        light, dark: the rules for whatever selector they are given.
    """
    return "\n".join(
        [
            light(f"body {selector}"),
            f"@media (prefers-color-scheme: dark){{{dark(f'body {selector}')}}}",
            *(light(f"body{page} {selector}") for page in ('[data-jp-theme-light="true"]', ".vscode-light")),
            *(dark(f"body{page} {selector}") for page in ('[data-jp-theme-light="false"]', ".vscode-dark")),
        ]
    )


def said(html: str) -> str:
    """HTML for an `ipywidgets.HTML`, in the theme's colours."""
    return f'<div class="pdlab-said">{html}</div>'


def style() -> ipywidgets.HTML:
    """A widget that shows nothing and brings the style of `said`."""
    sheet = ipywidgets.HTML(f"<style>{palette('.pdlab-said')}{STYLE}</style>")
    sheet.layout.display = "none"
    return sheet


class ErrorLine(ipywidgets.HTML):
    """What went wrong, a line for each callback that failed last time; not there while none did."""

    def __init__(self) -> None:
        super().__init__()
        self._problems: dict[object, str] = {}
        self.clear()

    def say(self, problem: BaseException | str, of: object = None) -> None:
        """Show it. An error that is no PdlabError comes with its type: it is a fault of ours.

        Args:
            of: whose problem it is: it takes the place of that one's last.
        """
        words = " · ".join(line.strip() for line in str(problem).splitlines() if line.strip())
        if isinstance(problem, BaseException) and not hasattr(problem, "hint"):
            words = f"{type(problem).__name__}: {words}"
        self._problems[of] = f'<div class="unequal">⚠ {escape(words)}</div>'
        self._show()

    def clear(self, of: object = None) -> None:
        self._problems.pop(of, None)
        self._show()

    def _show(self) -> None:
        self.value, self.layout.display = said("".join(self._problems.values())), "" if self._problems else "none"

    def __repr__(self) -> str:
        return "<error line>"


def guarded(line: ErrorLine, callback: Callable[..., None]) -> Callable[..., None]:
    """The same callback; what it raises or warns of is shown in `line` until it succeeds."""

    @wraps(callback)
    def call(*args: Any) -> None:
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                callback(*args)
            line.clear(callback)
            if told := [str(warning.message) for warning in warned if issubclass(warning.category, UserWarning)]:
                line.say("\n".join(told), callback)
        except Exception as error:
            line.say(error, callback)

    return call
