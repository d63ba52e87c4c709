"""A question to answer before the run: what do you expect?"""

from collections.abc import Sequence
from html import escape
from typing import Any

import ipywidgets
import traitlets

from pdlab.errors import PdlabError
from pdlab.views.shown import ErrorLine, guarded, said, style


class Prediction(ipywidgets.VBox):
    """Attributes:
    chosen: the option that is ticked; None: none is.
    right: whether it was right when it was checked; None: not checked since it was chosen.
    """

    chosen = traitlets.Unicode(None, allow_none=True)
    right = traitlets.Bool(None, allow_none=True)

    def __init__(self, question: str, options: Sequence[str], answer: str, because: str = "") -> None:
        if not isinstance(options, list | tuple) or not all(isinstance(e, str) for e in (question, because, *options)):
            raise PdlabError("a question and its options are text", 'give options as a list: ["yes", "no"]')
        if answer not in options:
            raise PdlabError(f"the answer {answer!r} is none of the options", "options has every answer, word for word")
        self.question, self._answer, self._because = question, answer, because
        self._verdict, self._error = ipywidgets.HTML(), ErrorLine()
        self._radio = ipywidgets.RadioButtons(options=list(options), value=None, layout={"width": "max-content"})
        self._check = ipywidgets.Button(description="Check", disabled=True, layout={"width": "90px"})
        asked = ipywidgets.HTML(said(f"<b>{escape(question)}</b>"))
        super().__init__([style(), asked, self._radio, self._check, self._verdict, self._error])
        self._radio.observe(guarded(self._error, self._ticked), "value")
        self.observe(guarded(self._error, self._was_chosen), "chosen")
        self._check.on_click(guarded(self._error, self._judge))

    def _ticked(self, change: Any) -> None:
        self.chosen = change["new"]

    def _was_chosen(self, change: Any) -> None:
        self._radio.value = change["new"]  # raises where it is none of the options
        self._check.disabled, self.right, self._verdict.value = change["new"] is None, None, ""

    def _judge(self, _: Any) -> None:
        if self.chosen is None:
            return
        self.right = self.chosen == self._answer
        sign, role = ("✓ right", "equal") if self.right else (f"✗ no: {escape(self._answer)}", "unequal")
        because = f'<span class="muted"> · </span>{escape(self._because)}' if self._because else ""
        self._verdict.value = said(f'<b class="{role}">{sign}</b>{because}')

    def __repr__(self) -> str:
        return f"<prediction: {self.question}>"


def predict(question: str, options: Sequence[str], answer: str, because: str = "") -> Prediction:
    """Ask for a prediction. It waits for nobody: whoever runs all cells goes on.

    Args:
        answer: the option that is right.
        because: why, shown with the verdict.

    Raises:
        PdlabError: the answer is none of the options, or these are no list of text.
    """
    return Prediction(question, options, answer, because)
