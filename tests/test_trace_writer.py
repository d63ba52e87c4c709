"""Writing events down: from many threads, in nobody's way, and to the last one when the process is killed."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdlab.trace import writer as writers
from pdlab.trace.event import Event, read_line
from pdlab.trace.trace import read
from pdlab.trace.writer import Writer
from tests.helpers import wait_until
from tests.traces import events_of

RECORDED = events_of("engine-P")
# A process that notes 4 × 500 events from four threads, says so, and does what is asked of it.
NOTER = """
import pathlib, sys, threading, time
from pdlab.trace.event import Event
from pdlab.trace.writer import Writer
writer = Writer(pathlib.Path(sys.argv[1]), "engine-P", {"side": "P"})
def note(thread):
    for number in range(500):
        writer.note(Event(time.monotonic(), "x", "P worker", thread, ("xfer-1",), None, {"number": number}))
threads = [threading.Thread(target=note, args=(str(n),)) for n in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("noted", flush=True)
"""
Make = Callable[..., Writer]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """`make()` is a writer into the test's own folder."""
    made: list[Writer] = []

    def new(name: str = "engine-P", **about: Any) -> Writer:
        made.append(Writer(tmp_path, name, {"side": "P", **about}))
        return made[-1]

    yield new
    for writer in made:
        writer.close()


def numbered(number: int, thread: str = "MainThread") -> Event:
    return Event(1.0, "x", "P worker", thread, ("xfer-1",), None, {"number": number})


def lines(path: Path) -> list[str]:
    """Its whole lines; none while it is being put aside."""
    try:
        return path.read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []


def headers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines(path) if line.startswith("{")]


def events(*paths: Path) -> list[Event]:
    return [read_line(line) for path in paths for line in lines(path) if line.startswith("[")]


def numbers(*paths: Path) -> list[int]:
    return [event.facts["number"] for event in events(*paths) if event.name == "x"]


class Held:
    """A file that lets nobody write until it is let go, like a disk that hangs."""

    def __init__(self, writer: Writer) -> None:
        self.reached, self.free = threading.Event(), threading.Event()
        self._file, writer._file = writer._file, self  # type: ignore[assignment]

    def write(self, text: str) -> int:
        self.reached.set()
        self.free.wait()
        return self._file.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class TestHeader:
    def test_says_whose_it_is_and_both_clocks(self, make: Make, tmp_path: Path) -> None:
        before = (time.monotonic(), time.time())
        make(engine="e1")
        [path] = tmp_path.iterdir()
        assert path.name == f"engine-P.{os.getpid()}.jsonl"
        [head] = headers(path)
        assert head.pop("boot") == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        assert before[0] <= head.pop("monotonic") <= time.monotonic()
        assert before[1] <= head.pop("wall") <= time.time()
        assert head == {"schema": 1, "side": "P", "engine": "e1", "process": "engine-P", "pid": os.getpid()}

    def test_is_there_at_once(self, make: Make, tmp_path: Path) -> None:
        held = Held(make())
        assert len(headers(next(tmp_path.iterdir()))) == 1
        held.free.set()

    def test_makes_the_folder(self, tmp_path: Path) -> None:
        Writer(tmp_path / "a" / "b", "proxy", {}).close()
        assert len(list((tmp_path / "a" / "b").iterdir())) == 1


class TestNotes:
    def test_are_what_was_noted(self, make: Make, tmp_path: Path) -> None:
        writer = make()
        for event in RECORDED:
            writer.note(event)
        writer.close()
        assert events(*tmp_path.iterdir()) == RECORDED

    def test_come_by_themselves(self, make: Make, tmp_path: Path) -> None:
        writer = make()
        [path] = tmp_path.iterdir()
        for number in range(3):
            writer.note(numbered(number))
            wait_until(lambda: numbers(path) == list(range(number + 1)))  # noqa: B023

    def test_of_many_threads_keep_the_order_of_each(self, make: Make, tmp_path: Path) -> None:
        writer, start = make(), threading.Barrier(8)

        def note(name: str) -> None:
            start.wait()
            for number in range(500):
                writer.note(numbered(number, name))

        threads = [threading.Thread(target=note, args=(str(number),)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        writer.close()
        found = events(*tmp_path.iterdir())
        assert len(found) == 8 * 500
        for name in map(str, range(8)):
            assert [e.facts["number"] for e in found if e.thread == name] == list(range(500))
        assert writer.dropped == 0

    def test_that_are_no_json_are_counted_and_harm_no_other(self, make: Make, tmp_path: Path) -> None:
        writer, in_itself = make(), list[Any]()
        in_itself.append(in_itself)
        many: list[dict[Any, Any]] = [{"number": 0}, {(1, 2): 3}, {"number": 1}, {"ids": in_itself}, {"number": 2}]
        for facts in many:
            writer.note(Event(1.0, "x", "P worker", "MainThread", facts=facts))
        writer.close()
        assert numbers(*tmp_path.iterdir()) == [0, 1, 2]
        assert writer.dropped == 2

    def test_of_what_json_does_not_know_are_text(self, make: Make, tmp_path: Path) -> None:
        writer = make()
        writer.note(Event(1.0, "x", "P worker", "MainThread", facts={"path": Path("/x"), "ids": (1, 2)}))
        writer.close()
        assert [event.facts for event in events(*tmp_path.iterdir())] == [{"path": "/x", "ids": [1, 2]}]


class TestBounds:
    def test_a_full_queue_drops_and_counts_and_never_blocks(
        self, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(writers, "QUEUE_LIMIT", 50)
        writer = make()
        held = Held(writer)
        writer.note(numbered(0))
        assert held.reached.wait(20)
        for number in range(1, 201):
            writer.note(numbered(number))  # would not return, if it waited for the file
        assert writer.dropped == 150
        held.free.set()
        writer.close()
        assert numbers(*tmp_path.iterdir()) == list(range(51))

    def test_a_full_disk_harms_nobody(self, make: Make) -> None:
        writer = make()
        with Path("/dev/full").open("a", encoding="utf-8") as full:
            writer._file = full
            for number in range(3_000):
                writer.note(numbered(number))
            wait_until(lambda: writer._queue.empty() and writer.dropped)
            assert writer._thread.is_alive()
            writer.close()
            assert not writer._thread.is_alive()
            full_is_closed = full.closed
        assert full_is_closed

    def test_a_folder_that_is_gone_harms_nobody_and_is_found_again(
        self, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(writers, "FILE_LIMIT", 0)
        writer, away = make(), tmp_path.with_name("away")
        tmp_path.rename(away)
        writer.note(numbered(0))
        wait_until(lambda: writer._file.closed)
        writer.note(numbered(1))
        wait_until(lambda: writer.dropped == 1)
        assert writer._thread.is_alive()
        monkeypatch.setattr(writers, "FILE_LIMIT", 1 << 20)
        away.rename(tmp_path)
        writer.note(numbered(2))
        writer.close()
        assert numbers(*tmp_path.iterdir()) == [0, 2]

    def test_that_events_are_missing_is_said_once(self, make: Make, tmp_path: Path) -> None:
        writer, in_itself = make(), list[Any]()
        in_itself.append(in_itself)
        for facts in ({"ids": in_itself}, {"number": 1}):
            writer.note(Event(1.0, "x", "P worker", "MainThread", facts=facts))
            wait_until(lambda: writer._queue.empty())
        writer.note(numbered(2))
        writer.close()
        trace = read(tmp_path)
        assert trace.probe_errors == {"writer": 1}
        assert "1 probe errors" in repr(trace)

    def test_a_long_file_is_put_aside(self, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(writers, "FILE_LIMIT", 1_000)
        writer = make()
        path = tmp_path / f"engine-P.{os.getpid()}.jsonl"
        old = tmp_path / f"engine-P.{os.getpid()}.old.jsonl"
        for number in range(50):
            writer.note(numbered(number))
            wait_until(lambda: number in numbers(old, path))  # noqa: B023
        writer.close()
        assert sorted(tmp_path.iterdir()) == sorted([path, old])
        assert [len(headers(file)) for file in (old, path)] == [1, 1]
        kept = numbers(old, path)
        assert kept == list(range(kept[0], 50))
        assert kept[0] > 0
        assert 1_000 < old.stat().st_size < 1_200

    def test_a_flood_makes_no_longer_files(self, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The queue is never empty: it is written in batches all the same."""
        monkeypatch.setattr(writers, "FILE_LIMIT", 2_000)
        monkeypatch.setattr(writers, "BATCH", 10)
        writer = make()
        held = Held(writer)
        for number in range(1_000):
            writer.note(numbered(number))
        held.free.set()
        writer.close()
        assert all(path.stat().st_size < 3_500 for path in tmp_path.iterdir())
        old, path = sorted(tmp_path.iterdir(), key=lambda path: "old" not in path.name)
        kept = numbers(old, path)
        assert kept == list(range(kept[0], 1_000))

    def test_a_batch_ends_where_the_queue_does_or_not(
        self, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(writers, "BATCH", 10)
        for count in (9, 10, 11, 20, 21):
            writer = make(f"engine-{count}")
            held = Held(writer)
            for number in range(count):
                writer.note(numbered(number))
            held.free.set()
            writer.close()
            assert numbers(*tmp_path.glob(f"engine-{count}.*")) == list(range(count))


class TestTheEnd:
    def test_everything_is_written_on_close(self, make: Make, tmp_path: Path) -> None:
        writer = make()
        held = Held(writer)
        for number in range(5_000):
            writer.note(numbered(number))
        held.free.set()
        writer.close()
        assert numbers(*tmp_path.iterdir()) == list(range(5_000))
        writer.close()
        assert not writer._thread.is_alive()

    def test_the_file_is_closed(self, make: Make) -> None:
        writer = make()
        writer.close()
        assert writer._file.closed
        writer.note(numbered(0))  # too late, and no error
        gc.collect()

    def test_a_process_that_ends_has_written_everything(self, tmp_path: Path) -> None:
        subprocess.run([sys.executable, "-c", NOTER, str(tmp_path)], check=True, capture_output=True)
        assert_all(tmp_path)

    def test_a_process_that_is_killed_a_little_later_has_lost_nothing(self, tmp_path: Path) -> None:
        code = NOTER + "time.sleep(600)"
        with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"noted\n"
            began = time.monotonic()
            wait_until(lambda: sum(path.read_text().count("\n") for path in tmp_path.iterdir()) == 1 + 2_000)
            assert time.monotonic() - began < 5
            process.kill()
        assert process.returncode == -signal.SIGKILL
        assert_all(tmp_path)


def assert_all(folder: Path) -> None:
    """All that NOTER noted is there, in order."""
    found = events(*folder.iterdir())
    for thread in map(str, range(4)):
        assert [e.facts["number"] for e in found if e.thread == thread] == list(range(500))
