"""A picture on the page: drawn by figure.js where a kernel runs, by `Picture.svg` and `Picture.png` elsewhere."""

import base64
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from pdlab.views.picture import ALWAYS, Picture
from pdlab.views.shown import palette

HERE = Path(__file__).parent


def style() -> str:
    """figure.css, with the theme's colours in front."""
    return palette(".pdlab-figure") + (HERE / "figure.css").read_text()


class Figure(anywidget.AnyWidget):
    """Attributes:
    picture: what is drawn, as `Picture.as_dict`.
    step: index of the step that is lit; arrow keys and clicks move it. last: the highest there is.
    chosen: the name of the shape that was clicked last.
    """

    _esm = HERE / "figure.js"
    _css = style()
    picture = traitlets.Dict().tag(sync=True)
    step = traitlets.Int(0).tag(sync=True)
    last = traitlets.Int(0).tag(sync=True)
    chosen = traitlets.Unicode("").tag(sync=True)

    def __init__(self, picture: Picture, last: int = 0, **traits: Any) -> None:
        super().__init__(picture=picture.as_dict(), last=last, step=traits.pop("step", last), **traits)
        self.shown = picture

    def show(self, picture: Picture) -> None:
        """Draw another picture in its place."""
        self.shown, self.picture = picture, picture.as_dict()

    def grow(self, picture: Picture, last: int) -> None:
        """Draw a picture that has more steps. Who looks at the last one goes on to the new last one."""
        at_end = self.step == self.last
        self.show(picture)
        self.last = last
        if at_end:
            self.step = last

    def __repr__(self) -> str:
        return f"<{self.shown.line}>"

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        bundle = super()._repr_mimebundle_(**kwargs)
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        data = {
            **(data or {}),
            "text/plain": repr(self),
            "image/png": base64.b64encode(self.shown.png(self._now)).decode(),
        }
        return data, metadata

    @property
    def _now(self) -> int:
        return self.step if self.last else ALWAYS - 1
