"""Gates in a worker: who waits at them, who does not, and that what they wrap does what it always did."""

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm")

from pdlab.inside import gates as module
from pdlab.inside.gates import Gates
from pdlab.inside.holds import LIMIT, Holder
from pdlab.inside.probes import MCW
from tests.helpers import Noted, engine_module, minute_later, tracer, wait_until

if TYPE_CHECKING:
    from tests.engine import Pair

POINTS = {
    "before_pull": "receive_kv",
    "before_ready": "record_send_reqs",
    "before_write": "_build_transfer_params",
    "before_answer": "_send_blocks",
}
each_point = pytest.mark.parametrize("point", POINTS)
WORKER, ENGINE = object(), "engine-P"


@pytest.fixture(scope="module")
def e() -> Any:
    return engine_module()


@pytest.fixture
def made(tmp_path: Path) -> Iterator[tuple[Gates, Noted]]:
    trace, noted = tracer("P", tmp_path)
    gates = Gates(trace, tmp_path / "gates")
    yield gates, noted
    assert not +gates.waiting, "somebody waits still"
    assert not gates.writing
    noted.close()


@pytest.fixture
def gates(made: tuple[Gates, Noted]) -> Gates:
    return made[0]


@pytest.fixture
def noted(made: tuple[Gates, Noted]) -> Noted:
    return made[1]


@pytest.fixture
def hold(gates: Gates) -> Iterator[Callable[..., Holder]]:
    with contextlib.ExitStack() as holders:

        def hold(point: str, match: str = "*", seconds: float = 30) -> Holder:
            holder = Holder(gates.folder, point, match, seconds)
            holders.callback(holder.release)
            return holder

        yield hold


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 20))


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def internal(name: str) -> str:
    """The internal id of the request whose X-Request-Id that is."""
    return f"cmpl-{name}-0-0123abcd"


def what_happened(noted: Noted) -> list[tuple[str, str | None, Any]]:
    return [(event.name, event.request_id, event.facts.get("why")) for event in noted.events]


# Before the pull message leaves --------------------------------------------------------------------------------------


def pulls(e: Any, *names: str) -> dict[str, Any]:
    return {
        internal(name): e.connector.PullReqMeta(internal(name), f"xfer-{name}", [[1, 2]], ENGINE, "http://p:1")
        for name in names
    }


class Messages:
    """Stands for `receive_kv`: the messages that left, each as the names of its requests."""

    def __init__(self, error: Exception | None = None) -> None:
        self.left: list[list[str]] = []
        self.pulls: dict[str, Any] = {}
        self.error = error

    def __call__(self, worker: Any, remote_engine_id: str, pull_metas: dict[str, Any]) -> None:
        assert (worker, remote_engine_id) == (WORKER, ENGINE)
        asyncio.get_running_loop()  # it makes tasks
        self.left.append([pull.transfer_id.removeprefix("xfer-") for pull in pull_metas.values()])
        self.pulls |= pull_metas
        if self.error:
            raise self.error


def test_without_a_hold_everything_leaves_in_one_message(e: Any, gates: Gates, noted: Noted) -> None:
    async def test() -> None:
        gates.before_pull(original)(WORKER, ENGINE, asked)

    original, asked = Messages(), pulls(e, "a", "b", "c")
    run(test())
    assert original.left == [["a", "b", "c"]]
    assert all(original.pulls[request_id] is pull for request_id, pull in asked.items())
    assert noted.events == []


def test_the_held_one_of_a_message_leaves_later_alone(e: Any, gates: Gates, noted: Noted, hold: Any) -> None:
    async def test() -> None:
        holder = hold("before_pull", "b")
        gates.before_pull(original)(WORKER, ENGINE, asked)
        assert original.left == [["a", "c"]]
        await until(lambda: noted.names == ["gate.held"])
        await asyncio.sleep(0.1)
        assert original.left == [["a", "c"]]
        assert gates.waiting == {"before_pull": 1}
        holder.release()
        await until(lambda: len(original.left) == 2)

    original, asked = Messages(), pulls(e, "a", "b", "c")
    run(test())
    assert original.left == [["a", "c"], ["b"]]
    assert all(original.pulls[request_id] is pull for request_id, pull in asked.items())
    held, released = noted.events
    assert (held.actor, held.transfers, held.request_id) == ("P worker", ("xfer-b",), internal("b"))
    assert held.facts["point"] == "before_pull"
    assert (released.name, released.transfers, released.facts["why"]) == ("gate.released", ("xfer-b",), "released")
    assert released.facts["hold"] == held.facts["hold"]
    assert 0.1 < released.facts["seconds"] < 10


@pytest.mark.parametrize("point", ["before_write", "before_answer"])
def test_one_that_p_is_to_hold_leaves_at_once_in_a_message_of_its_own(
    point: str, e: Any, gates: Gates, noted: Noted, hold: Any
) -> None:
    async def test() -> None:
        hold(point, "b")
        gates.before_pull(original)(WORKER, ENGINE, pulls(e, "a", "b", "c"))
        await until(lambda: len(original.left) == 2)

    original = Messages()
    run(test())
    assert sorted(original.left) == [["a", "c"], ["b"]]
    assert noted.events == []  # nobody waits here


def test_one_that_is_to_be_held_on_both_sides_waits_here_first(e: Any, gates: Gates, hold: Any) -> None:
    async def test() -> None:
        hold("before_write")
        holder = hold("before_pull", "b")
        gates.before_pull(original)(WORKER, ENGINE, pulls(e, "a", "b"))
        await until(lambda: original.left == [["a"]])
        holder.release()
        await until(lambda: original.left == [["a"], ["b"]])

    original = Messages()
    run(test())


def test_a_message_of_held_ones_only_waits_whole_and_each_goes_by_itself(e: Any, gates: Gates, hold: Any) -> None:
    async def test() -> None:
        first, second = hold("before_pull", "a"), hold("before_pull", "xfer-b")
        gates.before_pull(original)(WORKER, ENGINE, pulls(e, "a", "b"))
        await asyncio.sleep(0.1)
        assert original.left == []
        second.release()
        await until(lambda: original.left == [["b"]])
        first.release()
        await until(lambda: original.left == [["b"], ["a"]])

    original = Messages()
    run(test())


def test_an_error_of_the_message_passes_and_the_held_one_leaves_all_the_same(e: Any, gates: Gates, hold: Any) -> None:
    async def test() -> None:
        holder = hold("before_pull", "b")
        with pytest.raises(KeyError) as raised:
            gates.before_pull(original)(WORKER, ENGINE, pulls(e, "a", "b"))
        assert raised.value is original.error
        original.error = None
        holder.release()
        await until(lambda: original.left == [["a"], ["b"]])

    original = Messages(KeyError("no such engine"))
    run(test())


# Before the entry of P becomes ready ---------------------------------------------------------------------------------


class Records:
    """Stands for `record_send_reqs`: what it was called with."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[Any] = []
        self.error = error

    async def __call__(self, worker: Any, metadata: Any) -> None:
        assert worker is WORKER
        self.calls.append(metadata)
        if self.error:
            raise self.error

    @property
    def sent(self) -> list[list[str]]:
        return [[transfer.removeprefix("xfer-") for transfer, _ in m.reqs_to_send.values()] for m in self.calls]


def recording(records: Records) -> Callable[..., Coroutine[Any, Any, None]]:
    async def record_send_reqs(worker: Any, metadata: Any) -> None:
        await records(worker, metadata)

    return record_send_reqs


def to_send(e: Any, *ready: str, new: str = "") -> Any:
    """The metadata of a step: these are ready to be sent, that one is only announced."""
    metadata = e.connector.MooncakeConnectorMetadata()
    for name in ready:
        metadata.reqs_to_send[internal(name)] = (f"xfer-{name}", [[1, 2]])
    if new:
        metadata.reqs_to_send[internal(new)] = (f"xfer-{new}", [])
    return metadata


def test_without_a_hold_the_metadata_passes_as_it_is(e: Any, gates: Gates, noted: Noted) -> None:
    records, metadata = Records(), to_send(e, "a", "b", new="c")
    run(gates.before_ready(recording(records))(WORKER, metadata))
    assert records.calls == [metadata]
    assert noted.events == []


def test_the_held_one_becomes_ready_later_and_the_others_now(e: Any, gates: Gates, noted: Noted, hold: Any) -> None:
    async def test() -> None:
        holder = hold("before_ready", "[bd]")
        metadata.reqs_to_recv["engine-X"] = {"r": "a pull of its own"}
        metadata.reqs_not_processed.add("xfer-dropped")
        await gates.before_ready(recording(records))(WORKER, metadata)
        assert records.sent == [["a", "c", "d"]]  # d has no blocks yet: there is nothing to hold
        await asyncio.sleep(0.1)
        assert len(records.calls) == 1
        holder.release()
        await until(lambda: len(records.calls) == 2)

    records, metadata = Records(), to_send(e, "a", "b", "c", new="d")
    before = dict(metadata.reqs_to_send)
    run(test())
    rest, late = records.calls
    assert records.sent == [["a", "c", "d"], ["b"]]
    assert type(rest) is type(late) is e.connector.MooncakeConnectorMetadata
    assert (rest.reqs_to_recv, rest.reqs_not_processed) == ({"engine-X": {"r": "a pull of its own"}}, {"xfer-dropped"})
    assert (late.reqs_to_recv, late.reqs_not_processed) == ({}, set())
    assert metadata.reqs_to_send == before
    assert what_happened(noted) == [
        ("gate.held", internal("b"), None), ("gate.released", internal("b"), "released"),
    ]  # fmt: skip


def test_each_held_one_becomes_ready_by_itself(e: Any, gates: Gates, hold: Any) -> None:
    async def test() -> None:
        holders = {name: hold("before_ready", name) for name in "ab"}
        await gates.before_ready(recording(records))(WORKER, to_send(e, "a", "b"))
        for name in "ba":
            holders[name].release()
            await until(lambda name=name: records.sent[-1] == [name])

    records = Records()
    run(test())
    assert records.sent == [[], ["b"], ["a"]]


def test_an_error_of_recording_passes(e: Any, gates: Gates) -> None:
    records = Records(KeyError("xfer-a"))
    with pytest.raises(KeyError) as raised:
        run(gates.before_ready(recording(records))(WORKER, to_send(e, "a")))
    assert raised.value is records.error


# Before the write ----------------------------------------------------------------------------------------------------


def entries(e: Any, *names: str) -> list[tuple[str, Any]]:
    return [
        (internal(name), e.connector.SendBlockMeta(f"p-{name}", f"xfer-{name}", [[1]], asyncio.Event()))
        for name in names
    ]


PLAN: Any = ([1, 2], [3, 4], [8, 8], [], None)
NOTHING: Any = ([], [], [], [], None)


def planning(plan: Any) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Stands for `_build_transfer_params`."""

    async def _build_transfer_params(worker: Any, ready_reqs: Any, meta: Any, local: Any, remote: Any) -> Any:
        assert (worker, meta, local, remote) == (WORKER, "meta", "local", "remote")
        await asyncio.sleep(0)
        if isinstance(plan, Exception):
            raise plan
        return plan

    return _build_transfer_params


def test_a_plan_waits_while_its_loop_serves_others(e: Any, gates: Gates, noted: Noted, hold: Any) -> None:
    async def test() -> None:
        holder, plan = hold("before_write", "a"), gates.before_write(planning(PLAN))
        held = asyncio.create_task(plan(WORKER, entries(e, "a"), "meta", "local", "remote"))
        await until(lambda: noted.names == ["gate.held"])
        for _ in range(20):
            other: Any = ([5], [6], [8], [], None)
            planned = gates.before_write(planning(other))(WORKER, entries(e, "b"), "meta", "local", "remote")
            assert await planned is other
            gates.writing.pop(id(other[0]))
        assert not held.done()
        assert gates.waiting == {"before_write": 1}
        holder.release()
        assert await held is PLAN
        assert gates.writing.pop(id(PLAN[0])) == [(internal("a"), "xfer-a")]

    run(test())
    assert what_happened(noted)[-1] == ("gate.released", internal("a"), "released")


def test_a_plan_without_writes_is_held_too_and_leaves_nothing_behind(e: Any, gates: Gates, hold: Any) -> None:
    async def test() -> None:
        holder = hold("before_write")
        held = asyncio.create_task(
            gates.before_write(planning(NOTHING))(WORKER, entries(e, "a"), "meta", "local", "remote")
        )
        await until(lambda: gates.waiting["before_write"])
        holder.release()
        assert await held is NOTHING
        assert gates.writing == {}

    run(test())


def test_a_plan_that_is_cancelled_waits_no_more(e: Any, gates: Gates, noted: Noted, hold: Any) -> None:
    async def test() -> None:
        hold("before_write")
        held = asyncio.create_task(
            gates.before_write(planning(PLAN))(WORKER, entries(e, "a"), "meta", "local", "remote")
        )
        await until(lambda: gates.waiting["before_write"])
        held.cancel()
        with pytest.raises(asyncio.CancelledError):
            await held

    run(test())
    assert what_happened(noted)[-1] == ("gate.released", internal("a"), "given up")


def test_an_error_of_planning_passes(e: Any, gates: Gates, noted: Noted, hold: Any) -> None:
    hold("before_write")
    error = AssertionError("another group")
    with pytest.raises(AssertionError) as raised:
        run(gates.before_write(planning(error))(WORKER, entries(e, "a"), "meta", "local", "remote"))
    assert raised.value is error
    assert noted.events == []


# Before the answer ---------------------------------------------------------------------------------------------------


class Writes:
    """Stands for `_send_blocks`, in threads."""

    def __init__(self, gates: Gates, result: Any = 0) -> None:
        self.gates, self.result, self.done = gates, result, 0
        self.returned: dict[str, Any] = {}

    def _send_blocks(self, worker: Any, remote_session: str, src: Any, dst: Any, lengths: Any) -> int:
        assert (worker, remote_session, dst, lengths) == (WORKER, "d:1", [3], [8])
        self.done += 1
        if isinstance(self.result, Exception):
            raise self.result
        return int(self.result)

    def start(self, name: str) -> threading.Thread:
        thread = threading.Thread(target=self._write, args=(name,))
        thread.start()
        return thread

    def _write(self, name: str) -> None:
        src = [hash(name)]
        self.gates.writing[id(src)] = [(internal(name), f"xfer-{name}")]
        try:
            self.returned[name] = self.gates.before_answer(self._send_blocks)(WORKER, "d:1", src, [3], [8])
        except Exception as error:
            self.returned[name] = error


@pytest.mark.parametrize("result", [0, -1])
def test_an_answer_waits_in_its_thread_with_all_written(result: int, gates: Gates, noted: Noted, hold: Any) -> None:
    holder, writes = hold("before_answer", "a"), Writes(gates, result)
    held = writes.start("a")
    wait_until(lambda: noted.names == ["gate.held"])
    assert writes.done == 1  # the write itself did not wait
    writes.start("b").join(5)
    assert writes.returned == {"b": result}
    assert gates.waiting == {"before_answer": 1}
    holder.release()
    held.join(5)
    assert writes.returned == {"b": result, "a": result}
    assert noted.events[0].thread == held.name
    assert what_happened(noted)[-1] == ("gate.released", internal("a"), "released")


def test_an_error_of_the_write_passes(gates: Gates, noted: Noted, hold: Any) -> None:
    hold("before_answer")
    writes = Writes(gates, OSError("no route"))
    writes.start("a").join(5)
    assert writes.returned["a"] is writes.result
    assert noted.events == []


def test_a_write_of_which_nothing_is_known_passes(gates: Gates, hold: Any) -> None:
    hold("before_answer")
    write = gates.before_answer(lambda worker, session, src, dst, lengths: 7)
    assert write(WORKER, "d:1", [1], [3], [8]) == 7


# At every point ------------------------------------------------------------------------------------------------------


def starts(e: Any, gates: Gates, point: str, names: list[str]) -> Callable[[], Coroutine[Any, Any, list[str]]]:
    """Starts these requests through the point; what is returned waits for them, and says who came through so far."""
    through: list[str] = []
    messages, records, writes = Messages(), Records(), Writes(gates)
    tasks: list[Any] = []

    async def plan(name: str) -> None:
        made: Any = ([hash(name)], [], [], [], None)
        await gates.before_write(planning(made))(WORKER, entries(e, name), "meta", "local", "remote")
        gates.writing.pop(id(made[0]))
        through.append(name)

    async def seen() -> list[str]:
        await asyncio.sleep(0.05)
        if point == "before_pull":
            return [name for message in messages.left for name in message]
        if point == "before_ready":
            return [name for names in records.sent for name in names]
        return through if point == "before_write" else list(writes.returned)

    if point == "before_pull":
        gates.before_pull(messages)(WORKER, ENGINE, pulls(e, *names))
    elif point == "before_ready":
        tasks.append(asyncio.create_task(gates.before_ready(recording(records))(WORKER, to_send(e, *names))))
    elif point == "before_write":
        tasks.extend(asyncio.create_task(plan(name)) for name in names)
    else:
        tasks.extend(writes.start(name) for name in names)
    seen.tasks = tasks  # type: ignore[attr-defined]  # kept
    return seen


@each_point
def test_a_point_holds_no_more_than_its_limit(point: str, e: Any, gates: Gates, noted: Noted, hold: Any) -> None:
    async def test() -> None:
        holder, names = hold(point), [f"r{number:02}" for number in range(LIMIT + 4)]
        seen = starts(e, gates, point, names)
        await until(lambda: len(noted.events) == LIMIT + 4)
        while len(await seen()) < 4:
            pass
        assert len(await seen()) == 4
        assert gates.waiting == {point: LIMIT}
        holder.release()
        while len(await seen()) < LIMIT + 4:
            pass
        assert sorted(await seen()) == names
        assert gates.waiting == {point: 0}

    run(test())
    assert LIMIT == 8
    assert sum(name == "gate.held" for name in noted.names) == LIMIT
    assert {(event.facts["why"], event.facts["point"]) for event in noted.named("gate.passed")} == {
        ("it holds 8", point)
    }
    assert len({event.facts["hold"] for event in noted.events}) == 1


@each_point
def test_an_error_in_looking_stops_nobody(
    point: str, e: Any, gates: Gates, noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        seen = starts(e, gates, point, ["a", "b"])
        while sorted(await seen()) != ["a", "b"]:
            pass

    def broken(*_: Any) -> None:
        raise PermissionError("the folder is another's")

    monkeypatch.setattr(module, "find", broken)
    run(test())
    assert gates.trace.errors[f"gate.{point}"] == 2
    assert set(noted.names) == {"probe.failed"}


@each_point
def test_a_hold_that_cannot_be_read_any_more_lets_go(
    point: str, e: Any, gates: Gates, noted: Noted, hold: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_many_files(*_: Any, **__: Any) -> Any:
        raise OSError(24, "Too many open files")

    async def test() -> None:
        hold(point)
        seen = starts(e, gates, point, ["a"])
        await until(lambda: noted.names == ["gate.held"])
        assert await seen() == []
        monkeypatch.setattr(Path, "open", too_many_files)
        await until(lambda: len(noted.events) == 2)
        while await seen() != ["a"]:
            pass
        monkeypatch.undo()

    run(test())
    assert what_happened(noted)[-1][2] == "its file cannot be read (Too many open files)"


@each_point
def test_a_hold_that_lasted_too_long_lets_go(
    point: str, e: Any, gates: Gates, noted: Noted, hold: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        hold(point)
        seen = starts(e, gates, point, ["a"])
        await until(lambda: noted.names == ["gate.held"])
        assert await seen() == []
        minute_later(monkeypatch)
        while await seen() != ["a"]:
            pass

    run(test())
    assert what_happened(noted)[-1][2] == "its time was up"
    assert 0 < noted.events[-1].facts["seconds"] < 20


@each_point
def test_of_two_holds_the_last_one_lets_go(point: str, e: Any, gates: Gates, noted: Noted, hold: Any) -> None:
    async def test() -> None:
        holders = {holder.hold.path.stem: holder for holder in (hold(point), hold(point, "a"))}
        seen = starts(e, gates, point, ["a"])
        await until(lambda: noted.names == ["gate.held"])
        holders[noted.events[0].facts["hold"]].release()
        await until(lambda: noted.names == ["gate.held", "gate.released", "gate.held"])
        assert await seen() == []
        holders[noted.events[2].facts["hold"]].release()
        while await seen() != ["a"]:
            pass

    run(test())
    assert noted.names == ["gate.held", "gate.released"] * 2


@each_point
def test_holds_at_other_points_hold_nobody_here(point: str, e: Any, gates: Gates, noted: Noted, hold: Any) -> None:
    async def test() -> None:
        for other in {*POINTS, "before_prefill_send", "before_decode_send"} - {point}:
            hold(other)
        seen = starts(e, gates, point, ["a"])
        while await seen() != ["a"]:
            pass

    run(test())
    assert noted.events == []


@each_point
def test_what_is_wrapped_is_called_as_before(point: str, e: Any, gates: Gates) -> None:
    original = getattr(e.connector.MooncakeConnectorWorker, POINTS[point])
    wrapped = getattr(gates, point)(original)
    assert inspect.iscoroutinefunction(wrapped) == inspect.iscoroutinefunction(original)
    assert (wrapped.__name__, wrapped.__doc__, wrapped.__wrapped__) == (original.__name__, original.__doc__, original)
    # vLLM gives all of them by position, the pool too.
    names = list(inspect.signature(original).parameters)
    taken = inspect.signature(wrapped, follow_wrapped=False)
    taken.bind(*names)
    mine = [name for name, p in taken.parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert mine[1:] == names[1 : len(mine)]
    source = inspect.getsource(e.connector)
    assert f"{POINTS[point]}(" in source or f"self.{POINTS[point]},\n" in source


# In vLLM's own workers -----------------------------------------------------------------------------------------------


@pytest.fixture
def pair(e: Any, tmp_path: Path) -> Iterator["Pair"]:
    """P and D, with probes and gates."""
    made = {side: tracer(side, tmp_path) for side in "PD"}
    points = [f"{MCW}.{name}" for name in POINTS.values()]
    with e.probed({side: trace for side, (trace, _) in made.items()}), e.unwrapped_after(points):
        gates = Gates(made["P"][0], tmp_path / "gates")
        gates.install()
        pair = e.Pair(tmp_path, made)
        pair.gates = gates
        yield pair
        pair.end()
        assert not +gates.waiting


@each_point
def test_only_the_held_one_waits_and_then_its_bytes_arrive(point: str, e: Any, pair: Any) -> None:
    def served() -> bool:
        return set(pair.d.scheduler.requests) == {"d-xfer-1"} and "gate.held" in pair.p_noted.names

    pair.p.memory.random_(256)
    holder = Holder(pair.gates.folder, point, "xfer-1", 30)
    try:
        for number in range(3):
            pair.send(f"xfer-{number}", prompt=range(1000 * number, 1000 * number + e.N))
        pair.run(served)
        for _ in range(50):
            pair.d.step(), pair.p.step()
        assert set(pair.d.scheduler.requests) == {"d-xfer-1"}
        assert pair.d.scheduler.requests["d-xfer-1"].status.name == "WAITING_FOR_REMOTE_KVS"
        assert pair.gates.waiting == {point: 1}
        mine = [event.name for event in pair.p_noted.events if event.transfers == ("xfer-1",)]
        assert mine.count("gate.held") == 1
        assert mine.count("transfer.written") == (point == "before_answer")
    finally:
        holder.release()
    pair.run()
    messages = [event.transfers for event in pair.d_noted.named("pull.encoded")]
    if point == "before_ready":
        assert messages == [("xfer-0", "xfer-1", "xfer-2")]  # P answers those that are ready
    else:
        assert sorted(messages) == [("xfer-0", "xfer-2"), ("xfer-1",)]
    planned = [row for event in pair.p_noted.named("transfer.planned") for row in event.facts["requests"]]
    assert sorted(row[1] for row in planned) == ["xfer-0", "xfer-1", "xfer-2"]
    for _, transfer, mine, theirs in planned:
        if transfer == "xfer-1":  # of the others D's blocks have been used again
            assert bool((pair.p.memory[:, mine[0]] == pair.d.memory[:, theirs[0]]).all())
    assert [event.transfers for event in pair.p_noted.named("gate.released")] == [("xfer-1",)]
    assert pair.fine()
