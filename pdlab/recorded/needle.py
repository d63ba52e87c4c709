"""Which of the recorded calls answers a call that is made now."""

import threading
from collections import Counter, defaultdict
from typing import NamedTuple

from pdlab.errors import PdlabError
from pdlab.recorded.calls import Arguments, canonical, said
from pdlab.recorded.cell import running_cell
from pdlab.recorded.tape import Call

LIVE = "live engines answer anything: unset PDLAB_RUN, python3 -m pdlab lab"


class Key(NamedTuple):
    """Calls of one key are the same call: of one object, by one name, with equal arguments."""

    of: int | None
    path: str
    arguments: str


class Needle:
    """Equal calls get their recorded results in order, and the last one again when these have run out.

    An object that is given anew (a lab, a comparison) begins anew. A cell of a notebook that is run again begins where
    it began the first time.

    Args:
        calls: of the tape.
        where: what an error calls the run.
    """

    def __init__(self, calls: list[Call], where: str) -> None:
        self.calls, self.where = calls, where
        self._places: dict[Key, list[int]] = defaultdict(list)
        for spare in (False, True):
            for place, call in enumerate(calls):
                key = Key(call.of, call.path, canonical(call.arguments))
                if call.spare == spare and not (spare and key in self._places):
                    self._places[key].append(place)
        self._turns: Counter[Key] = Counter()
        self._begun: dict[str, Counter[Key]] = {}  # the turns at which each cell began, by its id
        self._run = ""  # of a cell, in which the last call was made
        self._lock = threading.Lock()

    def find(self, of: int | None, path: str, arguments: Arguments) -> int:
        """Index of the call that answers.

        Raises:
            PdlabError: nobody made this call when the run was recorded.
        """
        key = Key(of, path, canonical(arguments))
        with self._lock:
            if key not in self._places:
                raise self._absent(of, path, arguments)
            self._wind_back()
            places, turn = self._places[key], self._turns[key]
            self._turns[key] += 1
            place = places[min(turn, len(places) - 1)]
            for other in [other for other in self._turns if other.of == place]:
                del self._turns[other]
        return place

    def constant(self, of: int | None, path: str) -> int:
        """Index of the first call of that path without arguments: of what does not change while a lab runs."""
        return self._places[Key(of, path, canonical({}))][0]

    def _wind_back(self) -> None:
        if (cell := running_cell()) is None:
            return
        name, run = cell
        if run != self._run:
            self._run = run
            self._turns = Counter(self._begun.setdefault(name, Counter(self._turns)))

    def _absent(self, of: int | None, path: str, arguments: Arguments) -> PdlabError:
        calls = (said(call.path, call.arguments) for call in self.calls if (call.of, call.path) == (of, path))
        similar = list(dict.fromkeys(calls))[:3]
        what = f"this call is not in the recorded run {self.where}: {said(path, arguments)}"
        return PdlabError(what, f"recorded: {'; '.join(similar)}. {LIVE[0].upper()}{LIVE[1:]}" if similar else LIVE)
