"""Holds as files: whom they take, and the four ways in which they end."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdlab.inside.holds import LOOK, Hold, Holder, find, holds, release_all
from pdlab.inside.points import POINTS
from tests.helpers import Zoo, wait_until

POINT, OTHER = "before_write", "before_answer"
INTERNAL = "cmpl-pdlab-abc-0-1f2e3d4c"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "gates"


@pytest.fixture
def holder(folder: Path) -> Iterator[Callable[..., Holder]]:
    made: list[Holder] = []

    def holder(match: str = "*", point: str = POINT, seconds: float = 30) -> Holder:
        made.append(Holder(folder, point, match, seconds))
        return made[-1]

    yield holder
    for each in made:
        each.release()


@pytest.fixture
def zoo() -> Iterator[Zoo]:
    zoo = Zoo()
    yield zoo
    zoo.clean()


# Whom a hold takes ---------------------------------------------------------------------------------------------------


def takes(match: str, name: str) -> bool:
    return Hold(Path("nowhere"), POINT, match, 0).takes(name)


@pytest.mark.parametrize(
    "match",
    [
        INTERNAL,
        "pdlab-abc",  # the X-Request-Id
        "pdlab-*",
        "pdlab-???",
        "pdlab-[a-f]bc",
        "*",
        "*-abc",
        "cmpl-*",
        "*-1f2e3d4c",
    ],
)
def test_takes(match: str) -> None:
    assert takes(match, INTERNAL)


@pytest.mark.parametrize(
    "match",
    ["pdlab", "abc", "pdlab-ab", "pdlab-abcd", "pdlab-abc-0", "abc-*", "0", "1f2e3d4c", "PDLAB-ABC", "pdlab-abc*x", ""],
)
def test_does_not_take(match: str) -> None:
    # An X-Request-Id that another one contains is another request's.
    assert not takes(match, INTERNAL)


def test_takes_by_the_x_request_id_whatever_that_looks_like() -> None:
    for request_id in ("a", "7", "a-0", "0-12345678", "cmpl-x-0-0123abcd", "é", "a b", "x.y", "-", "2" * 64):
        for name in (f"cmpl-{request_id}-0-0123abcd", f"chatcmpl-{request_id}-0123abcd", request_id):
            assert takes(request_id, name), (request_id, name)
            assert not takes(request_id + "x", name)
            assert not takes("x" + request_id, name)


def test_takes_by_the_transfer_id() -> None:
    transfer = "xfer-0d2b6d3e-8f0b-4f7e-9f3a-111111111111"
    assert takes(transfer, transfer) and takes("xfer-*", transfer)
    assert not takes("0d2b6d3e*", transfer) and not takes(INTERNAL, transfer)


# How it stands, and how it ends --------------------------------------------------------------------------------------


def test_a_hold_is_found_at_its_point_by_those_it_takes(folder: Path, holder: Callable[..., Holder]) -> None:
    mine = holder("pdlab-abc")
    assert find(folder, POINT, INTERNAL) == mine.hold
    assert find(folder, OTHER, INTERNAL) is None
    assert find(folder, POINT, "cmpl-another-0-1f2e3d4c") is None
    assert mine.hold.over() is None
    assert (mine.hold.point, mine.hold.match) == (POINT, "pdlab-abc")
    assert re.fullmatch(rf"{POINT}\.[0-9a-f]{{8}}\.json", mine.hold.path.name)
    assert [path.name for path in folder.iterdir()] == [mine.hold.path.name]  # and no draft of it


@pytest.mark.parametrize("point", POINTS)
def test_each_point_has_holds_of_its_own(point: str, folder: Path, holder: Callable[..., Holder]) -> None:
    holder(point=point)
    assert [other for other in POINTS if find(folder, other, "r")] == [point]


def test_it_ends_when_it_is_released(folder: Path, holder: Callable[..., Holder]) -> None:
    mine = holder()
    found = find(folder, POINT, "r")
    assert found and found.over() is None
    mine.release()
    assert found.over() == mine.hold.over() == "released"
    assert find(folder, POINT, "r") is None and list(folder.iterdir()) == []
    mine.release()  # does no harm


def test_it_ends_when_its_time_is_up(folder: Path, holder: Callable[..., Holder]) -> None:
    mine = holder(seconds=1)
    assert mine.hold.over() is None
    wait_until(lambda: mine.hold.over() == "its time was up")
    assert time.monotonic() >= mine.hold.deadline
    assert find(folder, POINT, "r") is None


HOLD = """
import sys, time
from pathlib import Path
from pdlab.inside.holds import Holder
hold = Holder(Path(sys.argv[1]), "before_write", "*", 600)
print(hold.hold.path, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_when_its_holder_dies(signal_: signal.Signals, folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, folder], stdout=subprocess.PIPE, text=True) as notebook:
        assert notebook.stdout
        path = Path(notebook.stdout.readline().strip())
        found = find(folder, POINT, "r")
        assert found and found.path == path
        time.sleep(3 * LOOK)
        assert found.over() is None
        os.kill(notebook.pid, signal_)
        notebook.wait()
        assert found.over() == "its holder died"
        assert find(folder, POINT, "r") is None
        assert path.exists()  # nobody is left to remove it
    assert holds_at(folder) == [path]
    release_all(folder)
    assert found.over() == "released"


def holds_at(folder: Path) -> list[Path]:
    return [hold.path for hold in holds(folder)]


def test_a_child_that_its_holder_starts_does_not_keep_it(folder: Path, holder: Callable[..., Holder], zoo: Zoo) -> None:
    mine = holder()
    zoo.python("import time; time.sleep(600)")
    mine._file.close()  # as the kernel does for one that is killed
    assert mine.hold.over() == "its holder died"


def test_release_all_ends_those_of_others_too(folder: Path, holder: Callable[..., Holder]) -> None:
    mine = [holder(), holder("a"), holder(point=OTHER)]
    with subprocess.Popen([sys.executable, "-c", HOLD, folder], stdout=subprocess.PIPE, text=True) as notebook:
        assert notebook.stdout
        theirs = Path(notebook.stdout.readline().strip())
        assert set(holds_at(folder)) == {theirs, *(each.hold.path for each in mine)}
        release_all(folder)
        assert holds_at(folder) == []
        assert {each.hold.over() for each in mine} == {"released"}
        notebook.kill()


def test_two_holders_at_once(folder: Path, holder: Callable[..., Holder]) -> None:
    first, second = holder("pdlab-*"), holder("*-abc")
    assert find(folder, POINT, INTERNAL) in (first.hold, second.hold)
    assert find(folder, POINT, "cmpl-pdlab-x-0-1f2e3d4c") == first.hold
    assert find(folder, POINT, "cmpl-x-abc-0-1f2e3d4c") == second.hold
    first.release()
    assert find(folder, POINT, INTERNAL) == second.hold
    second.release()
    assert find(folder, POINT, INTERNAL) is None


def test_who_looks_does_not_disturb_who_holds(folder: Path, holder: Callable[..., Holder]) -> None:
    mine = holder()
    code = (
        "import sys; from pathlib import Path; from pdlab.inside.holds import find\n"
        "for _ in range(3000): assert find(Path(sys.argv[1]), 'before_write', 'r'), 'lost'"
    )
    watchers = [subprocess.Popen([sys.executable, "-c", code, folder]) for _ in range(2)]
    while any(watcher.poll() is None for watcher in watchers):
        assert mine.hold.over() is None
    assert [watcher.returncode for watcher in watchers] == [0, 0]


# What else may lie there ---------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_there_holds_nobody(tmp_path: Path) -> None:
    for folder in (tmp_path / "none", tmp_path / "none" / "deeper"):
        assert find(folder, POINT, "r") is None
        assert list(holds(folder)) == []
        release_all(folder)
        assert not folder.exists()
    (tmp_path / "file").touch()
    assert find(tmp_path / "file", POINT, "r") is None


BROKEN = {
    "empty": b"",
    "half": b'{"match": "*", "dead',
    "no JSON": b"hold, please",
    "no text": b"\xff\xfe\x00",
    "a list": b"[1, 2]",
    "null": b"null",
    "a number": b"7",
    "no deadline": b'{"match": "*"}',
    "no match": b'{"deadline": 1e18}',
    "a deadline in words": b'{"match": "*", "deadline": "tomorrow"}',
    "a list for a deadline": b'{"match": "*", "deadline": [1]}',
    "no end": b'{"match": "*", "deadline": 1' + b"0" * 400 + b"}",
    "too deep": b"[" * 100_000,
    "unlocked": b'{"match": "*", "deadline": 1e18}',
    "unlocked, of numbers": b'{"match": 5, "deadline": 1e18}',
    "never": b'{"match": "*", "deadline": NaN}',
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_no_hold_holds_nobody_and_hides_none(
    name: str, folder: Path, holder: Callable[..., Holder]
) -> None:
    folder.mkdir()
    for prefix in ("0", "z"):  # whichever comes first
        (folder / f"{POINT}.{prefix}.json").write_bytes(BROKEN[name])
    assert find(folder, POINT, "r") is None
    mine = holder("r")
    assert find(folder, POINT, "r") == mine.hold


def test_other_files_are_left_alone(folder: Path, holder: Callable[..., Holder]) -> None:
    folder.mkdir()
    line = json.dumps({"match": "*", "deadline": 1e18})
    for name in ("notes.txt", f"{POINT}.x.tmp", f"{POINT}.json.bak", f"{POINT}x.1.json", "README"):
        (folder / name).write_text(line)
    (folder / f"{POINT}.folder.json").mkdir()
    (folder / f"{POINT}.gone.json").symlink_to("nowhere")
    holder("r", point=f"{POINT}x")
    assert find(folder, POINT, "r") is None
    before = {path.name for path in folder.iterdir()}
    mine = holder("r")
    assert find(folder, POINT, "r") == mine.hold
    mine.release()
    assert {path.name for path in folder.iterdir()} == before


def test_a_file_that_nobody_may_read_holds_nobody(
    folder: Path, holder: Callable[..., Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    mine = holder()
    monkeypatch.setattr(Path, "open", refuse)
    assert mine.hold.over() == "its file cannot be read (Permission denied)"
    assert find(folder, POINT, "r") is None


def test_a_hold_appears_whole(folder: Path) -> None:
    # One that looks while it is being made sees none or a valid one, locked: never one whose holder seems dead.
    code = (
        "import sys; from pathlib import Path; from pdlab.inside.holds import holds\n"
        "print('ready', flush=True)\n"
        "while not Path(sys.argv[1], 'stop').exists():\n"
        "    for hold in holds(Path(sys.argv[1])):\n"
        "        assert hold.over() in (None, 'released'), hold.over()"
    )
    folder.mkdir()
    with subprocess.Popen([sys.executable, "-c", code, folder], stdout=subprocess.PIPE) as watcher:
        assert watcher.stdout and watcher.stdout.readline()
        for _ in range(500):
            Holder(folder, POINT, "*", 30).release()
        (folder / "stop").touch()
        assert watcher.wait(10) == 0
