"""Reading the files of a trace while they are written: recorded lines, as three processes wrote them."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdlab.errors import PdlabError
from pdlab.trace import reader as readers
from pdlab.trace.event import Event, read_line
from pdlab.trace.reader import Reader
from pdlab.trace.trace import read
from pdlab.trace.writer import boot
from tests.traces import EVERY, TRACE, events_of, header_line, lines_of, recorded_trace

LINES = lines_of("proxy")
NO_HEADERS = {
    "a log": b"INFO 11-29 [x.py:1] vLLM\n",
    "an event": LINES[0].encode(),
    "an empty line": b"\n",
    "an empty object": b"{}\n",
    "no clocks": b'{"schema": 1}\n',
    "no numbers": b'{"schema": 1, "boot": "x", "wall": "now", "monotonic": "then"}\n',
    "null": b"null\n",
    "a list": b"[1]\n",
    "no text": b"\xff\xfe\x00\n",
}


class File:
    """A file as a writer makes it: `add` appends lines, or bytes; `put_aside` makes room for a new one."""

    def __init__(self, folder: Path, name: str = "proxy.7", head: str | None = None) -> None:
        self.path, self.head = folder / f"{name}.jsonl", header_line() if head is None else head
        self.add(self.head)

    def add(self, *lines: str | bytes) -> None:
        with self.path.open("ab") as file:
            for line in lines:
                file.write(line if isinstance(line, bytes) else line.encode())

    def put_aside(self) -> None:
        self.path.rename(self.path.with_suffix(".old.jsonl"))
        self.add(self.head)


def seen(reader: Reader) -> list[Event]:
    """All that the reader has, each event once for each of its transfers, by time."""
    reader.poll()
    return sorted((e for events in reader.of_transfer.values() for e in events), key=lambda event: event.time)


def written(*lines: str) -> list[Event]:
    return [read_line(line) for line in lines]


class TestWhileItIsWritten:
    def test_a_line_that_is_half_written_comes_when_it_is_whole(self, tmp_path: Path) -> None:
        file, reader, head = File(tmp_path, head=""), Reader(tmp_path), header_line()
        text = (head + LINES[0] + LINES[1]).encode()
        ends = [len(head + LINES[0]), len(text)]
        for length in range(len(text)):
            file.add(text[length : length + 1])
            assert len(seen(reader)) == sum(length + 1 >= end for end in ends)
        assert seen(reader) == written(LINES[0], LINES[1])

    def test_in_pieces_of_any_length_nothing_is_lost_or_doubled(self, tmp_path: Path) -> None:
        file, reader = File(tmp_path), Reader(tmp_path)
        text = "".join(LINES).encode()
        for start in range(0, len(text), 331):
            reader.poll()
            file.add(text[start : start + 331])
        assert seen(reader) == written(*LINES)

    def test_files_that_come_later(self, tmp_path: Path) -> None:
        reader = Reader(tmp_path / "trace")
        assert seen(reader) == []
        (tmp_path / "trace").mkdir()
        assert seen(reader) == []
        File(tmp_path / "trace").add(LINES[0])
        File(tmp_path / "trace", "engine-P.8").add(LINES[1])
        assert seen(reader) == written(LINES[0], LINES[1])

    def test_a_file_is_opened_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        opened: list[object] = []

        class Counted(readers._File):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                opened.append(self.path)

        monkeypatch.setattr(readers, "_File", Counted)
        file, reader = File(tmp_path), Reader(tmp_path)
        for line in LINES[:5]:
            file.add(line)
            reader.poll()
        assert opened == [file.path]

    def test_other_files_are_none_of_it(self, tmp_path: Path) -> None:
        (tmp_path / "gates").mkdir()
        (tmp_path / "engine-P.log").write_text("INFO\n")
        (tmp_path / "empty.jsonl").touch()
        assert seen(Reader(tmp_path)) == []

    def test_a_line_of_a_process_that_died_within_it_is_left_out(self, tmp_path: Path) -> None:
        # As where another process of the same pid writes on.
        File(tmp_path).add(LINES[0], LINES[1][:-20], header_line(), LINES[2][:40] + "\n", LINES[3])
        assert seen(Reader(tmp_path)) == written(LINES[0], LINES[3])

    def test_an_event_of_several_transfers_belongs_to_each(self) -> None:
        reader = Reader(TRACE)
        reader.poll()
        [event] = [e for e in events_of("engine-D") if e.name == "pull.encoded" and len(e.transfers) == 3]
        for transfer in event.transfers:
            assert [e.facts for e in reader.of_transfer[transfer] if e.name == event.name] == [event.facts]

    def test_the_request_id_leads_to_the_transfer(self) -> None:
        reader = Reader(TRACE)
        reader.poll()
        assert reader.transfer_of == {e.request_id: e.transfers[0] for e in events_of("proxy")}
        assert len(reader.transfer_of) == len(EVERY)

    def test_events_of_no_transfer_are_kept_apart(self) -> None:
        reader = Reader(TRACE)
        reader.poll()
        assert {event.name for event in reader.loose} == {"kv.registered", "bootstrap.registered", "bootstrap.queried"}


class TestPutAside:
    def test_during_reading_no_event_is_lost_or_doubled(self, tmp_path: Path) -> None:
        file, reader = File(tmp_path), Reader(tmp_path)
        file.add(*LINES[:10])
        assert len(seen(reader)) == 10
        file.add(*LINES[10:15])
        file.put_aside()
        file.add(*LINES[15:20])
        assert seen(reader) == written(*LINES[:20])
        file.add(*LINES[20:22])
        file.put_aside()
        assert seen(reader) == written(*LINES[:22])

    def test_twice_between_two_looks_what_it_had_open_is_read_to_its_end(self, tmp_path: Path) -> None:
        file, reader = File(tmp_path), Reader(tmp_path)
        reader.poll()
        file.add(*LINES[:3])
        for start in (3, 6):
            file.put_aside()
            file.add(*LINES[start : start + 3])
        assert len(list(tmp_path.iterdir())) == 2
        assert seen(reader) == written(*LINES[:9])

    def test_twice_it_is_not_kept_open(self, tmp_path: Path) -> None:
        file, reader = File(tmp_path), Reader(tmp_path)
        for line in LINES:
            file.add(line)
            file.put_aside()
            reader.poll()
        assert seen(reader) == written(*LINES)
        assert len(open_files(tmp_path)) == 2

    def test_just_when_it_is_opened(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Between the look at a name and its opening, the name came to be another file's."""
        file = File(tmp_path)
        file.add(*LINES[:3])

        def change() -> None:
            file.put_aside()
            file.add(*LINES[3:5])

        monkeypatch.setattr(readers, "_File", opening(change))
        reader = Reader(tmp_path)
        reader.poll()
        assert seen(reader) == written(*LINES[:5])

    def test_just_when_it_is_looked_for(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its name is gone, and the new one was not there yet when the folder was listed."""
        file, reader = File(tmp_path), Reader(tmp_path)
        file.add(*LINES[:3])
        reader.poll()
        stat = Path.stat

        def late(path: Path, **options: bool) -> os.stat_result:
            if path == file.path:
                monkeypatch.undo()
                path.rename(path.with_suffix(".old.jsonl"))
            return stat(path, **options)

        monkeypatch.setattr(Path, "stat", late)
        reader.poll()
        assert not file.path.exists()
        file.add(file.head, LINES[3])
        assert seen(reader) == written(*LINES[:4])


class TestFromNow:
    def test_what_was_there_is_left_out(self, tmp_path: Path) -> None:
        file = File(tmp_path)
        file.add(*LINES[:4])
        reader = Reader(tmp_path, from_now=True)
        assert seen(reader) == []
        file.add(LINES[4])
        File(tmp_path, "engine-P.8").add(LINES[5])
        assert seen(reader) == written(LINES[4], LINES[5])

    def test_wherever_a_line_was_cut(self, tmp_path: Path) -> None:
        # Its rest may look like a line of its own: the list of transfers begins with a bracket too.
        for cut in range(len(LINES[1])):
            folder = tmp_path / str(cut)
            folder.mkdir()
            file = File(folder)
            file.add(LINES[0], LINES[1][:cut])
            reader = Reader(folder, from_now=True)
            reader.poll()
            file.add(LINES[1][cut:], LINES[2])
            assert seen(reader) == written(LINES[1], LINES[2])
            reader.close()

    @pytest.mark.parametrize("cut", [0, 10])
    def test_a_header_that_was_not_whole(self, cut: int, tmp_path: Path) -> None:
        head = header_line()
        file = File(tmp_path, head=head[:cut])
        reader = Reader(tmp_path, from_now=True)
        file.add(head[cut:], LINES[0])
        assert seen(reader) == written(LINES[0])

    def test_of_a_long_file_only_the_end_is_looked_at(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(readers, "TAIL", 1000)
        file = File(tmp_path)
        file.add(*LINES[:-2], LINES[-2][:50])
        reader = Reader(tmp_path, from_now=True)
        file.add(LINES[-2][50:], LINES[-1])
        assert seen(reader) == written(*LINES[-2:])


class TestRecent:
    def test_a_short_file_is_read_from_its_beginning(self, tmp_path: Path) -> None:
        File(tmp_path).add(*LINES)
        assert seen(Reader(tmp_path, recent=True)) == written(*LINES)

    @pytest.mark.parametrize("cut", [0, 1, 10])
    def test_of_a_long_file_the_lines_that_begin_in_its_tail(
        self, cut: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(readers, "TAIL", sum(len(line) for line in LINES[-2:]) + cut)
        File(tmp_path).add(*LINES)
        assert seen(Reader(tmp_path, recent=True)) == written(*(LINES[-2:] if cut else LINES[-1:]))


class TestClocks:
    """Another host's events, aligned by both wall clocks; here it is 5,000 s by the wall, 200 s since the boot."""

    @pytest.fixture(autouse=True)
    def now(self, monkeypatch: pytest.MonkeyPatch) -> None:
        recorded_trace()  # read by the real clock: other tests have it too
        monkeypatch.setattr(readers, "time", SimpleNamespace(time=lambda: 5000.0, monotonic=lambda: 200.0))

    def test_of_this_host_are_as_they_are(self, tmp_path: Path) -> None:
        File(tmp_path, head=header_line(wall=9.0, monotonic=1.0)).add(LINES[0])
        assert seen(Reader(tmp_path)) == written(LINES[0])

    def test_of_another_host_are_moved(self, tmp_path: Path) -> None:
        # Its boot was at 4,000 by the wall, this one's at 4,800.
        File(tmp_path, head=header_line(boot="another", wall=4100.0, monotonic=100.0)).add(LINES[0])
        [event] = written(LINES[0])
        assert seen(Reader(tmp_path)) == [event.later(-800.0)]

    def test_of_one_other_host_stay_in_step(self, tmp_path: Path) -> None:
        # Its wall clock was set half a second back between the starts of two of its processes.
        File(tmp_path, "a", header_line(boot="another", wall=4100.0, monotonic=100.0)).add(LINES[0])
        File(tmp_path, "b", header_line(boot="another", wall=4150.5, monotonic=150.0)).add(LINES[1])
        first, second = written(LINES[0], LINES[1])
        assert seen(Reader(tmp_path)) == [first.later(-800.0), second.later(-800.0)]

    def test_of_a_third_host_by_its_own(self, tmp_path: Path) -> None:
        File(tmp_path, "a", header_line(boot="another", wall=4100.0, monotonic=100.0)).add(LINES[0])
        File(tmp_path, "b", header_line(boot="a third", wall=4850.0, monotonic=40.0)).add(LINES[0])
        [event] = written(LINES[0])
        assert seen(Reader(tmp_path)) == [event.later(-800.0), event.later(10.0)]

    def test_a_trace_from_before_this_hosts_boot_is_read(self, tmp_path: Path) -> None:
        for path in TRACE.iterdir():
            head = header_line(boot="another", wall=1e4, monotonic=1e6)
            File(tmp_path, path.stem, head).add(*lines_of(path.stem))
        trace = read(tmp_path)
        assert trace[0].start < 0
        assert len(trace) == len(EVERY)
        for journey, recorded in zip(trace, recorded_trace(), strict=True):
            assert journey.seconds.keys() == recorded.seconds.keys()


class TestNoTrace:
    def test_of_another_schema(self, tmp_path: Path) -> None:
        path = File(tmp_path, head=header_line(schema=2)).path
        for look in (Reader(tmp_path).poll, lambda: Reader(tmp_path, from_now=True), lambda: read(tmp_path)):
            with pytest.raises(PdlabError) as raised:
                look()
            assert raised.value.message == f"{path} has trace schema 2; this pdlab reads 1"
            assert raised.value.hint == "read it with the pdlab that wrote it"
        assert open_files(tmp_path) == []

    @pytest.mark.parametrize("what", NO_HEADERS)
    def test_that_is_none(self, what: str, tmp_path: Path) -> None:
        (tmp_path / "x.jsonl").write_bytes(NO_HEADERS[what])
        reader = Reader(tmp_path)
        with pytest.raises(PdlabError) as raised:
            reader.poll()
        assert raised.value.message == f"{tmp_path / 'x.jsonl'} is no trace"
        assert open_files(tmp_path) == []


class TestBounds:
    def test_the_latest_transfers_are_remembered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(readers, "KEPT", 3)
        reader = Reader(TRACE)
        reader.poll()
        latest = [journey.transfer_id for journey in recorded_trace()][-3:]
        assert set(reader.of_transfer) == set(latest)
        assert set(reader.transfer_of.values()) == set(latest)

    def test_what_is_forgotten_does_not_grow_back(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(readers, "KEPT", 2)
        file, reader = File(tmp_path), Reader(tmp_path)
        for line in LINES:
            file.add(line)
            reader.poll()
            assert len(reader.of_transfer) <= 2
            assert len(reader.transfer_of) <= 2


class TestClose:
    def test_what_was_read_stays_and_nothing_more_comes(self, tmp_path: Path) -> None:
        file, reader = File(tmp_path), Reader(tmp_path)
        file.add(*LINES[:3])
        assert len(seen(reader)) == 3
        reader.close()
        assert open_files(tmp_path) == []
        file.add(LINES[3])
        assert seen(reader) == written(*LINES[:3])
        reader.close()

    def test_goes_with_the_reader(self, tmp_path: Path) -> None:
        File(tmp_path)
        reader = Reader(tmp_path)
        reader.poll()
        assert len(open_files(tmp_path)) == 1
        del reader
        assert open_files(tmp_path) == []

    def test_of_a_trace_that_was_read(self) -> None:
        trace = read(TRACE)
        assert len(trace) == len(EVERY)
        assert open_files(TRACE) == []


def test_this_machine_knows_its_boot() -> None:
    assert boot() == boot() != ""


def opening(first: Callable[[], object]) -> Callable[..., object]:
    """What opens files, and has something happen just before the first."""
    original, todo = readers._File, [first]

    def opened(*args: Any) -> object:
        if todo:
            todo.pop()()
        return original(*args)

    return opened


def open_files(folder: Path) -> list[str]:
    """The files in `folder` that this process has open, those too that are deleted."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(link.readlink()))
        except FileNotFoundError:
            continue
    return [path for path in found if path.startswith(f"{folder}/")]
