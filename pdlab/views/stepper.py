"""The cursor: which step of a journey all views show, in words, with buttons and a slider to move it."""

from html import escape
from typing import Any

import ipywidgets
import traitlets

from pdlab.trace.journey import Journey
from pdlab.trace.steps import NUMBERS, Step
from pdlab.views.failed import failed
from pdlab.views.sequence import ROLES
from pdlab.views.shown import ErrorLine, guarded, said, style

PACE = 1500  # milliseconds a step while it plays: enough to read its line
NOTHING = "nothing has happened yet"


class Stepper(ipywidgets.VBox):
    """A cursor over the steps of a journey; at first on the last one.

    Attributes:
        step: index of the current step; what is set beyond the ends becomes the end.
        last: index of the last step.
    """

    step = traitlets.Int(0)

    def __init__(self, journey: Journey) -> None:
        self.journey, self._steps, self._failed = journey, journey.steps, failed(journey)
        self.last = max(len(self._steps) - 1, 0)
        self._words, self._error = ipywidgets.HTML(), ErrorLine()
        self._back, self._on = (self._button(*of) for of in (("◀", "the step before", -1), ("▶", "the next step", 1)))
        self._play = ipywidgets.Play(max=self.last, interval=PACE, show_repeat=False)
        self._slider = ipywidgets.IntSlider(max=self.last, readout=False, layout={"flex": "1 1 200px"})
        row = ipywidgets.HBox([self._back, self._on, self._play, self._slider])
        super().__init__([style(), self._words, row, self._error])
        self.observe(guarded(self._error, self._say), "step")
        self._play.observe(guarded(self._error, self._from_the_start), "playing")
        self.step = self.last
        self._say()
        for part in (self._play, self._slider):
            self._join(part, "value")

    def grow(self) -> None:
        """Take in the steps that have come. On the last one it goes on to the new last one."""
        at_end = self.step == self.last
        self._steps, self._failed = self.journey.steps, failed(self.journey)
        self.last = self._play.max = self._slider.max = max(len(self._steps) - 1, 0)
        if at_end:
            self.step = self.last
        self._say()

    def follow(self, *widgets: Any) -> "Stepper":
        """Let every widget that has a trait `step` go with the cursor, and move it."""
        for widget in widgets:
            self._join(widget, "step")
        return self

    @traitlets.validate("step")
    def _within(self, proposal: Any) -> int:
        return min(max(int(proposal["value"]), 0), self.last)

    def _join(self, widget: Any, name: str) -> None:
        """Both ways, by hand: traitlets.link raises where the one end does not take the other's value."""

        def lead(*_: Any) -> None:
            setattr(widget, name, self.step)

        def give_way(*_: Any) -> None:
            self.step = getattr(widget, name)
            lead()  # it may have been beyond the end

        self.observe(guarded(self._error, lead), "step")
        widget.observe(guarded(self._error, give_way), name)
        lead()

    def _button(self, words: str, tooltip: str, way: int) -> ipywidgets.Button:
        def move(_: Any) -> None:
            self.step += way

        button = ipywidgets.Button(description=words, tooltip=tooltip, layout={"width": "44px"})
        button.on_click(guarded(self._error, move))
        return button

    def _from_the_start(self, change: Any) -> None:
        if change["new"] and self.step == self.last:
            self.step = 0

    @property
    def _end(self) -> str | None:
        """That it failed, on its last step: how it ended is not given away before."""
        return self._failed if self.step == self.last else None

    def _say(self, *_: Any) -> None:
        self._back.disabled, self._on.disabled = self.step == 0, self.step == self.last
        words = _in_colour(self._steps[self.step]) if self._steps else NOTHING
        self._words.value = said(words + (f'<div class="unequal">{escape(end)}</div>' if (end := self._end) else ""))

    def __repr__(self) -> str:
        end = f"; {self._end}" if self._end else ""
        if not self._steps:
            return f"<stepper: {NOTHING}{end}>"
        step = self._steps[self.step]
        return f"<stepper: step {step.number} of {NUMBERS[-1]}, {step.actor}: {step.title}{end}>"


def _in_colour(step: Step) -> str:
    role = ROLES[step.actor]
    return (
        f'<span class="muted">step</span> <b>{step.number}</b> <span class="muted">of {NUMBERS[-1]} · </span>'
        f'<b class="{role}">{step.actor}</b><span class="muted"> · </span>{escape(step.title)}: '
        f'<span class="{role}">{escape(step.says)}</span>'
        f'<span class="muted"> · after {step.time * 1e3:,.1f} ms</span>'
    )
