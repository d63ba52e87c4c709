"""What a lab returns, as JSON and back."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pdlab.errors import MismatchError, PdlabError, RequestError
from pdlab.lab.command import Command
from pdlab.lab.comparison import Comparison, Pair, Rewritten
from pdlab.lab.hold import Hold
from pdlab.lab.processes import Processes, Row
from pdlab.paths import cache_dir, repo_root, state_dir
from pdlab.recorded.codec import Decoder, Encoder, Held
from pdlab.trace.answer import Answer
from pdlab.trace.event import Event
from pdlab.trace.journey import Journey
from pdlab.trace.trace import Trace
from tests.recording import ABOUT, NOTE, SETTINGS, FakeInstance, sample


def again(value: Any) -> Any:
    """`value` through a file."""
    encoder = Encoder()
    stored = json.loads(json.dumps([encoder.encode(value), encoder.pool]))
    return Decoder(stored[1], ABOUT).decode(stored[0])


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, 1.5, "", "×", [], {}, [1, [2, {"a": None}]], (), (1, ("a", [2])), {"a": (1,)}, {1: "a", "b": 2},
        {"$": "tuple"}, {(1, 2): [(3,)]}, b"\x00\xff", SETTINGS, Rewritten(3, 4, ((0, 2), (5, 6))),
        Row("decode", "API server", 7, (0, 1), 2, ("127.0.0.1:1",)),
        Command(["python", "-m", "x"], {"A": "1"}, ["--b"]),
    ],
)  # fmt: skip
def test_equal_and_of_equal_type(value: Any) -> None:
    assert again(value) == value
    assert type(again(value)) is type(value)


@pytest.mark.parametrize("name", ["plain", "partial_hit", "held", "was_held", "p_first", "batch"])
def test_a_journey_is_the_same_and_says_that_it_is_recorded(name: str) -> None:
    journey = sample(name)
    back = again(journey)
    assert back.as_dict() == {**journey.as_dict(), "about": ABOUT}
    assert repr(back) == repr(journey)[:-1] + NOTE + ">"
    assert str(back) == str(journey).replace(repr(journey), repr(back))
    assert (back.done, back.held, back.missing) == (journey.done, journey.held, journey.missing)


def test_a_journey_that_is_kept_and_loaded_again_is_still_recorded(tmp_path: Path) -> None:
    back = again(sample("plain"))
    assert Journey.load(back.save(tmp_path / "j.json.gz")).about == ABOUT


def test_events_are_kept_once() -> None:
    journey = sample("plain")
    encoder = Encoder()
    encoder.encode([journey, Trace([journey], []), sample("plain")])
    assert len(encoder.pool) == len(journey.events)


def test_an_answer_says_so_too_and_equals_another_of_the_run() -> None:
    answer = Answer(" yes", (1, 2), 3, "length", "pdlab-1", "xfer-1")
    back = again([answer, answer])
    assert back[0] == back[1] and vars(back[0]) == vars(answer)
    assert repr(back[0]) == f"<Answer to 3 prompt tokens: ' yes'{NOTE}>"
    journey = again(sample("plain"))
    assert repr(journey.answer) == repr(sample("plain").answer)[:-1] + NOTE + ">"


def test_a_block_has_its_bytes() -> None:
    block = FakeInstance("decode").kv(3, 7)
    back = again(block)
    assert vars(back) == vars(block) and back.hexdump() == block.hexdump()
    assert back.differing(again(FakeInstance("decode").kv(3, 8))) == block.differing(FakeInstance("decode").kv(3, 8))
    assert repr(back) == repr(block)[:-1] + NOTE + ">"


def test_processes_print_as_they_did() -> None:
    rows = Processes([Row("prefill", "EngineCore", 5, (0,), 1 << 30, ("127.0.0.1:80",))])
    assert list(again(rows)) == list(rows)
    assert repr(again(rows)) == repr(rows) + NOTE


def test_a_trace_has_its_journeys_and_what_is_of_none() -> None:
    startup = Event(0.5, "memory.registered", "P worker", "MainThread", facts={"regions": 30})
    failed = Event(0.6, "probe.failed", "P worker", "MainThread", facts={"probe": "x", "count": 2})
    trace = Trace([sample("plain"), sample("batch")], [startup, failed])
    back = again(trace)
    assert [journey.as_dict()["events"] for journey in back] == [journey.as_dict()["events"] for journey in trace]
    assert (back.startup, back.probe_errors) == ([startup], {"x": 2})
    transfer = sample("batch").transfer_id
    assert transfer and back.of(transfer).request_id == sample("batch").request_id
    assert repr(back) == f"<Trace of 2 journeys, 2 probe errors{NOTE}>"


def test_a_comparison_has_its_pairs_and_not_its_bytes() -> None:
    pairs = (Pair(0, 1, 2, True), Pair(0, 2, 5, False))
    block = FakeInstance("decode").kv(0, 2)
    comparison = Comparison(pairs, 128, "before_answer", FakeInstance("decode"), (block,))  # type: ignore[arg-type]
    encoder = Encoder()
    encoder.encode(comparison)
    assert not encoder.pool
    back = again(comparison)
    assert (back.pairs, back.block_len, back.held, back.equal, back.bytes) == (pairs, 128, "before_answer", False, 256)
    assert repr(back) == repr(comparison)


def test_a_hold_is_known_by_its_name(tmp_path: Path) -> None:
    hold = Hold(tmp_path, "before_write", "a*", 9.0)
    hold.release()
    assert again(hold) == Held("before_write", "a*", 9.0, hold.name)


@pytest.mark.parametrize("kind", [PdlabError, MismatchError])
def test_an_error_has_its_type_and_hint(kind: type[PdlabError]) -> None:
    back = again(kind("wrong", "do this"))
    assert type(back) is kind and (back.message, back.hint, str(back)) == ("wrong", "do this", "wrong\n  do this")


def test_an_error_of_a_type_that_readers_do_not_know_is_a_plain_one() -> None:
    class OfThisTest(PdlabError): ...

    assert type(again(OfThisTest("no disk"))) is PdlabError


def test_a_refused_request_has_its_status_and_journey() -> None:
    error = RequestError(400, "more than one answer")
    error.journey = Journey("pdlab-1", error=error)
    back = again(error)
    assert (type(back), back.status, back.message, back.hint) == (RequestError, 400, "more than one answer", None)
    assert back.journey.request_id == "pdlab-1" and back.journey.error.status == 400
    assert back.journey.error.journey is back.journey


def test_a_journey_that_failed_has_its_error() -> None:
    back = again(Journey("pdlab-1", sample("plain").events[:3], error=RequestError(502, "P died")))
    assert back.done and "failed: 502: P died" in repr(back)
    with pytest.raises(RequestError, match="P died"):
        back.wait()
    assert back.error.journey is None


def test_nothing_says_where_on_this_machine_it_was() -> None:
    event = Event(0.5, "x", "P worker", "MainThread", facts={"path": f"{Path.home()}/.cache/x"})
    values = [
        f"{Path.home()}/log", {"argv": [sys.executable]}, PdlabError(f"{repo_root()}/data is no file"),
        f"{state_dir()}/labs {cache_dir()}/models", Journey("a", [event]),
    ]  # fmt: skip
    path, argv, error, folders, journey = again(values)
    assert path == "~/log" and argv == {"argv": ["python"]} and error.message == "./data is no file"
    assert folders == "~/.local/state/pdlab/labs ~/.cache/pdlab/models"
    assert journey.events[0].facts == {"path": "~/.cache/x"}


def test_a_command_has_no_token() -> None:
    assert again(Command(["python"], {}, [], {"PDLAB_KV_TOKEN": "secret"})).instrument_env == {}


def test_what_is_not_in_the_table_is_an_error() -> None:
    with pytest.raises(PdlabError, match="a set cannot be recorded"):
        Encoder().encode({"a": {1}})
    with pytest.raises(PdlabError, match="knows no recorded Dream"):
        Decoder([], ABOUT).decode({"$": "Dream"})
