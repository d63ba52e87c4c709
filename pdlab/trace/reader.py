"""Reading what the writers write, while they write it."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pdlab.errors import PdlabError
from pdlab.trace.event import SCHEMA, Event, read_line
from pdlab.trace.writer import boot

KEPT = 4_000  # transfers whose events are remembered


class Reader:
    """The events of a folder, by transfer. Each `poll` reads on where the last one ended."""

    def __init__(self, folder: Path, from_now: bool = False) -> None:
        self.folder = folder
        self.of_transfer: dict[str, list[Event]] = {}
        self.transfer_of: dict[str, str] = {}  # by the proxy's request_id
        self.loose: list[Event] = []  # of no transfer: start-up, errors of probes
        self._files: dict[int, _File] = {}
        self._lock = threading.Lock()
        if from_now:
            for file in self._present():
                file.skip()

    def poll(self) -> None:
        """Take in what was written since.

        Raises:
            PdlabError: a file of another schema.
        """
        with self._lock:
            for file in self._present():
                for event in file.read():
                    self._keep(event)
            for transfer in list(self.of_transfer)[:-KEPT]:
                del self.of_transfer[transfer]

    def close(self) -> None:
        """Read no more; what was read stays."""
        with self._lock:
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

    def _present(self) -> Iterator["_File"]:
        for path in sorted(self.folder.glob("*.jsonl")):
            try:
                inode = path.stat().st_ino  # which a file keeps when it is put aside
                if inode not in self._files:
                    self._files[inode] = _File(path)
            except (FileNotFoundError, _Unfinished):
                continue
            yield self._files[inode]


class _Unfinished(Exception):
    """A file whose header is not whole yet."""


class _File:
    def __init__(self, path: Path) -> None:
        self.path, self.ahead = path, 0.0
        self._open = path.open("rb")  # kept open: its inode must not become another file's
        self._header(self._open.readline())
        self.offset = self._open.tell()

    def close(self) -> None:
        self._open.close()

    def skip(self) -> None:
        self.offset = self._open.seek(0, 2)

    def read(self) -> Iterator[Event]:
        self._open.seek(self.offset)
        *lines, rest = self._open.read().split(b"\n")  # the last one may be half written
        self.offset = self._open.tell() - len(rest)
        for line in lines:
            if line.startswith(b"["):
                yield read_line(line.decode()).later(self.ahead)

    def _header(self, line: bytes) -> None:
        if not line.endswith(b"\n"):
            raise _Unfinished
        try:
            about: dict[str, Any] = json.loads(line)
            schema = about["schema"]
        except (ValueError, KeyError, TypeError):
            raise PdlabError(f"{self.path} is no trace", "it begins with no header line") from None
        if schema != SCHEMA:
            raise PdlabError(
                f"{self.path} has trace schema {schema}; this pdlab reads {SCHEMA}",
                "read it with the pdlab that wrote it",
            )
        if about["boot"] != boot():  # another host's clock: align by wall clocks
            self.ahead = (about["wall"] - about["monotonic"]) - (time.time() - time.monotonic())
