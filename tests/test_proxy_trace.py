"""The proxy, watched: what it notes of the two halves, and the gates at which a half waits before it leaves."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdlab.inside.holds import Holder
from pdlab.lab import proxy, proxy_trace
from pdlab.lab.ports import Ports
from pdlab.lab.proxy_half import Half
from pdlab.lab.proxy_trace import WatchedHalf, watched
from pdlab.trace.event import Event
from pdlab.trace.reader import Reader
from pdlab.trace.writer import Writer
from tests.helpers import minute_later
from tests.test_proxy import ANSWER, CHUNK, DONE, SSE, Bench, answers, error, serves, until

SECRET = "the word that nobody may see"
HALVES = {"before_prefill_send": "prefill", "before_decode_send": "decode"}


class Watched:
    """A bench whose proxy notes into `folder`, and what it has noted so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.reader = Reader(folder)

    def __call__(self, test: Callable[[Bench], Coroutine[Any, Any, None]], **options: Any) -> None:
        serves(make_half=watched(self.folder), **options)(test)()

    @property
    def events(self) -> list[Event]:
        self.reader.poll()
        return [event for events in self.reader.of_transfer.values() for event in events]

    def of(self, role: str) -> list[Event]:
        return [event for event in self.events if event.facts.get("role") == role]

    def names(self, role: str) -> list[str]:
        return [event.name for event in self.of(role)]

    def facts(self, role: str, name: str) -> dict[str, Any]:
        (event,) = [event for event in self.of(role) if event.name == name]
        return event.facts

    async def until(self, role: str, *names: str) -> None:
        """Until exactly these were noted of that half."""
        await until(lambda: self.names(role) == list(names))

    def text(self) -> str:
        return "".join(path.read_text() for path in self.folder.glob("*.jsonl"))

    def hold(self, point: str, match: str = "*", seconds: float = 30) -> Holder:
        return Holder(self.folder / "gates", point, match, seconds)


@pytest.fixture
def trace(tmp_path: Path) -> Iterator[Watched]:
    trace = Watched(tmp_path / "trace")
    yield trace
    trace.reader.close()


# What is noted -------------------------------------------------------------------------------------------------------


def test_both_halves_are_noted_from_start_to_end(trace: Watched) -> None:
    async def test(bench: Bench) -> None:
        began = time.monotonic()
        answer = await bench.post(headers={"X-Request-Id": "pdlab-abc"}, max_tokens=20, temperature=0.5)
        assert answer.json() == ANSWER
        transfer = answer.headers["X-Transfer-Id"]
        await trace.until("decode", "half.sent", "half.answered", "half.closed")
        await trace.until("prefill", "half.sent", "half.answered")
        for event in trace.events:
            assert (event.actor, event.transfers, event.request_id) == ("proxy", (transfer,), "pdlab-abc")
            assert event.thread == "MainThread"
            assert began <= event.time <= time.monotonic()
        p, d = trace.facts("prefill", "half.sent"), trace.facts("decode", "half.sent")
        assert p["url"] == f"{bench.servers[bench.p].url}/v1/completions"
        assert d["url"] == f"{bench.servers[bench.d].url}/v1/completions"
        assert p["kv_transfer_params"] == bench.p.body["kv_transfer_params"]
        assert d["kv_transfer_params"] == bench.d.body["kv_transfer_params"]
        assert (p["max_tokens"], p["stream"], p["ignore_eos"], p["dp_rank"]) == (1, False, True, None)
        assert (d["max_tokens"], d["stream"], d["ignore_eos"], d["dp_rank"]) == (20, None, None, None)
        assert p["fields"] == sorted(bench.p.body) and d["fields"] == sorted(bench.d.body)
        assert trace.facts("prefill", "half.answered")["status"] == 200
        assert trace.facts("decode", "half.answered")["status"] == 200
        assert trace.facts("decode", "half.closed")["unanswered"] is False

    trace(test)


def test_the_halves_are_what_they_are_without_it(trace: Watched) -> None:
    async def test(bench: Bench) -> None:
        bodies.append(await sent(bench))

    async def sent(bench: Bench) -> list[Any]:
        headers = {"X-Request-Id": "r", "Authorization": "Bearer sesame"}
        answer = await bench.post("/v1/chat/completions", messages=[{"role": "user"}], headers=headers)
        seen = []
        for instance in (bench.p, bench.d):
            kept = {key: value for key, value in instance.headers.items() if key not in ("host", "content-length")}
            body = {**instance.body, "kv_transfer_params": sorted(instance.body["kv_transfer_params"])}
            seen.append((instance.paths, kept, body))
        return [answer.status_code, answer.content, seen]

    bodies: list[Any] = []
    trace(test)
    serves()(test)()
    assert bodies[0] == bodies[1]


def test_the_rank_that_p_s_half_goes_to_is_noted(trace: Watched) -> None:
    async def test(bench: Bench) -> None:
        for _ in range(4):
            await bench.post()
        await until(lambda: len(trace.of("decode")) == 12)
        sent = [event.facts for event in trace.of("prefill") if event.name == "half.sent"]
        assert [facts["dp_rank"] for facts in sent] == ["0", "1", "0", "1"]
        engines = [e.facts["kv_transfer_params"]["remote_engine_id"] for e in trace.of("decode") if "sent" in e.name]
        assert engines == ["engine-0_dp0", "engine-0_dp1"] * 2

    trace(test, ranks=2)


def test_a_stream_is_answered_with_its_first_chunk_and_closed_with_its_last(trace: Watched) -> None:
    async def test(bench: Bench) -> None:
        opens, ends = asyncio.Event(), asyncio.Event()
        bench.d.plays(opens, CHUNK, ends, DONE, type=SSE)
        waiting = asyncio.create_task(bench.post(stream=True))
        await bench.d.opened.wait()
        await trace.until("decode", "half.sent")
        opens.set()
        await trace.until("decode", "half.sent", "half.answered")
        ends.set()
        assert (await waiting).content == CHUNK + DONE
        await trace.until("decode", "half.sent", "half.answered", "half.closed")

    trace(test)


def test_of_the_prompt_and_the_answer_nothing_is_noted(trace: Watched) -> None:
    async def test(bench: Bench) -> None:
        # An engine repeats what it refuses.
        refusal = json.dumps(error(400, f"1 validation error: input: {SECRET!r}")).encode()
        completion = {"prompt": f"{SECRET} {'x' * 500}", "user": SECRET, "stop": [SECRET], "logit_bias": {SECRET: 1}}
        await bench.post(**completion, suffix=SECRET)
        await bench.post("/v1/chat/completions", messages=[{"role": "user", "content": SECRET}])
        bench.d.plays(b'data: {"choices": [{"text": "%s"}]}\n\n' % SECRET.encode(), DONE, type=SSE)
        assert SECRET in (await bench.post(**completion, stream=True)).text
        bench.d.plays(b"data: " + refusal + b"\n\n", type=SSE)
        assert (await bench.post(**completion, stream=True)).status_code == 400
        bench.d.plays(refusal, status=400)
        assert SECRET in (await bench.post(**completion)).text
        bench.p.plays(refusal, status=400)
        bench.d.plays(asyncio.Event())
        assert SECRET in (await bench.post(**completion)).text
        await until(lambda: len([event for event in trace.events if event.name == "half.closed"]) >= 6)
        await asyncio.sleep(0.1)
        assert SECRET not in trace.text()
        assert "messages" in trace.text()  # of the fields, the names

    trace(test)


# What goes wrong -----------------------------------------------------------------------------------------------------


def test_a_half_that_an_engine_refuses_has_failed_with_its_status(trace: Watched) -> None:
    async def test(bench: Bench) -> None:
        bench.p.fails(500, "Internal server error")
        bench.d.plays(asyncio.Event(), type=SSE)
        assert (await bench.post(stream=True)).status_code == 500
        await trace.until("prefill", "half.sent", "half.failed", "half.closed")
        assert trace.facts("prefill", "half.failed") == {"role": "prefill", "status": 500}
        assert trace.facts("prefill", "half.closed")["unanswered"] is False
        # D's half is ended with it, which is no failure of D's.
        await trace.until("decode", "half.sent", "half.closed")
        assert trace.facts("decode", "half.closed")["unanswered"] is True

    trace(test)


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_d_has_the_reason_that_its_worker_noted(stream: bool, trace: Watched) -> None:
    async def test(bench: Bench) -> None:
        bench.d.plays(fails, b"data: " + json.dumps(error(500, "Internal server error")).encode() + b"\n\n", type=SSE)
        if not stream:
            bench.d.plays(fails, json.dumps(error(500, "Internal server error")).encode(), status=500)
        waiting = asyncio.create_task(bench.post(stream=stream))
        await trace.until("decode", "half.sent")
        for transfer in (trace.of("decode")[0].transfers[0], "another"):
            reason = f"{transfer} timed out"
            worker.note(Event(time.monotonic(), "pull.failed", "D worker", "t", (transfer,), "r", {"reason": reason}))
        await until(lambda: trace.text().count("timed out") == 2)
        fails.set()
        answer = await waiting
        own = trace.of("decode")[0].transfers[0]
        says = f"Internal server error; D's worker says: {own} timed out"
        assert (answer.status_code, answer.json()) == (500, error(500, says))
        assert answer.headers["X-Failed-Hop"] == f"decode instance {bench.servers[bench.d].url}"

    fails, worker = asyncio.Event(), Writer(trace.folder, "worker", {"side": "D"})
    trace(test)
    worker.close()


@pytest.mark.parametrize(("status", "body"), [(500, b"no JSON"), (500, b'{"error": "no"}'), (503, b"{}")])
def test_an_error_of_d_is_handed_on_as_it_is_where_nothing_is_known(
    status: int, body: bytes, trace: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(bench: Bench) -> None:
        bench.d.plays(body, status=status)
        answer = await bench.post()
        assert (answer.status_code, answer.content) == (status, body)

    monkeypatch.setattr(proxy_trace, "SILENCE", 0.05)
    trace(test)


def test_an_event_stream_that_starts_with_an_error_has_failed(trace: Watched) -> None:
    async def test(bench: Bench) -> None:
        bench.d.plays(b"data: " + json.dumps(error(503, "no")).encode() + b"\n\n", DONE, type=SSE)
        assert (await bench.post(stream=True)).status_code == 503
        await trace.until("decode", "half.sent", "half.failed", "half.closed")
        assert trace.facts("decode", "half.failed")["status"] == 503

    trace(test)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_instance_that_is_gone_is_noted_with_the_reason(role: str, trace: Watched) -> None:
    async def test(bench: Bench) -> None:
        gone, other = (bench.p, bench.d) if role == "prefill" else (bench.d, bench.p)
        await bench.servers[gone].stop()
        other.plays(asyncio.Event())
        assert (await bench.post()).status_code == 502
        await trace.until(role, "half.sent", "half.failed", "half.closed")
        failed = trace.facts(role, "half.failed")
        assert failed["status"] == 502
        assert failed["error"].startswith(f"{role} instance {bench.servers[gone].url}: status 502")
        assert "connection refused" in failed["error"]

    trace(test)


def test_a_request_that_is_refused_before_it_is_sent_leaves_no_event(trace: Watched) -> None:
    async def test(bench: Bench) -> None:
        assert (await bench.post(n=2)).status_code == 400
        await asyncio.sleep(0.1)
        assert trace.events == []

    trace(test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_closes_both_halves(stream: bool, trace: Watched) -> None:
    async def test(bench: Bench) -> None:
        bench.p.plays(asyncio.Event())
        bench.d.plays(asyncio.Event(), type=SSE)
        waiting = asyncio.create_task(bench.post(stream=stream))
        await asyncio.gather(bench.p.arrived.wait(), bench.d.arrived.wait())
        waiting.cancel()
        for role in HALVES.values():
            await trace.until(role, "half.sent", "half.closed")
            assert trace.facts(role, "half.closed")["unanswered"] is True

    trace(test)


def test_a_half_that_is_closed_twice_is_noted_once(trace: Watched) -> None:
    async def test(bench: Bench) -> None:
        bench.p.plays(asyncio.Event())
        bench.d.plays(asyncio.Event())
        waiting = asyncio.create_task(bench.post())
        await asyncio.gather(bench.p.arrived.wait(), bench.d.arrived.wait())
        waiting.cancel()
        await asyncio.gather(bench.p.left.wait(), bench.d.left.wait())
        await asyncio.gather(*(half.close() for half in halves))  # as the proxy does where it is shutting down too
        for role in HALVES.values():
            await trace.until(role, "half.sent", "half.closed")
        await asyncio.sleep(0.1)
        assert len(halves) == 2 and len(trace.events) == 4

    halves: list[Half] = []
    make = watched(trace.folder)

    def make_half(*args: Any) -> Half:
        halves.append(make(*args))
        return halves[-1]

    serves(make_half=make_half)(test)()


# Held ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", HALVES)
def test_a_half_is_held_before_it_leaves_and_the_other_is_not(point: str, trace: Watched) -> None:
    async def test(bench: Bench) -> None:
        held, other = (bench.p, bench.d) if point == "before_prefill_send" else (bench.d, bench.p)
        role, holder = HALVES[point], trace.hold(point, "pdlab-*")
        bench.d.plays(ends, json.dumps(ANSWER).encode())
        waiting = asyncio.create_task(bench.post(headers={"X-Request-Id": "pdlab-abc"}))
        await other.arrived.wait()
        await trace.until(role, "gate.held")
        await asyncio.sleep(0.1)
        assert held.calls == [] and trace.names(role) == ["gate.held"]
        assert not waiting.done()
        assert trace.facts(role, "gate.held") == {"role": role, "point": point, "hold": holder.hold.path.stem}
        holder.release()
        await held.arrived.wait()
        ends.set()
        assert (await waiting).json() == ANSWER
        await until(lambda: "half.answered" in trace.names(role))
        assert trace.names(role)[:4] == ["gate.held", "gate.released", "half.sent", "half.answered"]
        released = trace.facts(role, "gate.released")
        assert (released["point"], released["hold"]) == (point, holder.hold.path.stem)
        assert released["why"] == "released" and 0.1 < released["seconds"] < 10

    ends = asyncio.Event()
    trace(test)


def test_others_are_not_held(trace: Watched) -> None:
    async def test(bench: Bench) -> None:
        holders = [trace.hold(point, "pdlab-abc") for point in HALVES] + [trace.hold("before_write")]
        for request_id in ("pdlab-ab", "pdlab-abc-0", "another"):
            assert (await bench.post(headers={"X-Request-Id": request_id})).json() == ANSWER
        await until(lambda: len(trace.of("decode")) == 9)
        assert not any(event.name.startswith("gate.") for event in trace.events)
        for holder in holders:
            holder.release()

    trace(test)


def test_a_half_is_held_by_its_transfer_id_too(trace: Watched) -> None:
    async def test(bench: Bench) -> None:
        holder = trace.hold("before_decode_send", "xfer-*")
        waiting = asyncio.create_task(bench.post())
        await trace.until("decode", "gate.held")
        holder.release()
        assert (await waiting).json() == ANSWER

    trace(test)


@pytest.mark.parametrize("point", HALVES)
def test_a_client_that_leaves_while_a_half_is_held_ends_both(point: str, trace: Watched) -> None:
    async def test(bench: Bench) -> None:
        held, other = (bench.p, bench.d) if point == "before_prefill_send" else (bench.d, bench.p)
        holder, role = trace.hold(point), HALVES[point]
        other.plays(asyncio.Event(), type=SSE)
        waiting = asyncio.create_task(bench.post(stream=True))
        await other.arrived.wait()
        await trace.until(role, "gate.held")
        waiting.cancel()
        await other.left.wait()
        await trace.until(role, "gate.held", "gate.released", "half.closed")
        assert trace.facts(role, "gate.released")["why"] == "given up"
        assert trace.facts(role, "half.closed")["unanswered"] is True
        holder.release()
        await asyncio.sleep(0.1)
        assert held.calls == []

    trace(test)


def test_a_half_that_fails_ends_the_held_one(trace: Watched) -> None:
    async def test(bench: Bench) -> None:
        holder = trace.hold("before_decode_send")
        bench.p.fails(400, "the prompt is too long")
        assert (await bench.post()).status_code == 400
        await trace.until("decode", "gate.held", "gate.released", "half.closed")
        assert bench.d.calls == []
        holder.release()

    trace(test)


def test_a_hold_ends_by_itself(trace: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(bench: Bench) -> None:
        holder = trace.hold("before_prefill_send")
        waiting = asyncio.create_task(bench.post())
        await trace.until("prefill", "gate.held")
        minute_later(monkeypatch)
        assert (await waiting).json() == ANSWER
        await until(lambda: "half.sent" in trace.names("prefill"))
        assert trace.facts("prefill", "gate.released")["why"] == "its time was up"
        holder.release()

    trace(test)


def test_of_two_holds_the_last_one_lets_go(trace: Watched) -> None:
    async def test(bench: Bench) -> None:
        holders = {each.hold.path.stem: each for each in (trace.hold("before_decode_send") for _ in range(2))}
        waiting = asyncio.create_task(bench.post())
        await trace.until("decode", "gate.held")
        holders.pop(trace.facts("decode", "gate.held")["hold"]).release()
        await trace.until("decode", "gate.held", "gate.released", "gate.held")
        assert bench.d.calls == []
        holders.popitem()[1].release()
        assert (await waiting).json() == ANSWER

    trace(test)


def test_broken_files_in_the_folder_of_holds_stop_nobody(trace: Watched) -> None:
    async def test(bench: Bench) -> None:
        gates = trace.folder / "gates"
        gates.mkdir()
        for number, line in enumerate([b"", b"{", b'{"match": 5, "deadline": "x"}', b"[" * 100_000, b"\xff"]):
            for point in HALVES:
                (gates / f"{point}.{number}.json").write_bytes(line)
        assert (await bench.post()).json() == ANSWER

    trace(test)


# Only where it is asked for ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("traced", [None, ""])
def test_without_the_variable_the_halves_are_plain(traced: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    made = served(traced, monkeypatch)
    assert made is Half


def test_with_it_they_are_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = served(str(tmp_path / "trace"), monkeypatch)
    assert made.func is WatchedHalf
    writer, gates = made.args
    assert isinstance(writer, Writer) and writer.folder == tmp_path / "trace"
    assert gates == tmp_path / "trace" / "gates"
    writer.close()
    assert [path.name for path in (tmp_path / "trace").iterdir()] == [f"proxy.{os.getpid()}.jsonl"]


def served(traced: str | None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What makes the halves of the proxy that the command serves."""
    if traced is None:
        monkeypatch.delenv("PDLAB_TRACE", raising=False)
    else:
        monkeypatch.setenv("PDLAB_TRACE", traced)
    apps: list[Any] = []
    monkeypatch.setattr(proxy.uvicorn.Server, "run", lambda server: apps.append(server.config.app))
    monkeypatch.setattr(proxy.logging, "basicConfig", lambda **_: None)
    proxy.main(["--prefill", "http://127.0.0.1:1=http://127.0.0.1:2", "--decode", "http://127.0.0.1:3"])
    (route,) = [route for route in apps[0].routes if route.path == "/v1/completions"]
    return route.endpoint.__self__.make_half


def test_the_command_notes_until_it_ends(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        ports = Ports("127.0.0.1")
        port = ports.take("the proxy")
        url = f"http://127.0.0.1:{port}"
        pair = f"{bench.servers[bench.p].url}={bench.servers[bench.bootstraps[0]].url}"
        command = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pdlab.lab.proxy", "--port", str(port)),
            *("--prefill", pair, "--decode", bench.servers[bench.d].url),
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PDLAB_TRACE": str(tmp_path)},
        )
        try:
            while not await answers(bench.client, url):
                await asyncio.sleep(0.05)
            assert (await bench.client.post(f"{url}/v1/completions", json={"prompt": SECRET})).json() == ANSWER
        finally:
            ports.close()
            command.send_signal(signal.SIGTERM)
            _, log = await command.communicate()
        assert b"Traceback" not in log, log
        text = (tmp_path / f"proxy.{command.pid}.jsonl").read_text()
        names = sorted(json.loads(line)[1] for line in text.splitlines()[1:])
        assert names == ["half.answered", "half.answered", "half.closed", "half.sent", "half.sent"]
        assert SECRET not in text

    serves()(test)()
