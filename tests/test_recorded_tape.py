"""The file of a recorded run: whole, versioned, and clear about what is wrong with it."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from pdlab.errors import PdlabError
from pdlab.paths import repo_root
from pdlab.recorded.tape import SCHEMA, Call, Tape, data_dir, path_of
from pdlab.trace.event import SCHEMA as EVENTS
from tests.recording import ABOUT

CALLS = [
    Call("up", result={"$": "Made", "what": "lab"}), Call("status", 0, result={"up": False}, spare=True),
    Call("send", 0, {"prompt": "a", "max_tokens": 6}, error={"$": "error"}), Call("alive", 0, result=False),
    Call("metric", 0, {"name": "x"}, 0),
]  # fmt: skip


def test_saved_and_loaded(tmp_path: Path) -> None:
    path = Tape(ABOUT, CALLS, ["a", [1, 2]]).save(tmp_path / "new" / "run.json.gz")
    assert Tape.load(path) == Tape(ABOUT, CALLS, ["a", [1, 2]])
    assert [each.name for each in path.parent.iterdir()] == ["run.json.gz"]


def test_the_same_run_is_the_same_file(tmp_path: Path) -> None:
    first, second = (Tape(ABOUT, CALLS).save(tmp_path / f"{name}.json.gz").read_bytes() for name in "ab")
    assert first == second
    assert first[4:8] == bytes(4)  # where gzip puts the time


def test_a_file_that_cannot_be_written_whole_leaves_the_former(tmp_path: Path) -> None:
    path = Tape(ABOUT, CALLS).save(tmp_path / "run.json.gz")
    with pytest.raises(TypeError):
        Tape(ABOUT, [Call("send", 0, result=object())]).save(path)
    assert Tape.load(path).calls == CALLS


def error_of(path: Path) -> PdlabError:
    with pytest.raises(PdlabError) as caught:
        Tape.load(path)
    assert "\n" not in caught.value.message and "\n" not in str(caught.value.hint)
    return caught.value


def test_a_missing_run_says_which_there_are_and_how_to_record_one(tmp_path: Path) -> None:
    error = error_of(tmp_path / "gone.json.gz")
    assert error.message == "there is no recorded run 'gone'"
    assert error.hint == "there are none; record one where engines run: python3 -m pdlab record"
    for name in ("journey", "00_the_lab"):
        Tape(ABOUT, CALLS).save(tmp_path / f"{name}.json.gz")
    (tmp_path / "anchors.json").write_text("{}")
    hint = error_of(tmp_path / "gone.json.gz").hint
    assert hint == "there are: 00_the_lab, journey; record one where engines run: python3 -m pdlab record"
    assert error_of(tmp_path / "nowhere" / "gone.json.gz").hint == error.hint


def packed(value: Any) -> bytes:
    return gzip.compress(json.dumps(value).encode())


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{}", packed([]), packed({}), packed({"schema": SCHEMA}), gzip.compress(b"{"), gzip.compress(b"\xff"),
        packed({"schema": SCHEMA, "events": EVENTS, "about": {}, "calls": [{"path": "a", "colour": 1}], "pool": []}),
        packed({"schema": SCHEMA, "events": EVENTS, "about": {}, "calls": 3, "pool": []}),
        packed({"schema": SCHEMA, "events": EVENTS, "calls": []}), packed(list(range(5000)))[:-40], packed(None),
        packed({})[:10] + b"\xff" * 20,
    ],
)  # fmt: skip
def test_a_broken_file_is_named(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "run.json.gz").write_bytes(raw)
    error = error_of(tmp_path / "run.json.gz")
    assert error.message.startswith("run.json.gz is no recorded run (")
    assert "pdlab record" in str(error.hint)


def test_one_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.json.gz").mkdir()  # root may read anything but a folder
    assert "is no recorded run" in error_of(tmp_path / "run.json.gz").message


@pytest.mark.parametrize(("schema", "events"), [(SCHEMA + 1, EVENTS), (SCHEMA, EVENTS + 1)])
def test_another_schema_says_which(tmp_path: Path, schema: int, events: int) -> None:
    fields = {"schema": schema, "events": events, "about": ABOUT, "calls": [], "pool": []}
    (tmp_path / "run.json.gz").write_bytes(packed(fields))
    expected = f"has schemas {schema} and {events} (events); this pdlab reads {SCHEMA} and {EVENTS}"
    assert expected in error_of(tmp_path / "run.json.gz").message


def test_runs_lie_in_data_beside_the_package_or_where_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PDLAB_DATA", raising=False)
    assert data_dir() == repo_root() / "data"
    monkeypatch.setenv("PDLAB_DATA", str(tmp_path))
    assert path_of("00_the_lab") == tmp_path / "00_the_lab.json.gz"


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".x", "a b", "x" * 65])
def test_names_are_names(name: str) -> None:
    with pytest.raises(PdlabError, match="cannot be called"):
        path_of(name)
