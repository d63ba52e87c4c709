"""Wrapping the probe points of vLLM, and what a probe may do: look, and note what it saw.

A probe is a generator function over a call: what stands before its `yield` runs before the call, the value of `yield`
is the result, what stands after it runs after the call. It gets the call's own arguments. It never raises into vLLM,
never alters a result and never waits; one that fails is counted, logged and otherwise without effect.
"""

import functools
import importlib
import inspect
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdlab.trace.event import Event
from pdlab.trace.writer import Writer

log = logging.getLogger("vllm.pdlab")
Seen = Generator[None, Any, None]
FOLLOWED_LIMIT = 10_000


@dataclass(frozen=True)
class Probe:
    """Attributes:
    symbol: of vLLM, as module:qualified.name.
    event: the name of what it notes.
    look: the generator function; gets a `Tracer`, then the call's arguments.
    captures: in words, for the reader.
    """

    symbol: str
    event: str
    look: Callable[..., Seen]
    captures: str


class Tracer:
    """What a process's probes share.

    Attributes:
        side: "P" or "D".
        transfer_of: the transfer_id of each request that is followed, by the engine's internal request id.
        followed: what the scheduler's probes remember of a request, by the same.
        errors: how often each probe failed.
    """

    def __init__(self, side: str, folder: Path) -> None:
        self.side, self.folder = side, folder
        self.transfer_of: dict[str, str] = {}
        self.followed: dict[str, Any] = {}
        self.errors: Counter[str] = Counter()
        self._begin_to_write()

    def _begin_to_write(self) -> None:
        self.pid, self.writer = os.getpid(), Writer(self.folder, f"engine-{self.side}", {"side": self.side})

    def note(
        self, part: str, event: str, transfers: str | Iterable[str] = (), request_id: str | None = None, **facts: Any
    ) -> None:
        """Write an event down, now.

        Args:
            part: "scheduler" or "worker".
            transfers: the transfer_id or ids that it is about.
            facts: copies, not vLLM's own lists: they are turned into text later, on another thread.
        """
        if self.pid != os.getpid():  # a worker forked from EngineCore has its probes, but not its writer's thread
            self._begin_to_write()
        ids = (transfers,) if isinstance(transfers, str) else tuple(transfers)
        thread = threading.current_thread().name
        self.writer.note(Event(time.monotonic(), event, f"{self.side} {part}", thread, ids, request_id, facts))

    def follow(self, request_id: str, transfer_id: str) -> None:
        """Remember whose request it is; in place of the oldest where those were too many."""
        self.transfer_of[request_id] = transfer_id
        if len(self.transfer_of) > FOLLOWED_LIMIT:  # a worker is not told when a request has ended
            self.forget(next(iter(self.transfer_of)))

    def forget(self, request_id: str) -> None:
        self.transfer_of.pop(request_id, None)
        self.followed.pop(request_id, None)

    def failed(self, probe: str, error: BaseException) -> None:
        """Count a probe's failure; log the first, and each tenth, hundredth … one."""
        self.errors[probe] += 1
        count = self.errors[probe]
        if count == 10 ** (len(str(count)) - 1):
            log.warning("pdlab's probe %s failed (%d so far): %r", probe, count, error)
            self.note("worker", "probe.failed", probe=probe, error=repr(error)[:300], count=count)

    def install(self, probes: Iterable[Probe]) -> None:
        """Wrap the symbols of `probes`; one that this vLLM does not have counts as failed."""
        for probe in probes:
            try:
                wrap(probe.symbol, functools.partial(watched, self, probe))
            except Exception as error:
                self.failed(probe.event, error)


def wrap(symbol: str, wrapper: Callable[[Any], Any]) -> None:
    """Replace the function or method `symbol` (module:qualified.name) by what `wrapper` makes of it."""
    module, _, names = symbol.partition(":")
    *owners, name = names.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    there = getattr(owner, name)
    wrapped = wrapper(there)
    setattr(owner, name, wrapped)
    _places[owner, name] = (_places.get((owner, name), (there,))[0], wrapped)


# (owner, name) → what vLLM has there, and what was made of it.
_places: dict[tuple[Any, str], tuple[Any, Any]] = {}
_off = threading.Event()


def switch(on: bool) -> bool:
    """Put everything back as vLLM has it in this process, or wrap it again: to measure what it costs.

    Returns:
        Whether anything was ever wrapped here.
    """
    for (owner, name), (bare, wrapped) in _places.items():
        setattr(owner, name, wrapped if on else bare)
    _off.clear() if on else _off.set()
    return bool(_places)


def is_off() -> bool:
    """Whether this process is as vLLM has it, for now."""
    return _off.is_set()


def watched(tracer: Tracer, probe: Probe, original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, with `probe` looking on."""

    def begin(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Seen | None:
        try:
            seen = probe.look(tracer, *args, **kwargs)
            next(seen)
            return seen
        except StopIteration:
            return None
        except Exception as error:
            tracer.failed(probe.event, error)
            return None

    def end(seen: Seen | None, result: Any) -> None:
        if seen is None:
            return
        try:
            seen.send(result)
        except StopIteration:
            return
        except Exception as error:
            tracer.failed(probe.event, error)

    if inspect.iscoroutinefunction(original):

        @functools.wraps(original)
        async def around_async(*args: Any, **kwargs: Any) -> Any:
            seen = begin(args, kwargs)
            result = await original(*args, **kwargs)
            end(seen, result)
            return result

        return around_async

    @functools.wraps(original)
    def around(*args: Any, **kwargs: Any) -> Any:
        seen = begin(args, kwargs)
        result = original(*args, **kwargs)
        end(seen, result)
        return result

    return around


def extra_probes() -> tuple[Probe, ...]:
    """A table of the reader's own, from $PDLAB_PROBES (module:name); none where that is unset."""
    module, _, name = os.environ.get("PDLAB_PROBES", "").partition(":")
    return tuple(getattr(importlib.import_module(module), name)) if module else ()
