"""Reading what the writers write, while they write it."""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pdlab.errors import PdlabError
from pdlab.trace.event import SCHEMA, Event, read_line
from pdlab.trace.writer import boot

KEPT = 4_000  # transfers whose events are remembered
TAIL = 1 << 20  # bytes at the end of a file; no line is longer


class Reader:
    """The events of a folder, by transfer. Each `poll` reads on where the last one ended.

    Args:
        from_now: leave out what is there already; recent: leave it out but for the last MiB of each file.
    """

    def __init__(self, folder: Path, from_now: bool = False, recent: bool = False) -> None:
        self.folder = folder
        self.of_transfer: dict[str, list[Event]] = {}
        self.transfer_of: dict[str, str] = {}  # by the proxy's request_id
        self.loose: list[Event] = []  # of no transfer: start-up, errors of probes
        self._files: dict[int, _File] = {}
        self._ahead = {boot(): 0.0}
        self._closed, self._lock = False, threading.Lock()
        if from_now or recent:
            self._look()
            for file in self._files.values():
                file.skip_to_tail() if recent else file.skip()

    def poll(self) -> None:
        """Take in what was written since.

        Raises:
            PdlabError: a file of another schema.
        """
        with self._lock:
            if self._closed:
                return
            self._look()
            for inode, file in list(self._files.items()):
                last = file.gone
                for event in file.read():
                    self._keep(event)
                if last:
                    self._files.pop(inode).close()
            self._forget(list(self.of_transfer)[:-KEPT])

    def close(self) -> None:
        """Read no more; what was read stays."""
        with self._lock:
            self._closed = True
            for file in self._files.values():
                file.close()
            self._files.clear()

    def __del__(self) -> None:
        self.close()

    def _keep(self, event: Event) -> None:
        for transfer in event.transfers:
            self.of_transfer.setdefault(transfer, []).append(event)
            if event.actor == "proxy" and event.request_id:
                self.transfer_of[event.request_id] = transfer
        if not event.transfers:
            self.loose.append(event)

    def _forget(self, transfers: list[str]) -> None:
        for transfer in transfers:
            del self.of_transfer[transfer]
        if transfers:
            self.transfer_of = {key: value for key, value in self.transfer_of.items() if value in self.of_transfer}

    def _look(self) -> None:
        """Open the files that are new. A file keeps its inode when it is put aside."""
        for path in sorted(self.folder.glob("*.jsonl")):
            with suppress(FileNotFoundError, _Unfinished):
                if path.stat().st_ino not in self._files:
                    file = _File(path, self._ahead)  # it may have been put aside just now: another one than was asked
                    self._files.setdefault(file.inode, file)


class _Unfinished(Exception):
    """A file whose header is not whole yet."""


class _File:
    """One file, from its header on.

    Args:
        ahead: for each boot whose clock was seen, how far this host's is ahead; that of this file's is added.
    """

    def __init__(self, path: Path, ahead: dict[str, float]) -> None:
        self.path = path
        self._open = path.open("rb")  # kept open: its inode must not become another file's
        self.inode = os.fstat(self._open.fileno()).st_ino
        try:
            self.ahead = self._header(self._open.readline(), ahead)
        except BaseException:
            self._open.close()
            raise
        self.offset = self._open.tell()

    @property
    def gone(self) -> bool:
        """Whether it was put aside and then made room for the next one: nothing more will be in it."""
        return os.fstat(self._open.fileno()).st_nlink == 0

    def close(self) -> None:
        self._open.close()

    def skip(self) -> None:
        """Go to the end; where that is within a line, to the line's beginning."""
        self.offset = self._open.seek(max(self.offset, self._open.seek(0, os.SEEK_END) - TAIL))
        self.offset += self._open.read().rfind(b"\n") + 1

    def skip_to_tail(self) -> None:
        """Go to the first line that begins in the last TAIL bytes."""
        if (tail := self._open.seek(0, os.SEEK_END) - TAIL) > self.offset:
            self._open.seek(tail)
            self._open.readline()
            self.offset = self._open.tell()

    def read(self) -> Iterator[Event]:
        self._open.seek(self.offset)
        *lines, rest = self._open.read().split(b"\n")  # the last one may be half written
        self.offset = self._open.tell() - len(rest)
        for line in lines:
            if line.startswith(b"["):
                with suppress(ValueError):  # its process died within it, or had no space left
                    yield read_line(line.decode()).later(self.ahead)

    def _header(self, line: bytes, ahead: dict[str, float]) -> float:
        if not line.endswith(b"\n"):
            raise _Unfinished
        try:
            about: dict[str, Any] = json.loads(line)
            if (schema := about["schema"]) != SCHEMA:
                raise PdlabError(
                    f"{self.path} has trace schema {schema}; this pdlab reads {SCHEMA}",
                    "read it with the pdlab that wrote it",
                )
            wall = about["wall"] - about["monotonic"]
            # Another host's clock: aligned by wall clocks, once, or its processes would be out of step.
            return ahead.setdefault(about["boot"], wall - (time.time() - time.monotonic()))
        except (ValueError, KeyError, TypeError):
            raise PdlabError(f"{self.path} is no trace", "it begins with no header line") from None
