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
    from pdlab.views.health import HealthPanel
    from pdlab.views.memory_map import MemoryMap
    from pdlab.views.predict import Prediction
    from pdlab.views.source import Source
    from pdlab.views.stepper import Stepper
    from pdlab.views.timeline import Timeline

__all__ = [
    "bench", "blocks_view", "gate_panel", "health_view", "memory_view", "predict", "sequence_view", "source_view",
    "status_view", "stepper", "timeline_view",
]  # fmt: skip


def bench(journey: "Journey", lab: "Lab | None" = None, compared: Any = None) -> "Bench":
    """All views of a journey on one cursor; with a lab, its gates too; with what was compared, what is equal."""
    from pdlab.views.bench import bench as made

    _must_be_lab(lab) if lab is not None else None
    return made(_journey(journey), lab, _comparison(compared))


def predict(question: str, options: "Sequence[str]", answer: str, because: str = "") -> "Prediction":
    """A question to answer before the run; it waits for nobody."""
    from pdlab.views.predict import predict as made

    return made(question, options, answer, because)


def stepper(journey: "Journey") -> "Stepper":
    """A cursor over the steps; `stepper.follow(view, …)` lets views go with it."""
    from pdlab.views.growing import grow
    from pdlab.views.stepper import Stepper

    made = Stepper(_journey(journey))
    grow(journey, made.grow)
    return made


def sequence_view(journey: "Journey", to_scale: bool = False) -> "Figure":
    """The sequence diagram; to scale, distance from top to bottom is time."""
    return _figure("sequence", journey, to_scale=to_scale)


def blocks_view(journey: "Journey", compared: Any = None) -> "Figure":
    """The block tables of both sides; with what `lab.compare(journey)` found."""
    return _figure("blocks", journey, compared=_comparison(compared))


def memory_view(journey: "Journey", layer: int = 0) -> "MemoryMap":
    """The memory of one layer on both sides, and what is written from the one to the other."""
    from pdlab.views.growing import grow
    from pdlab.views.memory_map import MemoryMap

    layers = [write.layer for write in _journey(journey).writes]
    if layers and layer not in layers:
        from pdlab.errors import PdlabError

        raise PdlabError(f"there is no layer {layer!r}", f"choose of {min(layers)} to {max(layers)}")
    made = MemoryMap(journey, layer, last=_last(journey))
    grow(journey, lambda: made.grow_with(_last(journey)))
    return made


def status_view(journey: "Journey") -> "Figure":
    """Status and computed tokens of both halves."""
    return _figure("status", journey)


def source_view(journey: "Journey", step: int | None = None) -> "Source":
    """The source of a step, by its number, and the values that were seen there; None: of the last there is."""
    from pdlab.views.growing import grow
    from pdlab.views.source import Source

    journey = _journey(journey)
    made = Source(journey, None if step is None else journey.steps.index(journey.step(step)))
    grow(journey, made.grow)
    return made


def gate_panel(lab: "Lab") -> "GatePanel":
    """The gates of a lab: who is held, and buttons to hold and to release."""
    from pdlab.views.gates import GatePanel

    _must_be_lab(lab)
    return GatePanel(lab)


def health_view(lab: "Lab") -> "HealthPanel":
    """The health of a lab: which servers are up, what the engines hold, and buttons that bring it back."""
    from pdlab.views.health import HealthPanel

    return HealthPanel(lab)


def timeline_view(trace: "Trace") -> "Timeline":
    """Many journeys over time."""
    from pdlab.checks import of_kind
    from pdlab.trace.trace import Trace
    from pdlab.views.timeline import Timeline

    return Timeline(of_kind(trace, Trace, "give what lab.trace() returned"))


def _figure(name: str, journey: "Journey", **how: Any) -> "Figure":
    from pdlab.views.bench import picture_of
    from pdlab.views.figure import Figure
    from pdlab.views.growing import grow

    journey = _journey(journey)
    made = Figure(picture_of(name, journey, **how), last=_last(journey))
    grow(journey, lambda: made.grow(picture_of(name, journey, **how), _last(journey)))
    return made


def _last(journey: "Journey") -> int:
    return max(len(journey.steps) - 1, 0)


def _journey(given: Any) -> "Journey":
    from pdlab.checks import of_kind
    from pdlab.trace.journey import Journey

    return of_kind(given, Journey, "give a journey: lab.send(…), lab.submit(…) or one of lab.trace()")


def _comparison(given: Any) -> Any:
    from pdlab.errors import PdlabError

    if given is not None and not hasattr(given, "pairs"):
        raise PdlabError(f"this is no comparison but {given!r:.60}", "give what lab.compare(journey) returned")
    return given


def _must_be_lab(given: Any) -> None:
    """A live lab or a recorded one."""
    from pdlab.errors import PdlabError

    if not (hasattr(given, "hold") and hasattr(given, "held")) or isinstance(given, type):
        raise PdlabError(f"this is no lab but {given!r:.60}", "give what pdlab.up() returned")


class _Views(ModuleType):
    """This package. `bench`, `predict` and `stepper` stay the functions above when the modules of these names load."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and name in __all__):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Views
