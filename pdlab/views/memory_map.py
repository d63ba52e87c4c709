"""The memory of a journey's layers as a widget: a click on a layer shows it, one on a descriptor does its sum."""

from typing import Any

from pdlab.trace.journey import Journey
from pdlab.views.figure import Figure
from pdlab.views.memory import memory


class MemoryMap(Figure):
    """Attributes:
    layer: the layer that is shown.
    """

    def __init__(self, journey: Journey, layer: int = 0, last: int = 0) -> None:
        self.journey, self.layer = journey, layer
        super().__init__(memory(journey, layer), last=last)
        self.observe(self._choose, "chosen")

    def grow_with(self, last: int) -> None:
        """Draw it as far as the journey has come; see `Figure.grow`."""
        self.grow(memory(self.journey, self.layer), last)

    def _choose(self, change: Any) -> None:
        if change["new"] not in {shape.name for shape in self.shown.shapes}:
            return
        kind, _, number = change["new"].rpartition(" ")
        self.layer, descriptor = (int(number), 0) if kind == "layer" else (self.layer, int(number))
        self.show(memory(self.journey, self.layer, chosen=descriptor))
