"""What the calls of a lab return, as JSON and back: one table of kinds.

Plain JSON values stand for themselves; anything else is {"$": its kind, …}. What several results share is kept once,
in a pool.
"""

import base64
import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdlab import errors
from pdlab.errors import PdlabError, RequestError
from pdlab.faults.outcome import Outcome
from pdlab.lab.command import Command
from pdlab.lab.comparison import Comparison, Pair, Rewritten
from pdlab.lab.healed import Healed
from pdlab.lab.hold import Hold
from pdlab.lab.kv import KVBlock
from pdlab.lab.processes import Processes, Row
from pdlab.lab.settings import Settings
from pdlab.lab.usage import Usage
from pdlab.paths import cache_dir, repo_root, state_dir
from pdlab.recorded.noted import note, noted
from pdlab.trace.answer import Answer
from pdlab.trace.event import Event, read_line
from pdlab.trace.journey import Journey
from pdlab.trace.trace import Trace

Stored = dict[str, Any]


@dataclass(frozen=True)
class Made:
    """In place of an object whose own calls are on the tape: a "lab"."""

    what: str


@dataclass(frozen=True)
class Held:
    """A `Hold`, as far as the events of its journeys do not tell of it."""

    point: str
    match: str
    seconds: float
    name: str


class Encoder:
    """Attributes:
    pool: what was kept once, of all that was encoded.
    """

    def __init__(self) -> None:
        self.pool: list[Any] = []
        self._places: dict[str, int] = {}

    def encode(self, value: Any) -> Any:
        """`value`, as JSON can hold it.

        Raises:
            PdlabError: it is of no kind in the table.
        """
        if isinstance(value, str):
            return without_places(value)
        if value is None or isinstance(value, bool | int | float):
            return value
        if type(value) is list:
            return [self.encode(each) for each in value]
        if type(value) is dict and "$" not in value and all(isinstance(key, str) for key in value):
            return {key: self.encode(each) for key, each in value.items()}
        for kind in KINDS:
            if isinstance(value, kind.type):
                return {"$": kind.name, **kind.encode(self, value)}
        raise PdlabError(f"a {type(value).__name__} cannot be recorded", "pdlab/recorded/codec.py lists what can be")

    def keep(self, text: str) -> int:
        """The place of this JSON text's value in the pool."""
        if text not in self._places:
            self._places[text] = len(self.pool)
            self.pool.append(json.loads(text))
        return self._places[text]


class Decoder:
    """Args:
    pool: of the encoder.
    about: of the tape; what is decoded says so.
    """

    def __init__(self, pool: list[Any], about: dict[str, Any]) -> None:
        self.pool, self.about = pool, about

    def decode(self, stored: Any) -> Any:
        """What was encoded.

        Raises:
            PdlabError: something this version does not know.
        """
        if isinstance(stored, list):
            return [self.decode(each) for each in stored]
        if not isinstance(stored, dict):
            return stored
        if "$" not in stored:
            return {key: self.decode(each) for key, each in stored.items()}
        kind = next((kind for kind in KINDS if kind.name == stored["$"]), None)
        if kind is None:
            raise PdlabError(f"this pdlab knows no recorded {stored['$']}", "play it with the pdlab that recorded it")
        return kind.decode(self, stored)

    def noted(self, kind: type) -> Any:
        """That class, with objects that say they are recorded."""
        return noted(kind, note(self.about))


def without_places(text: str) -> str:
    """The text without where on this machine things are: of interest to nobody else."""
    for place, short in _places():
        text = text.replace(place, short)
    return text


@functools.cache
def _places() -> list[tuple[str, str]]:
    """Each with what stands for it, those within others first."""
    return [
        (sys.executable, "python"),
        (str(state_dir()), "~/.local/state/pdlab"),
        (str(cache_dir()), "~/.cache/pdlab"),
        (str(repo_root()), "."),
        (str(Path.home()), "~"),
    ]


@dataclass(frozen=True)
class Kind:
    """How objects of one type are kept."""

    name: str
    type: type
    encode: Callable[[Encoder, Any], Stored]
    decode: Callable[[Decoder, Stored], Any]


def of_fields(kind: type, shown: bool = False, without: str = "") -> Kind:
    """A dataclass, field by field, but for one; `shown`: a reader looks at its repr."""
    names = [each.name for each in dataclasses.fields(kind) if each.name != without]

    def encode(encoder: Encoder, value: Any) -> Stored:
        return {name: encoder.encode(getattr(value, name)) for name in names}

    def decode(decoder: Decoder, stored: Stored) -> Any:
        values = {name: decoder.decode(stored[name]) for name in names if name in stored}  # a new field: its default
        return (decoder.noted(kind) if shown else kind)(**values)

    return Kind(kind.__name__, kind, encode, decode)


def _journey(encoder: Encoder, journey: Journey) -> Stored:
    events = [encoder.keep(without_places(event.as_line())) for event in journey.events]
    error = journey.error
    return {
        "request_id": journey.request_id,
        "transfer_id": journey.transfer_id,
        "events": events,
        "answer": encoder.encode(journey.answer if journey.has_text else None),
        "error": encoder.encode(error) if not _is_of(error, journey) else _error(encoder, error, whole=False),
        "error_knows": _is_of(error, journey),
    }


def _is_of(error: Exception | None, journey: Journey) -> bool:
    return isinstance(error, RequestError) and error.journey is journey


def _journey_back(decoder: Decoder, stored: Stored) -> Journey:
    events = [_event(decoder, place) for place in stored["events"]]
    answer, error = decoder.decode(stored["answer"]), decoder.decode(stored["error"])
    journey = Journey(
        stored["request_id"], events, transfer_id=stored["transfer_id"], answer=answer, error=error,
        about=decoder.about,
    )  # fmt: skip
    if stored["error_knows"]:
        error.journey = journey
    return journey


def _event(decoder: Decoder, place: int) -> Event:
    return read_line(json.dumps(decoder.pool[place]))


def _error(encoder: Encoder, error: Any, whole: bool = True) -> Stored:
    known = type(error).__name__ if hasattr(errors, type(error).__name__) else "PdlabError"
    stored = {"$": "error", "type": known, "message": encoder.encode(error.message), "hint": encoder.encode(error.hint)}
    if isinstance(error, RequestError):
        stored |= {
            "status": error.status,
            "hop": error.hop,
            "journey": encoder.encode(error.journey if whole else None),
        }
    return stored


def _error_back(decoder: Decoder, stored: Stored) -> PdlabError:
    kind = getattr(errors, stored["type"])
    if not issubclass(kind, RequestError):
        return kind(stored["message"], stored["hint"])
    journey = decoder.decode(stored["journey"])
    if journey and journey.error and journey.error.journey is journey:
        return journey.error
    error = kind(stored["status"], stored["message"], stored["hint"], stored.get("hop", ""))
    error.journey = journey
    return error


def _trace(encoder: Encoder, trace: Trace) -> Stored:
    startup = [encoder.keep(without_places(event.as_line())) for event in trace.startup]
    journeys = [encoder.encode(journey) for journey in trace]
    return {"journeys": journeys, "startup": startup, "probe_errors": trace.probe_errors}


def _trace_back(decoder: Decoder, stored: Stored) -> Trace:
    startup = [_event(decoder, place) for place in stored["startup"]]
    trace = decoder.noted(Trace)([decoder.decode(journey) for journey in stored["journeys"]], startup)
    trace.probe_errors = stored["probe_errors"]
    return trace


def _comparison(encoder: Encoder, comparison: Comparison) -> Stored:
    """Without the bytes that it keeps for `rewritten`, whose result is a call of its own."""
    pairs = [[*vars(pair).values()] for pair in comparison.pairs]
    return {"pairs": pairs, "block_len": comparison.block_len, "held": comparison.held}


def _comparison_back(decoder: Decoder, stored: Stored) -> Comparison:
    pairs = tuple(Pair(*pair) for pair in stored["pairs"])
    return Comparison(pairs, stored["block_len"], stored["held"], None, ())  # type: ignore[arg-type]


KINDS = (
    Kind(
        "tuple",
        tuple,
        lambda to, value: {"of": to.encode(list(value))},
        lambda by, stored: tuple(by.decode(stored["of"])),
    ),
    Kind(
        "dict",
        dict,
        lambda to, value: {"of": to.encode([list(row) for row in value.items()])},
        lambda by, stored: dict(by.decode(stored["of"])),
    ),
    Kind(
        "bytes",
        bytes,
        lambda to, value: {"at": to.keep(json.dumps(base64.b64encode(value).decode()))},
        lambda by, stored: base64.b64decode(by.pool[stored["at"]]),
    ),
    Kind(
        "Processes",
        Processes,
        lambda to, value: {"rows": to.encode(list(value))},
        lambda by, stored: by.noted(Processes)(by.decode(stored["rows"])),
    ),
    Kind("error", PdlabError, _error, _error_back),
    Kind("Journey", Journey, _journey, _journey_back),
    Kind("Trace", Trace, _trace, _trace_back),
    Kind("Comparison", Comparison, _comparison, _comparison_back),
    Kind("Hold", Hold, of_fields(Held).encode, of_fields(Held).decode),
    of_fields(Made),
    of_fields(Usage, shown=True),
    of_fields(Healed, shown=True),
    of_fields(Outcome, shown=True),
    of_fields(Answer, shown=True),
    of_fields(KVBlock, shown=True),
    of_fields(Rewritten),
    of_fields(Row),
    of_fields(Settings),
    of_fields(Command, without="instrument_env"),  # it may have the token
)
