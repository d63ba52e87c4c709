"""Writing events down: JSON lines, one file a process, from any thread, in nobody's way.

A caller only puts a small object on a queue; a thread of its own turns it into text and writes it, so that a `kill -9`
loses a few hundredths of a second. Queue and files are bounded: what does not fit is counted, not waited for.
"""

import atexit
import json
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TextIO

from pdlab.trace.event import SCHEMA, Event

QUEUE_LIMIT = 20_000  # events
FILE_LIMIT = 64 << 20  # bytes; then the file is put aside, and the one put aside before it goes
PAUSE = 0.02  # seconds between two looks at the queue
BATCH = 1_000  # events; then what was written is flushed, and the file's length looked at


class Writer:
    """Attributes:
    folder: where `NAME.PID.jsonl` is written.
    dropped: events that found the queue full, or could not be written; noted as failures of a probe "writer".
    """

    def __init__(self, folder: Path, name: str, about: Mapping[str, Any]) -> None:
        self.folder, self.dropped, self._told = folder, 0, 0
        self._path = folder / f"{name}.{os.getpid()}.jsonl"
        self._about = {**about, "process": name, "pid": os.getpid()}
        self._queue: SimpleQueue[Event | None] = SimpleQueue()
        folder.mkdir(parents=True, exist_ok=True)
        self._file = self._open()
        self._thread = threading.Thread(target=self._run, name="pdlab-trace", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def note(self, event: Event) -> None:
        """Have an event written; returns at once."""
        if self._queue.qsize() >= QUEUE_LIMIT:
            self.dropped += 1
            return
        self._queue.put(event)

    def close(self) -> None:
        """Write what is left."""
        self._queue.put(None)
        self._thread.join(timeout=2)

    def _open(self) -> TextIO:
        file = self._path.open("a", encoding="utf-8")
        file.write(json.dumps(header(self._about)) + "\n")
        file.flush()
        return file

    def _run(self) -> None:
        more = True
        while more:
            events, more = self._next()
            with suppress(OSError, ValueError):  # no space left, or the folder is gone: the engine must not care
                if self._file.closed:  # it was put aside, and there was no space for the next one
                    self._file = self._open()
            for event in [*events, *self._loss()]:
                self._write(event)
            with suppress(OSError, ValueError):
                self._file.flush()
                if more and self._file.tell() > FILE_LIMIT:
                    self._turn_over()
            if more and len(events) < BATCH:
                time.sleep(PAUSE)
        with suppress(OSError):
            self._file.close()

    def _next(self) -> tuple[list[Event], bool]:
        """What is on the queue, once there is something; and whether more may come."""
        events: list[Event] = []
        event = self._queue.get()
        with suppress(Empty):
            while event is not None:
                events.append(event)
                if len(events) == BATCH:
                    break
                event = self._queue.get_nowait()
        return events, event is not None

    def _write(self, event: Event) -> None:
        try:
            self._file.write(event.as_line() + "\n")
        except Exception:  # no JSON, or changed by vLLM under our hands, or no space left: the next one may do
            self.dropped += 1

    def _loss(self) -> list[Event]:
        """What says that events are missing, if some are of which nothing is said yet."""
        if self.dropped == self._told:
            return []
        self._told = self.dropped
        facts = {"probe": "writer", "error": "events were dropped", "count": self.dropped}
        return [Event(time.monotonic(), "probe.failed", str(self._about["process"]), "pdlab-trace", (), None, facts)]

    def _turn_over(self) -> None:
        self._file.close()
        self._path.rename(self._path.with_suffix(".old.jsonl"))
        self._file = self._open()


def header(about: Mapping[str, Any]) -> dict[str, Any]:
    """The first line of a file: whose it is, and both clocks at one moment, to align it with those of other hosts."""
    return {"schema": SCHEMA, **about, "boot": boot(), "monotonic": time.monotonic(), "wall": time.time()}


def boot() -> str:
    """What tells one run of one machine's monotonic clock from another; "" where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
