"""The bench: every view of one journey, on one cursor."""

import base64
from importlib import import_module
from typing import Any

import ipywidgets

from pdlab.trace.journey import Journey
from pdlab.trace.text import line
from pdlab.views.detail import Detail
from pdlab.views.figure import Figure
from pdlab.views.gates import GatePanel
from pdlab.views.growing import grow
from pdlab.views.memory_map import MemoryMap
from pdlab.views.picture import Picture
from pdlab.views.sequence import sequence
from pdlab.views.shown import ErrorLine, guarded
from pdlab.views.source import Source
from pdlab.views.stepper import Stepper

SOURCE = 440  # pixels that the source needs at least


class Bench(ipywidgets.VBox):
    """Attributes:
    stepper, sequence, blocks, status, source, memory: its views; gates: the panel of the lab, where there is one.
    """

    def __init__(self, journey: Journey, lab: Any = None, compared: Any = None) -> None:
        self.journey = journey
        self._error = ErrorLine()
        self.stepper = Stepper(journey)
        self.sequence = Figure(sequence(journey), last=self.stepper.last)
        self.blocks, self.status = (self._figure(name) for name in ("blocks", "status"))
        self.memory = MemoryMap(journey, last=self.stepper.last)
        self.source = Source(journey)
        self.detail = Detail(journey, compared, lab if journey.held else None)
        self.gates = GatePanel(lab) if lab is not None else None
        self.stepper.follow(self.sequence, self.blocks, self.status, self.source, self.memory)
        self.blocks.observe(guarded(self._error, self._chosen), "chosen")
        super().__init__(self._parts())
        grow(journey, guarded(self._error, self._grow))

    def _grow(self) -> None:
        """See all that has come of the journey since."""
        self.stepper.grow()
        self.source.grow()
        last = self.stepper.last
        self.sequence.grow(sequence(self.journey), last)
        self.blocks.grow(picture_of("blocks", self.journey), last)
        self.status.grow(picture_of("status", self.journey), last)
        self.memory.grow_with(last)
        if not self.journey.held:
            self.detail.lab = None  # what is in its memory now may be another request's

    def _figure(self, name: str) -> Figure:
        return Figure(picture_of(name, self.journey), last=self.stepper.last)

    def _parts(self) -> list[ipywidgets.Widget]:
        rows = [
            self.stepper,
            self._error,
            # Pictures keep their width, the source takes what there is: so two stand side by side on most screens.
            _row(self.sequence, self.source),
            _row(self.blocks, self.status),
            self.detail,
            self.memory,
        ]
        return [*rows, self.gates] if self.gates is not None else rows

    def _chosen(self, change: Any) -> None:
        """A block was clicked, and is shown layer by layer."""
        kind, _, number = change["new"].rpartition(" ")
        if kind in ("P block", "D block"):
            self.detail.show(int(number))

    def __repr__(self) -> str:
        return f"<bench of {line(self.journey).strip('<>')}>"

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        png = base64.b64encode(self.sequence.shown.png()).decode()
        return {**super()._repr_mimebundle_(**kwargs), "text/plain": repr(self), "image/png": png}


def bench(journey: Journey, lab: Any = None, compared: Any = None) -> Bench:
    """All views of a journey: click a step, or use the arrow keys; click a block or a layer.

    Args:
        lab: whose gates are shown beneath, and whose memory is read while the request is held; None: neither.
        compared: what `lab.compare(journey)` found.
    """
    return Bench(journey, lab, compared)


def picture_of(name: str, journey: Journey, **how: Any) -> Picture:
    """The view-model of that name: `pdlab.views.NAME.NAME`."""
    picture: Picture = getattr(import_module(f"pdlab.views.{name}"), name)(journey, **how)
    return picture


def _row(*parts: Figure | Source) -> ipywidgets.HBox:
    """Side by side where the page is wide enough for both as they are; else beneath each other."""
    for part in parts:
        width = part.shown.width if isinstance(part, Figure) else SOURCE
        part.layout.flex, part.layout.min_width = f"1 1 {width}px", "0"
    return ipywidgets.HBox(parts, layout={"flex_flow": "row wrap", "grid_gap": "12px"})
