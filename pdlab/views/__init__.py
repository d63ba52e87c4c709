"""What the reader sees: view-models, which are pure functions of a journey, and the widgets that show them.

A widget computes nothing: it draws the shapes it is given and says which step or shape was chosen. The functions here
are what a notebook calls; each imports what it needs when it is called.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlab.lab.lab import Lab
    from pdlab.trace.journey import Journey
    from pdlab.trace.trace import Trace
    from pdlab.views.bench import Bench
    from pdlab.views.figure import Figure
    from pdlab.views.gates import GatePanel
    from pdlab.views.predict import Prediction
    from pdlab.views.source import Source
    from pdlab.views.stepper import Stepper
    from pdlab.views.timeline import Timeline

__all__ = [
    "bench", "blocks_view", "gate_panel", "memory_view", "predict", "sequence_view", "source_view", "status_view",
    "stepper", "timeline_view",
]  # fmt: skip


def bench(journey: "Journey", lab: "Lab | None" = None, compared: Any = None) -> "Bench":
    """All views of a journey on one cursor; with a lab, its gates too; with what was compared, what is equal."""
    from pdlab.views.bench import bench as made

    return made(journey, lab, compared)


def predict(question: str, options: "Sequence[str]", answer: str, because: str = "") -> "Prediction":
    """A question to answer before the run; it waits for nobody."""
    from pdlab.views.predict import predict as made

    return made(question, options, answer, because)


def stepper(journey: "Journey") -> "Stepper":
    """A cursor over the steps; `stepper.follow(view, …)` lets views go with it."""
    from pdlab.views.stepper import Stepper

    return Stepper(journey)


def sequence_view(journey: "Journey", to_scale: bool = False) -> "Figure":
    """The sequence diagram; to scale, distance from top to bottom is time."""
    return _figure("sequence", journey, to_scale=to_scale)


def blocks_view(journey: "Journey", compared: Any = None) -> "Figure":
    """The block tables of both sides; with what `lab.compare(journey)` found."""
    return _figure("blocks", journey, compared=compared)


def memory_view(journey: "Journey", layer: int = 0) -> "Figure":
    """The memory of one layer on both sides, and what is written from the one to the other."""
    return _figure("memory", journey, layer=layer)


def status_view(journey: "Journey") -> "Figure":
    """Status and computed tokens of both halves."""
    return _figure("status", journey)


def source_view(journey: "Journey") -> "Source":
    """The installed vLLM's source of each step, and the values that were seen there."""
    from pdlab.views.source import Source

    return Source(journey)


def gate_panel(lab: "Lab") -> "GatePanel":
    """The gates of a lab: who is held, and buttons to hold and to release."""
    from pdlab.views.gates import GatePanel

    return GatePanel(lab)


def timeline_view(trace: "Trace") -> "Timeline":
    """Many journeys over time."""
    from pdlab.views.timeline import Timeline

    return Timeline(trace)


def _figure(name: str, journey: "Journey", **how: Any) -> "Figure":
    from pdlab.views.bench import picture_of
    from pdlab.views.figure import Figure

    return Figure(picture_of(name, journey, **how), last=max(len(journey.steps) - 1, 0))


class _Views(ModuleType):
    """This package. `bench`, `predict` and `stepper` stay the functions above when the modules of these names load."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and name in __all__):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Views
