"""Probes that raise, for a lab that must not notice."""

from typing import Any

from pdlab.inside.probes import MCW, SCHEDULER
from pdlab.inside.tracer import Probe, Seen


def before(*_: Any, **__: Any) -> Seen:
    raise RuntimeError("before the call")
    yield


def after(*_: Any, **__: Any) -> Seen:
    yield
    raise RuntimeError("after the call")


PROBES = (
    Probe(f"{SCHEDULER}.schedule", "test.before", before, "nothing"),
    Probe(f"{MCW}.start_load_kv", "test.after", after, "nothing"),
    Probe(f"{MCW}.not_there", "test.no such symbol", after, "nothing"),
)
