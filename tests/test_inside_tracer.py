"""What a probe may do to the call that it looks at: nothing; and what is wrapped in a process of vLLM, and when."""

import asyncio
import gc
import importlib
import inspect
import json
import logging
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import GeneratorType, ModuleType
from typing import Any

import pytest

from pdlab.inside import tracer as tracing
from pdlab.inside.tracer import Probe, Seen, Tracer, extra_probes, watched, wrap
from tests.helpers import PATIENCE, Noted, tracer

pytest.importorskip("vllm")


@pytest.fixture
def both(tmp_path: Path) -> tuple[Tracer, Noted]:
    return tracer("P", tmp_path)


@pytest.fixture
def trace(both: tuple[Tracer, Noted]) -> Tracer:
    return both[0]


@pytest.fixture
def logged() -> Iterator[list[tuple[int, str]]]:
    """What is logged as vLLM's own lines are: (level, message). Once vLLM is imported, caplog sees none of it."""
    records: list[tuple[int, str]] = []
    handler, logger = logging.Handler(), logging.getLogger("vllm.pdlab")
    handler.emit = lambda record: records.append((record.levelno, record.getMessage()))  # type: ignore[method-assign]
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


@pytest.fixture
def noted(both: tuple[Tracer, Noted]) -> Noted:
    return both[1]


def probe(look: Callable[..., Seen], symbol: str = "nowhere:nothing") -> Probe:
    return Probe(symbol, look.__name__, look, "for a test")


# How a probe looks, and how one fails ---------------------------------------------------------------------------------


def both_ways(trace: Tracer, left: Any, right: Any) -> Seen:
    trace.note("worker", "before", left=left)
    result = yield
    trace.note("worker", "after", result=result)


def before_only(trace: Tracer, left: Any, right: Any) -> Seen:
    trace.note("worker", "before", left=left)
    return
    yield


def after_only(trace: Tracer, left: Any, right: Any) -> Seen:
    result = yield
    trace.note("worker", "after", result=result)


def raises_before(trace: Tracer, left: Any, right: Any) -> Seen:
    raise ZeroDivisionError("before")
    yield


def raises_at(trace: Tracer, left: Any, right: Any) -> Seen:
    yield 1 / 0


def raises_after(trace: Tracer, left: Any, right: Any) -> Seen:
    yield
    raise ZeroDivisionError("after")


def raises_stop_iteration(trace: Tracer, left: Any, right: Any) -> Seen:
    yield
    raise StopIteration


def takes_too_few(trace: Tracer) -> Seen:
    yield


def is_no_generator(trace: Tracer, left: Any, right: Any) -> None:
    return


def yields_twice(trace: Tracer, left: Any, right: Any) -> Seen:
    yield
    yield


NOTES = {both_ways: ["before", "after"], before_only: ["before"], after_only: ["after"], yields_twice: []}
FAILING = [raises_before, raises_at, raises_after, raises_stop_iteration, takes_too_few, is_no_generator]


class Strange(BaseException):
    """No Exception: as KeyboardInterrupt, or the cancelling of a task."""


class Subject:
    """What is looked at."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any]] = []
        self.error: BaseException | None = None
        self.result = object()

    def sync(self, left: int, right: str = "r") -> object:
        """Its own words."""
        self.calls.append((left, right))
        if self.error:
            raise self.error
        return self.result

    async def later(self, left: int, right: str = "r") -> object:
        """Its own words, later."""
        await asyncio.sleep(0)
        return self.sync(left, right)


WAYS = pytest.mark.parametrize("way", ["sync", "later"])


def called(trace: Tracer, look: Callable[..., Any], way: str, subject: Subject, *args: Any, **kwargs: Any) -> Any:
    """The result of a call of the subject's method, with the probe looking on."""
    original = getattr(subject, way)
    # A method gets its object as first argument: the looks of these tests are spared it.
    around = watched(trace, probe(look), original)
    return asyncio.run(around(*args, **kwargs)) if way == "later" else around(*args, **kwargs)


@WAYS
@pytest.mark.parametrize("look", NOTES, ids=lambda look: look.__name__)
def test_a_probe_sees_the_call_and_its_result(look: Callable[..., Seen], way: str, trace: Tracer, noted: Noted) -> None:
    subject = Subject()
    assert called(trace, look, way, subject, 1, right="two") is subject.result
    assert subject.calls == [(1, "two")]
    assert [event.name for event in noted.events] == NOTES[look]
    assert not trace.errors
    for event in noted.events:
        assert (event.actor, event.thread) == ("P worker", "MainThread")
        assert event.facts == ({"left": 1} if event.name == "before" else {"result": str(subject.result)})


@WAYS
@pytest.mark.parametrize("look", FAILING, ids=lambda look: look.__name__)
def test_a_probe_that_fails_changes_nothing(
    look: Callable[..., Any], way: str, trace: Tracer, noted: Noted, logged: list[tuple[int, str]]
) -> None:
    subject = Subject()
    assert called(trace, look, way, subject, 1, right="two") is subject.result
    assert subject.calls == [(1, "two")]
    assert trace.errors == {look.__name__: 1}
    (failed,) = noted.events
    assert failed.name == "probe.failed"
    assert (failed.facts["probe"], failed.facts["count"]) == (look.__name__, 1)
    ((level, message),) = logged
    assert level == logging.WARNING
    assert message.startswith(f"pdlab's probe {look.__name__} failed (1 so far): ")


@pytest.mark.parametrize("look", [*NOTES, *FAILING], ids=lambda look: look.__name__)
@pytest.mark.parametrize(
    ("error", "way"),
    [
        *[(KeyError("its own"), way) for way in ("sync", "later")],
        *[(Strange("its own"), way) for way in ("sync", "later")],
        (StopIteration("its own"), "sync"),  # no coroutine can raise it
        (asyncio.CancelledError("its own"), "later"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_the_call_s_own_exception_passes_through(
    error: BaseException, look: Callable[..., Any], way: str, trace: Tracer, noted: Noted
) -> None:
    subject = Subject()
    subject.error = error
    with pytest.raises(type(error)) as raised:
        called(trace, look, way, subject, 1, "two")
    if not isinstance(error, asyncio.CancelledError):  # of which asyncio.run makes another
        assert raised.value is error
        assert error.__cause__ is None and error.__context__ is None
    assert subject.calls == [(1, "two")]
    assert "after" not in [event.name for event in noted.events]


@WAYS
def test_a_call_that_raised_leaves_no_probe_behind(way: str, trace: Tracer) -> None:
    closed = []

    def look(trace: Tracer, left: Any, right: Any) -> Seen:
        try:
            yield
        finally:
            closed.append(left)

    subject = Subject()
    for left in range(3):
        subject.error = KeyError(left)
        with pytest.raises(KeyError):
            called(trace, look, way, subject, left, "r")
    subject.error = None
    gc.collect()
    assert closed == [0, 1, 2]
    assert not [each for each in gc.get_objects() if type(each) is GeneratorType and each.__name__ == "look"]
    assert not trace.errors


@WAYS
def test_what_is_watched_looks_as_before(way: str, trace: Tracer) -> None:
    original = getattr(Subject, way)
    around = watched(trace, probe(both_ways), original)
    assert inspect.iscoroutinefunction(around) == inspect.iscoroutinefunction(original) == (way == "later")
    assert (around.__name__, around.__qualname__, around.__doc__, around.__module__) == (
        original.__name__, original.__qualname__, original.__doc__, original.__module__,
    )  # fmt: skip
    assert inspect.signature(around) == inspect.signature(original)
    assert around.__wrapped__ is original  # type: ignore[attr-defined]


def test_two_calls_at_once_are_two_looks(trace: Tracer, noted: Noted) -> None:
    async def at_once() -> list[int]:
        async def original(place: int) -> int:
            while len(noted.events) < place - 1:
                await asyncio.sleep(0)
            return place

        def look(trace: Tracer, place: int) -> Seen:
            result = yield
            trace.note("worker", "seen", place=place, result=result)

        around = watched(trace, probe(look), original)
        return await asyncio.gather(around(3), around(1), around(2))

    assert asyncio.run(asyncio.wait_for(at_once(), PATIENCE)) == [3, 1, 2]
    assert [event.facts for event in noted.events] == [{"place": n, "result": n} for n in (1, 2, 3)]


def test_failures_are_logged_at_the_first_tenth_and_hundredth(
    trace: Tracer, noted: Noted, logged: list[tuple[int, str]]
) -> None:
    around = watched(trace, probe(raises_before), lambda left, right: None)
    for _ in range(234):
        around(1, 2)
    trace.failed("another", KeyError("x" * 1000))
    assert trace.errors == {"raises_before": 234, "another": 1}
    counts = [("raises_before", 1), ("raises_before", 10), ("raises_before", 100), ("another", 1)]
    assert [(event.facts["probe"], event.facts["count"]) for event in noted.events] == counts
    for (name, count), (_, message) in zip(counts, logged, strict=True):
        assert message.startswith(f"pdlab's probe {name} failed ({count} so far): ")
    assert noted.events[0].facts["error"] == "ZeroDivisionError('before')"
    assert max(len(event.facts["error"]) for event in noted.events) == 300


# Who is followed ------------------------------------------------------------------------------------------------------


def test_the_latest_requests_are_followed(trace: Tracer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "FOLLOWED_LIMIT", 3)
    for number in range(5):
        trace.follow(f"r{number}", f"xfer-{number}")
        trace.followed[f"r{number}"] = number
        assert len(trace.transfer_of) <= 3
    assert trace.transfer_of == {"r2": "xfer-2", "r3": "xfer-3", "r4": "xfer-4"}
    assert trace.followed == {"r2": 2, "r3": 3, "r4": 4}  # a probe finds a request in both or in neither
    trace.follow("r3", "xfer-3")
    assert len(trace.transfer_of) == 3
    trace.forget("r3"), trace.forget("never seen")
    assert list(trace.transfer_of) == list(trace.followed) == ["r2", "r4"]


def test_no_more_than_ten_thousand_are(trace: Tracer) -> None:
    for number in range(25_000):
        trace.follow(f"r{number}", "xfer")
    assert len(trace.transfer_of) == tracing.FOLLOWED_LIMIT == 10_000
    assert "r24999" in trace.transfer_of


def test_a_note_is_of_one_transfer_or_of_several(trace: Tracer, noted: Noted) -> None:
    began = time.monotonic()
    trace.note("scheduler", "one", "xfer-1", "r1", fact=1)
    trace.note("worker", "two", ["xfer-1", "xfer-2"])
    trace.note("worker", "none")
    one, two, none = noted.events
    assert (one.actor, one.transfers, one.request_id, one.facts) == ("P scheduler", ("xfer-1",), "r1", {"fact": 1})
    assert (two.transfers, none.transfers, none.request_id) == (("xfer-1", "xfer-2"), (), None)
    assert began <= one.time <= two.time <= none.time <= time.monotonic()


def test_a_forked_worker_writes_a_file_of_its_own(tmp_path: Path) -> None:
    # Its probes come with it; the thread that writes does not.
    trace = Tracer("P", tmp_path)
    trace.note("scheduler", "mine")
    child = multiprocessing.get_context("fork").Process(
        target=lambda: (trace.note("worker", "its own", "xfer"), trace.writer.close())
    )
    child.start()
    child.join()
    trace.note("scheduler", "mine again")
    trace.writer.close()
    for pid, names in ((child.pid, ["its own"]), (os.getpid(), ["mine", "mine again"])):
        header, *lines = (tmp_path / f"engine-P.{pid}.jsonl").read_text().splitlines()
        assert json.loads(header)["pid"] == pid
        assert [json.loads(line)[1] for line in lines] == names


# What is wrapped ------------------------------------------------------------------------------------------------------


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module with something to wrap."""
    module = ModuleType("engine_of_a_test")
    module.Subject = type("Subject", (Subject,), {"sync": Subject.sync})  # type: ignore[attr-defined]
    module.function = lambda left, right: left + right  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "engine_of_a_test", module)
    return module


def test_what_this_vllm_does_not_have_counts_as_failed_and_the_rest_is_wrapped(
    engine: Any, trace: Tracer, noted: Noted
) -> None:
    gone = ["engine_of_a_test:gone", "engine_of_a_test:Subject.gone", "module_gone:Subject.sync", ""]
    probes = [Probe(symbol, f"gone {number}", both_ways, "") for number, symbol in enumerate(gone)]
    trace.install([*probes, probe(both_ways, "engine_of_a_test:function")])
    assert trace.errors == {f"gone {number}": 1 for number in range(4)}
    assert [event.facts["probe"] for event in noted.events] == list(trace.errors)
    assert engine.function(1, 2) == 3
    assert [event.name for event in noted.events[4:]] == ["before", "after"]


def test_a_method_is_wrapped_where_it_is_looked_up(engine: Any, trace: Tracer) -> None:
    seen = []

    def look(trace: Tracer, subject: Any, left: Any, right: Any = None) -> Seen:
        yield
        seen.append((subject, left))

    existing = engine.Subject()
    trace.install([probe(look, "engine_of_a_test:Subject.sync")])
    for subject in (existing, engine.Subject()):
        assert subject.sync(7) is subject.result
    assert [left for _, left in seen] == [7, 7] and seen[0][0] is existing
    assert not trace.errors


def test_wrap_puts_what_the_wrapper_returns_in_place(engine: Any) -> None:
    original = engine.function
    wrap("engine_of_a_test:function", lambda found: (found, "wrapped"))
    assert engine.function == (original, "wrapped")


def test_a_reader_s_own_probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PDLAB_PROBES", raising=False)
    assert extra_probes() == ()
    monkeypatch.setenv("PDLAB_PROBES", "")
    assert extra_probes() == ()
    table = "from pdlab.inside.tracer import Probe\nMINE = [Probe('m:f', 'mine', print, 'all')]\n"
    (tmp_path / "my_own_probes.py").write_text(table)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PDLAB_PROBES", "my_own_probes:MINE")
    assert extra_probes() == (Probe("m:f", "mine", print, "all"),)


# In the processes of an engine ----------------------------------------------------------------------------------------

MCW = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector:MooncakeConnectorWorker"
GATE_POINTS = [f"{MCW}.{name}" for name in ("receive_kv", "record_send_reqs", "_build_transfer_params", "_send_blocks")]
EXTRA = "from pdlab.inside.tracer import Probe\ndef look(trace, *a, **k): yield\n"
EXTRA += "MINE = [Probe('vllm.utils.math_utils:cdiv', 'mine', look, ''), Probe('vllm:gone', 'gone', look, '')]\n"
HERE = """
import functools, importlib, json, multiprocessing, os, sys
from pathlib import Path
from pdlab.inside.plugin import register, trace_into
from pdlab.trace.writer import Writer

writers, original = [], Writer.__init__
Writer.__init__ = lambda self, *args: (writers.append(self), original(self, *args))[1]
SYMBOLS = json.loads(sys.argv[1])

def find(symbol):
    module, _, names = symbol.partition(":")
    return functools.reduce(getattr, names.split("."), importlib.import_module(module))

def layers(function):
    found = []
    while hasattr(function, "__wrapped__"):
        found.append(function.__code__.co_qualname.split(".")[0])
        function = function.__wrapped__
    return found

def facts(before):
    now = {symbol: find(symbol) for symbol in SYMBOLS}
    return {
        "changed": [symbol for symbol in SYMBOLS if now[symbol] is not before[symbol]],
        "layers": {symbol: layers(now[symbol]) for symbol in SYMBOLS},
        "files": sorted(path.name for path in Path(os.environ.get("PDLAB_TRACE") or "/nowhere").glob("*")),
        "events": "".join(p.read_text() for p in Path(os.environ.get("PDLAB_TRACE") or "/nowhere").glob("*.jsonl")),
        "pid": os.getpid(), "inside": "pdlab.inside.gates" in sys.modules,
    }

def life(send, env):
    os.environ.update(env)
    before = {symbol: find(symbol) for symbol in SYMBOLS}
    register()
    register()
    for writer in writers:
        writer.close()  # by then it has written
    send(facts(before))

def in_child(env):
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    child = context.Process(target=life, args=(theirs.send, env))
    child.start()
    theirs.close()
    return mine.recv()

if __name__ == "__main__":
    for symbol in SYMBOLS:
        find(symbol)  # vLLM is imported once
    folder = sys.argv[2]
    traced = {"PDLAB_INSTANCE": "prefill", "PDLAB_TRACE": f"{folder}/P"}
    found = {
        "not ours": in_child({"PDLAB_TRACE": f"{folder}/none"}),
        "untraced": in_child({"PDLAB_INSTANCE": "prefill"}),
        "empty": in_child({"PDLAB_INSTANCE": "prefill", "PDLAB_TRACE": ""}),
        "P": in_child(traced),
        "D": in_child({"PDLAB_INSTANCE": "decode", "PDLAB_TRACE": f"{folder}/D"}),
        "more": in_child({**traced, "PDLAB_PROBES": "my_own_probes:MINE"}),
    }
    life(lambda facts: found.update(api=facts), {**traced, "PDLAB_TRACE": f"{folder}/api"})
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `register` did in processes of an engine, and in one that has no parent process."""
    from pdlab.inside.probes import PROBES

    folder = tmp_path_factory.mktemp("processes")
    (folder / "my_own_probes.py").write_text(EXTRA)
    symbols = [*dict.fromkeys([probe.symbol for probe in PROBES]), *GATE_POINTS, "vllm.utils.math_utils:cdiv"]
    env = {key: value for key, value in os.environ.items() if not key.startswith("PDLAB_")}
    env["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [env.get("PYTHONPATH")])])
    (folder / "life.py").write_text(HERE)
    done = subprocess.run(
        [sys.executable, folder / "life.py", json.dumps(list(dict.fromkeys(symbols))), str(folder)],
        env=env, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def probed() -> set[str]:
    from pdlab.inside.probes import PROBES

    return {probe.symbol for probe in PROBES}


@pytest.mark.parametrize("process", ["not ours", "untraced", "empty", "api"])
def test_nothing_is_wrapped(process: str, processes: dict[str, Any]) -> None:
    assert processes[process]["changed"] == []
    assert processes[process]["files"] == []
    assert not processes[process]["inside"]


@pytest.mark.parametrize("side", ["P", "D"])
def test_in_an_engine_every_probe_point_and_every_gate_is_wrapped_once(side: str, processes: dict[str, Any]) -> None:
    found = processes[side]
    assert set(found["changed"]) == probed() | set(GATE_POINTS)
    for symbol, layers in found["layers"].items():
        # From the outside in: the gates stand outside of the probes, so that these see what passes and not what waits.
        gate = ["Gates"] if symbol in GATE_POINTS else []
        assert layers == gate + (["watched"] if symbol in probed() else []), symbol
    assert found["files"] == [f"engine-{side}.{found['pid']}.jsonl"]
    assert "probe.failed" not in found["events"]


def test_with_a_table_of_one_s_own(processes: dict[str, Any]) -> None:
    assert set(processes["more"]["changed"]) == probed() | set(GATE_POINTS) | {"vllm.utils.math_utils:cdiv"}
    (failed,) = [line for line in processes["more"]["events"].splitlines() if "probe.failed" in line]
    assert json.loads(failed)[-1]["probe"] == "gone"


def test_the_points_of_the_gates_are_those() -> None:
    source = inspect.getsource(importlib.import_module("pdlab.inside.gates").Gates.install)
    assert source.count("wrap(") == len(GATE_POINTS)
    assert all(symbol.removeprefix(MCW) in source for symbol in GATE_POINTS)
