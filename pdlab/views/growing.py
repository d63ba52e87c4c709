"""Views of a journey that is under way are drawn again as it fills up, until it is complete."""

import threading
import time
from collections.abc import Callable
from weakref import WeakKeyDictionary

from pdlab.trace.journey import Journey

LOOK = 0.3  # seconds between two looks at a journey
REST = 10.0  # seconds after its client's answer in which both engines have done with it, or never will
LONGEST = 3600.0  # seconds that it is looked at: as long as a hold may be

Redraw = Callable[[], None]
_redraws: WeakKeyDictionary[Journey, list[Redraw]] = WeakKeyDictionary()
_lock = threading.Lock()


def grow(journey: Journey, redraw: Redraw) -> None:
    """Have `redraw` called whenever the journey has come further; by one thread for all views of it, in their order."""
    if not journey.fills_up:
        return
    with _lock:
        redraws = _redraws.setdefault(journey, [])
        redraws.append(redraw)
        if len(redraws) == 1:
            threading.Thread(target=_follow, args=(journey, redraws), name="pdlab-growing", daemon=True).start()


def _follow(journey: Journey, redraws: list[Redraw]) -> None:
    seen, end = 0, time.monotonic() + LONGEST
    fills_up = True
    while fills_up and time.monotonic() < end:
        time.sleep(LOOK)
        fills_up = journey.fills_up  # before its events: of one that is complete none is missed
        if len(journey.events) > seen:
            seen = len(journey.events)
            for redraw in list(redraws):
                redraw()
        if journey.done:
            end = min(end, time.monotonic() + REST)
    with _lock:
        _redraws.pop(journey, None)
