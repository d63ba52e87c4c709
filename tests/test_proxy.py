"""The double-send proxy, against tiny servers that answer as vLLM instances and bootstrap servers do."""

import asyncio
import functools
import json
import os
import signal
import socket
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pdlab.lab import proxy_prefill
from pdlab.lab.bodies import NOT_FOR_PREFILL, refusal
from pdlab.lab.ports import Ports
from pdlab.lab.proxy import create_app, main

ANSWER = {
    "id": "cmpl-1",
    "object": "text_completion",
    "choices": [{"index": 0, "text": " Paris", "finish_reason": "length"}],
}
CHUNK = b'data: {"id": "cmpl-1", "object": "text_completion", "choices": [{"index": 0, "text": " Paris"}]}\n\n'
DONE = b"data: [DONE]\n\n"
METRICS = """# HELP vllm:num_requests_kv_fetch_by_stage Number of requests
vllm:num_requests_kv_fetch_by_stage{{engine="0",stage="waiting_to_start"}} 0.0
vllm:num_requests_kv_fetch_by_stage{{engine="0",stage="in_progress"}} {}.0
vllm:num_requests_kv_fetch_by_stage{{engine="0",stage="completed_waiting"}} 1.0
vllm:num_requests_running{{engine="0"}} 1.0
"""
SSE = "text/event-stream; charset=utf-8"


def error(code: int, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "BadRequestError", "param": None, "code": code}}


class Instance:
    """A prefill or decode instance. It answers ANSWER, or `script`: the status, the type, then chunks and events to
    wait for, an event that is never set being an instance that is still computing."""

    def __init__(self) -> None:
        self.status, self.type, self.script = 200, "application/json", [json.dumps(ANSWER).encode()]
        self.calls: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.paths: list[str] = []
        self.arrived, self.opened, self.left, self.played = (asyncio.Event() for _ in range(4))
        self.health, self.fetching = 200, 0
        routes = [Route(f"/v1/{path}", self.generate, methods=["POST"]) for path in ("completions", "chat/completions")]
        routes += [Route("/v1/models", lambda _: JSONResponse({"object": "list", "data": [{"id": "tiny"}]}))]
        routes += [Route("/health", lambda _: Response(status_code=self.health))]
        routes += [Route("/metrics", lambda _: Response(METRICS.format(self.fetching)))]
        self.app = Starlette(routes=routes)

    def plays(self, *script: bytes | asyncio.Event, type: str = "application/json", status: int = 200) -> None:
        self.script, self.type, self.status = list(script), type, status

    def fails(self, status: int, message: str) -> None:
        self.plays(json.dumps(error(status, message)).encode(), status=status)

    async def generate(self, request: Request) -> Response:
        self.calls.append((dict(request.headers), json.loads(await request.body())))
        self.paths.append(request.url.path)
        self.arrived.set()
        return Played(self)

    @property
    def body(self) -> dict[str, Any]:
        return self.calls[-1][1]

    @property
    def headers(self) -> dict[str, str]:
        return self.calls[-1][0]


class Played(Response):
    """The script as an answer; headers go out before the first wait, as those of an event stream do."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def play() -> None:
            start = {"type": "http.response.start", "status": self.instance.status}
            await send({**start, "headers": [(b"content-type", self.instance.type.encode())]})
            self.instance.opened.set()
            for part in self.instance.script:
                if isinstance(part, asyncio.Event):
                    await part.wait()
                else:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        async def leave() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        playing, leaving = asyncio.create_task(play()), asyncio.create_task(leave())
        done, _ = await asyncio.wait({playing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if playing in done:
            leaving.cancel()
            await playing
            self.instance.played.set()
        else:
            playing.cancel()
            self.instance.left.set()


class Bootstrap:
    def __init__(self, *engine_ids: str) -> None:
        self.engine_ids, self.queries, self.status = list(engine_ids), 0, 200
        self.app = Starlette(routes=[Route("/query", self.query)])

    def query(self, _request: Request) -> Response:
        self.queries += 1
        worker = {"0": {"0": "tcp://127.0.0.1:40001"}}
        ids = {str(i): {"engine_id": e, "worker_addr": worker} for i, e in enumerate(self.engine_ids)}
        return JSONResponse(ids, self.status)


class Server(uvicorn.Server):
    """uvicorn inside the test's own loop: no signal handlers, a free port, and no ticking when it starts and stops."""

    def __init__(self, app: Any) -> None:
        super().__init__(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=0))
        self.sock = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.sock.getsockname()[1]}"

    async def start(self) -> None:
        self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        await self.startup([self.sock])

    async def stop(self) -> None:
        if self.sock.fileno() != -1:
            await self.shutdown([self.sock])


class Bench:
    """P instances with their bootstraps, D instances, the proxy, and a client."""

    prefills: list[Instance]
    decodes: list[Instance]
    bootstraps: list[Bootstrap]
    servers: dict[Any, Server]
    client: httpx.AsyncClient
    url: str

    @property
    def p(self) -> Instance:
        return self.prefills[0]

    @property
    def d(self) -> Instance:
        return self.decodes[0]

    async def post(self, path: str = "/v1/completions", headers: Any = None, **body: Any) -> httpx.Response:
        return await self.client.post(path, json={"model": "tiny", "prompt": "The capital", **body}, headers=headers)

    @asynccontextmanager
    async def open(self, **body: Any) -> AsyncIterator[httpx.Response]:
        async with self.client.stream(
            "POST", "/v1/completions", json={"prompt": "x", "stream": True, **body}
        ) as answer:
            yield answer


def serves(
    prefills: int = 1, decodes: int = 1, ranks: int = 1, live_s: float = 1, make_half: Any = None
) -> Callable[..., Callable[[], None]]:
    """Runs an async test on a bench of its own, within 20 s."""

    def around(test: Callable[[Bench], Coroutine[Any, Any, None]]) -> Callable[[], None]:
        async def whole() -> None:
            bench = Bench()
            bench.prefills = [Instance() for _ in range(prefills)]
            bench.decodes = [Instance() for _ in range(decodes)]
            bench.bootstraps = [Bootstrap(*(f"engine-{i}_dp{rank}" for rank in range(ranks))) for i in range(prefills)]
            parts = [*bench.prefills, *bench.decodes, *bench.bootstraps]
            bench.servers = {part: Server(part.app) for part in parts}
            urls = [bench.servers[part].url for part in parts]
            pairs = list(zip(urls[:prefills], urls[prefills + decodes :], strict=True))
            d_urls = urls[prefills : prefills + decodes]
            proxy = Server(create_app(pairs, d_urls, engine_ids_live_s=live_s, make_half=make_half))
            bench.url = proxy.url
            await asyncio.gather(proxy.start(), *(server.start() for server in bench.servers.values()))
            try:
                async with httpx.AsyncClient(base_url=proxy.url, trust_env=False, timeout=None) as bench.client:
                    await test(bench)
            finally:
                await asyncio.gather(proxy.stop(), *(server.stop() for server in bench.servers.values()))

        @functools.wraps(test)
        def run() -> None:
            asyncio.run(asyncio.wait_for(whole(), 20))

        del run.__wrapped__  # pytest would take the bench for a fixture
        return run

    return around


# What is sent ---------------------------------------------------------------------------------------------------------


@serves()
async def test_each_half_says_its_own(bench: Bench) -> None:
    body = {
        "model": "tiny",
        "prompt": "The capital",
        "max_tokens": 20,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "stop": ["\n"],
        "min_tokens": 5,
        "logprobs": 3,
        "truncate_prompt_tokens": 100,
    }
    answer = await bench.client.post("/v1/completions", json=body)
    transfer_id = answer.headers["X-Transfer-Id"]
    assert transfer_id.startswith("xfer-") and uuid.UUID(transfer_id.removeprefix("xfer-")).version == 4
    assert bench.p.body == {
        "model": "tiny",
        "prompt": "The capital",
        "max_tokens": 1,
        "stream": False,
        "temperature": 0.0,
        "truncate_prompt_tokens": 100,
        "ignore_eos": True,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id},
    }
    assert bench.d.body == {
        **body,
        "kv_transfer_params": {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_engine_id": "engine-0_dp0",
            "remote_bootstrap_addr": bench.servers[bench.bootstraps[0]].url,
            "transfer_id": transfer_id,
        },
    }


@serves()
async def test_a_chat_keeps_what_shapes_the_prompt(bench: Bench) -> None:
    shape = {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "auto",
        "chat_template_kwargs": {"enable_thinking": False},
        "response_format": {"type": "json_object"},
        "continue_final_message": True,
        "cache_salt": "salt",
        "a_field_of_tomorrow": 1,
    }
    rest = {"max_completion_tokens": 9, "logprobs": True, "top_logprobs": 2, "structured_outputs": {"regex": "a"}}
    await bench.client.post("/v1/chat/completions", json=shape | rest)
    assert bench.p.paths == bench.d.paths == ["/v1/chat/completions"]
    sent = dict(bench.p.body)
    assert sent.pop("kv_transfer_params")["do_remote_decode"] is True
    assert sent == shape | {"max_tokens": 1, "max_completion_tokens": 1, "stream": False, "ignore_eos": True}
    assert {field: bench.d.body[field] for field in rest} == rest


@serves()
async def test_nothing_that_could_spoil_the_one_token_reaches_prefill(bench: Bench) -> None:
    harmless = {"n": 1, "best_of": 1, "use_beam_search": False, "echo": False, "prompt_logprobs": None}
    await bench.post(**(dict.fromkeys(NOT_FOR_PREFILL, 1) | harmless))
    assert bench.p.calls and not NOT_FOR_PREFILL & bench.p.body.keys()
    assert bench.d.body.keys() >= NOT_FOR_PREFILL


@serves()
async def test_what_the_client_says_of_the_transfer_is_dropped(bench: Bench) -> None:
    theirs = {"transfer_id": "mine", "do_remote_prefill": True, "remote_host": "elsewhere"}
    answer = await bench.post(kv_transfer_params=theirs, headers={"X-data-parallel-rank": "7"})
    for half in (bench.p, bench.d):
        assert half.body["kv_transfer_params"]["transfer_id"] == answer.headers["X-Transfer-Id"]
        assert "remote_host" not in half.body["kv_transfer_params"]
        assert "x-data-parallel-rank" not in half.headers
    assert bench.p.body["kv_transfer_params"]["do_remote_prefill"] is False


@serves()
async def test_ids(bench: Bench) -> None:
    first = await bench.post(headers={"X-Request-Id": "mine", "Authorization": "Bearer sesame"})
    assert first.headers["X-Request-Id"] == "mine"
    for half in (bench.p, bench.d):
        assert (half.headers["x-request-id"], half.headers["authorization"]) == ("mine", "Bearer sesame")
    second, third = await bench.post(), await bench.post()
    assert bench.p.headers["x-request-id"] == bench.d.headers["x-request-id"] == third.headers["X-Request-Id"]
    assert len({first.headers["X-Transfer-Id"], second.headers["X-Transfer-Id"], third.headers["X-Transfer-Id"]}) == 3
    assert len({"mine", second.headers["X-Request-Id"], third.headers["X-Request-Id"]}) == 3
    strange = await bench.post(headers={b"X-Request-Id": b"caf\xe9"})
    assert strange.status_code == 200 and dict(strange.headers.raw)[b"x-request-id"] == b"caf\xe9"


@serves()
async def test_values_that_json_lets_pass_arrive_as_they_are(bench: Bench) -> None:
    raw = rb'{"prompt": "\ud800 \u00e9", "temperature": 1e999}'
    assert (await bench.client.post("/v1/completions", content=raw)).status_code == 200
    assert bench.p.body["prompt"] == bench.d.body["prompt"] == "\ud800 é"
    assert bench.d.body["temperature"] == float("inf")


# Who gets it ----------------------------------------------------------------------------------------------------------


@serves(prefills=2, decodes=3, ranks=2)
async def test_round_robin_over_prefills_their_ranks_and_decodes(bench: Bench) -> None:
    for _ in range(12):
        await bench.post()
    assert [len(p.calls) for p in bench.prefills] == [6, 6]
    assert [len(d.calls) for d in bench.decodes] == [4, 4, 4]
    engine_of = {
        body["kv_transfer_params"]["transfer_id"]: body["kv_transfer_params"]["remote_engine_id"]
        for d in bench.decodes
        for _, body in d.calls
    }
    for i, p in enumerate(bench.prefills):
        ranks = [headers["x-data-parallel-rank"] for headers, _ in p.calls]
        assert ranks == ["0", "1"] * 3
        for rank, (_, body) in zip(ranks, p.calls, strict=True):
            assert engine_of[body["kv_transfer_params"]["transfer_id"]] == f"engine-{i}_dp{rank}"
    assert not any("x-data-parallel-rank" in headers for d in bench.decodes for headers, _ in d.calls)


@serves(live_s=3600)
async def test_engine_ids_are_not_asked_for_each_request(bench: Bench) -> None:
    await asyncio.gather(*(bench.post() for _ in range(5)))
    assert bench.bootstraps[0].queries == 1
    assert "x-data-parallel-rank" not in bench.p.headers  # one rank only


@serves(live_s=0)
async def test_a_prefill_that_came_back_is_found_again(bench: Bench) -> None:
    await bench.post()
    assert bench.d.body["kv_transfer_params"]["remote_engine_id"] == "engine-0_dp0"
    bench.bootstraps[0].engine_ids = ["born-again"]
    await bench.post()
    assert bench.d.body["kv_transfer_params"]["remote_engine_id"] == "born-again"


@serves(live_s=0)
async def test_a_bootstrap_that_does_not_help_is_named(bench: Bench) -> None:
    bench.bootstraps[0].engine_ids = []
    answer = await bench.post()
    assert answer.status_code == 503 and "no engine has registered" in answer.json()["error"]["message"]
    server = bench.servers[bench.bootstraps[0]]
    await server.stop()
    answer = await bench.post()
    assert answer.status_code == 503
    assert f"bootstrap {server.url}" in answer.json()["error"]["message"]
    assert "connection refused" in answer.json()["error"]["message"]
    assert not bench.p.calls and not bench.d.calls


# What comes back ------------------------------------------------------------------------------------------------------


@serves()
async def test_the_answer_is_the_decode_instances(bench: Bench) -> None:
    bench.p.plays(b'{"p": "nobody reads this"}')
    answer = await bench.post()
    assert (answer.status_code, answer.headers["content-type"], answer.json()) == (200, "application/json", ANSWER)
    bench.d.plays(CHUNK, DONE, type=SSE)
    answer = await bench.post(stream=True)
    assert (answer.headers["content-type"], answer.content) == (SSE, CHUNK + DONE)


@serves()
async def test_the_first_chunk_comes_while_the_rest_is_computed(bench: Bench) -> None:
    computed = asyncio.Event()
    bench.d.plays(CHUNK, computed, DONE, type=SSE)
    async with bench.open() as answer:
        chunks = answer.aiter_raw()
        assert await anext(chunks) == CHUNK
        assert not computed.is_set()
        computed.set()
        assert [chunk async for chunk in chunks] == [DONE]


@serves()
async def test_both_halves_leave_before_either_answers(bench: Bench) -> None:
    p_goes, d_goes = asyncio.Event(), asyncio.Event()
    bench.p.plays(p_goes, b"{}")
    bench.d.plays(d_goes, b"{}")
    waiting = asyncio.create_task(bench.post())
    await asyncio.gather(bench.p.arrived.wait(), bench.d.arrived.wait())
    p_goes.set(), d_goes.set()
    assert (await waiting).status_code == 200


@serves()
async def test_a_slow_prefill_answer_does_not_hold_the_stream(bench: Bench) -> None:
    p_goes = asyncio.Event()
    bench.p.plays(p_goes, b"{}")
    bench.d.plays(CHUNK, DONE, type=SSE)
    answer = await bench.post(stream=True)
    assert answer.content == CHUNK + DONE
    await bench.client.get("/health")  # gives a proxy that would now close P's half the time to do so
    p_goes.set()
    await bench.p.played.wait()
    assert not bench.p.left.is_set()


@serves()
async def test_openai_client(bench: Bench) -> None:
    client = openai.AsyncOpenAI(base_url=f"{bench.url}/v1", api_key="sesame", max_retries=0)
    assert [model.id async for model in await client.models.list()] == ["tiny"]
    assert (await client.completions.create(model="tiny", prompt="x")).choices[0].text == " Paris"
    bench.d.plays(CHUNK, DONE, type=SSE)
    stream = await client.completions.create(model="tiny", prompt="x", stream=True)
    assert [chunk.choices[0].text async for chunk in stream] == [" Paris"]
    with pytest.raises(openai.BadRequestError, match="more than one answer"):
        await client.completions.create(model="tiny", prompt="x", n=2)
    await client.close()


# What goes wrong ------------------------------------------------------------------------------------------------------


@serves()
async def test_an_error_of_prefill_reaches_the_client_and_ends_decode(bench: Bench) -> None:
    p_fails = asyncio.Event()
    bench.p.plays(p_fails, json.dumps(error(400, "the prompt is too long")).encode(), status=400)
    bench.d.plays(asyncio.Event(), type=SSE)  # an early 200, then nothing: it waits for KV
    waiting = asyncio.create_task(bench.post(stream=True))
    await bench.d.opened.wait()
    await bench.client.get("/health")  # gives a proxy that would believe that 200 the time to pass it on
    p_fails.set()
    answer = await waiting
    assert (answer.status_code, answer.json()) == (400, error(400, "the prompt is too long"))
    assert answer.headers["X-Failed-Hop"] == f"prefill instance {bench.servers[bench.p].url}"
    assert answer.headers["X-Transfer-Id"]
    await bench.d.left.wait()
    assert len(bench.p.calls) == len(bench.d.calls) == 1  # and nothing was tried again


@serves()
async def test_an_error_of_decode_reaches_the_client_and_ends_prefill(bench: Bench) -> None:
    bench.p.plays(asyncio.Event())
    bench.d.fails(500, "Internal server error")
    answer = await bench.post()
    assert (answer.status_code, answer.json()) == (500, error(500, "Internal server error"))
    assert answer.headers["X-Failed-Hop"] == f"decode instance {bench.servers[bench.d].url}"
    await bench.p.left.wait()
    assert len(bench.p.calls) == len(bench.d.calls) == 1


@serves()
async def test_an_event_stream_that_starts_with_an_error_is_an_error(bench: Bench) -> None:
    bench.d.plays(b"data: " + json.dumps(error(500, "Internal server error")).encode() + b"\n\n", DONE, type=SSE)
    answer = await bench.post(stream=True)
    assert (answer.status_code, answer.json()) == (500, error(500, "Internal server error"))
    for no_error in (b'data: {"error": null}\n\n', b'data: {"error', b'data: {"error": {"code": 7}}\n\n'):
        bench.d.plays(no_error, DONE, type=SSE)
        answer = await bench.post(stream=True)
        assert (answer.status_code, answer.content) == (200, no_error + DONE)


@pytest.mark.parametrize("which", ["prefill", "decode"])
def test_an_instance_that_is_gone_is_named(which: str) -> None:
    @serves()
    async def run(bench: Bench) -> None:
        gone, other = (bench.p, bench.d) if which == "prefill" else (bench.d, bench.p)
        await bench.servers[gone].stop()
        other.plays(asyncio.Event())
        answer = await bench.post()
        assert answer.status_code == 502
        message = answer.json()["error"]["message"]
        assert message == f"{which} instance {bench.servers[gone].url}: connection refused"
        if other.calls:  # it may have been closed before it was sent
            await other.left.wait()

    run()


# P that dies when its half is done: D does not see it ---------------------------------------------------------------


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two looks at a P in a fifth of a second."""
    monkeypatch.setattr(proxy_prefill, "LOOK", 0.1)


@pytest.mark.usefixtures("looks")
@pytest.mark.parametrize("how", ["it ended", "it came back"])
def test_a_prefill_that_is_lost_while_decode_waits_for_its_kv(how: str) -> None:
    @serves()
    async def run(bench: Bench) -> None:
        bench.d.plays(asyncio.Event())
        bench.d.fetching = 1
        asking = asyncio.create_task(bench.post())
        await bench.p.played.wait()
        if how == "it ended":
            await bench.servers[bench.bootstraps[0]].stop()
        else:
            bench.bootstraps[0].engine_ids = ["another"]
        answer = await asking
        hop = f"prefill instance {bench.servers[bench.p].url}"
        assert (answer.status_code, answer.headers["X-Failed-Hop"]) == (502, hop)
        assert "before D had its KV" in answer.json()["error"]["message"]
        await bench.d.left.wait()

    run()


@pytest.mark.usefixtures("looks")
def test_the_last_that_left_are_those_that_wait() -> None:
    """An earlier one, of which nothing is seen since it is not streamed, has its KV and goes on."""

    @serves()
    async def run(bench: Bench) -> None:
        done = asyncio.Event()
        bench.d.plays(done, json.dumps(ANSWER).encode())
        earlier = asyncio.create_task(bench.post())
        await bench.p.played.wait()
        await asyncio.sleep(0.01)
        bench.p.played.clear()
        later = asyncio.create_task(bench.post())
        await bench.p.played.wait()
        bench.d.fetching = 1
        await bench.servers[bench.bootstraps[0]].stop()
        assert (await later).status_code == 502
        bench.d.fetching = 0
        await asyncio.sleep(0.3)  # some looks
        done.set()
        assert (await earlier).json() == ANSWER

    run()


@pytest.mark.usefixtures("looks")
@pytest.mark.parametrize("so", ["D has its KV", "P is busy", "P is there"])
def test_a_prefill_that_is_not_missed(so: str) -> None:
    @serves()
    async def run(bench: Bench) -> None:
        done = asyncio.Event()
        bench.d.plays(done, json.dumps(ANSWER).encode())
        bench.d.fetching = int(so != "D has its KV")
        asking = asyncio.create_task(bench.post())
        await bench.p.played.wait()
        if so == "D has its KV":
            await bench.servers[bench.bootstraps[0]].stop()
        elif so == "P is busy":
            bench.bootstraps[0].status = 500
        await asyncio.sleep(0.5)  # some looks
        done.set()
        assert (await asking).json() == ANSWER

    run()


@serves()
async def test_a_prefill_that_fails_after_the_first_chunk_changes_nothing(bench: Bench) -> None:
    p_fails, d_ends = asyncio.Event(), asyncio.Event()
    bench.p.plays(p_fails, b"{}", status=500)
    bench.d.plays(CHUNK, d_ends, DONE, type=SSE)
    async with bench.open() as answer:
        chunks = answer.aiter_raw()
        assert await anext(chunks) == CHUNK
        p_fails.set()
        await bench.client.get("/health")  # the proxy has gone on since
        d_ends.set()
        assert [chunk async for chunk in chunks] == [DONE]


def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first: bytes, type: str) -> Any:
    async def answer() -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 200 OK\r\ncontent-type: {type}\r\ntransfer-encoding: chunked\r\n\r\n{len(first):x}\r\n"
        writer.write(head.encode() + first + b"\r\n")
        await writer.drain()
        writer.close()

    return answer()


@pytest.mark.parametrize("type", [SSE, "application/json"])
def test_a_decode_that_dies_in_mid_stream_is_no_whole_answer(type: str) -> None:
    @serves()
    async def run(bench: Bench) -> None:
        await bench.servers[bench.d].stop()
        port = int(bench.servers[bench.d].url.rpartition(":")[2])
        async with await asyncio.start_server(lambda r, w: cut(r, w, CHUNK, type), "127.0.0.1", port):
            bench.p.plays(asyncio.Event())
            async with bench.open() as answer:
                if type == SSE:
                    events = (await answer.aread()).decode().split("\n\n")
                    failure = next(json.loads(e.removeprefix("data: ")) for e in events if "error" in e)
                    assert failure["error"]["message"].startswith(f"decode instance {bench.servers[bench.d].url}: ")
                else:
                    with pytest.raises(httpx.RemoteProtocolError):
                        await answer.aread()
            await bench.p.left.wait()

    run()


@serves()
async def test_a_client_that_leaves_before_the_first_chunk_ends_both_halves(bench: Bench) -> None:
    bench.p.plays(asyncio.Event())
    bench.d.plays(asyncio.Event(), type=SSE)
    waiting = asyncio.create_task(bench.post(stream=True))
    await asyncio.gather(bench.p.arrived.wait(), bench.d.arrived.wait())
    waiting.cancel()
    await asyncio.gather(bench.p.left.wait(), bench.d.left.wait())


@serves()
async def test_a_client_that_leaves_in_mid_stream_ends_both_halves(bench: Bench) -> None:
    bench.p.plays(asyncio.Event())
    bench.d.plays(CHUNK, asyncio.Event(), type=SSE)
    async with bench.open() as answer:
        assert await anext(answer.aiter_raw()) == CHUNK
    await asyncio.gather(bench.p.left.wait(), bench.d.left.wait())


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        {"n": 2},
        {"n": "2"},
        {"best_of": 3},
        {"use_beam_search": True},
        {"prompt": ["a", "b"]},
        {"prompt": [[1, 2], [3]]},
        {"prompt": []},
        {"prompt_embeds": "AAAA"},
        {"max_tokens": 0},
        {"messages": [], "max_completion_tokens": 0},
        {"prompt_logprobs": 0},
        {"echo": True, "logprobs": 0},
        {"echo": True, "messages": []},
    ],
    ids=str,
)
def test_refused(body: dict[str, Any]) -> None:
    assert refusal({"prompt": "x", **body})


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x", "n": 1, "best_of": None, "use_beam_search": False, "max_tokens": 1},
        {"prompt": ["x"]},
        {"prompt": [1, 2, 3]},
        {"prompt": [[1, 2, 3]]},
        {"prompt": "x", "echo": True},
        {"prompt": "x", "logprobs": 5},
        {"messages": [], "n": None, "max_tokens": None, "logprobs": True, "top_logprobs": 2},
    ],
    ids=str,
)
def test_not_refused(body: dict[str, Any]) -> None:
    assert refusal(body) is None


@serves()
async def test_a_refusal_comes_before_any_work(bench: Bench) -> None:
    for raw in (b"", b"no JSON", b"[1]", b"\xff", b"[" * 100_000, b'{"prompt": "x", "n": 2}'):
        answer = await bench.client.post("/v1/completions", content=raw)
        shape = answer.json()["error"]
        assert (answer.status_code, shape["code"], shape["type"]) == (400, 400, "BadRequestError")
        assert "\n" not in shape["message"]
    assert not bench.p.calls and not bench.d.calls and not bench.bootstraps[0].queries


# The other routes, and the command ------------------------------------------------------------------------------------


@serves(prefills=2)
async def test_health_names_who_does_not_answer(bench: Bench) -> None:
    answer = await bench.client.get("/health")
    assert (answer.status_code, answer.json()) == (200, {"healthy": True, "failing": []})
    bench.d.health = 503
    gone = bench.servers[bench.bootstraps[1]]
    await gone.stop()
    answer = await bench.client.get("/health")
    assert answer.status_code == 503
    assert answer.json()["failing"] == [
        f"bootstrap {gone.url}: connection refused",
        f"decode instance {bench.servers[bench.d].url}: status 503",
    ]


@serves()
async def test_models_are_the_decode_instances(bench: Bench) -> None:
    assert (await bench.client.get("/v1/models")).json() == {"object": "list", "data": [{"id": "tiny"}]}
    await bench.servers[bench.d].stop()
    answer = await bench.client.get("/v1/models")
    assert answer.status_code == 502 and "connection refused" in answer.json()["error"]["message"]


def test_an_empty_side_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one prefill"):
        create_app([], ["http://127.0.0.1:1"])


def test_a_prefill_without_its_bootstrap_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2"])
    assert exit_.value.code == 2
    assert "is not URL=BOOTSTRAP_URL" in capsys.readouterr().err


@serves()
async def test_the_command_serves_on_a_port_that_is_held_for_it(bench: Bench) -> None:
    pair = f"{bench.servers[bench.p].url}/={bench.servers[bench.bootstraps[0]].url}/"
    ports = Ports("127.0.0.1")
    port = ports.take("the proxy")
    url = f"http://127.0.0.1:{port}"
    proxy = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pdlab.lab.proxy", "--port", str(port)),
        *("--prefill", pair, "--decode", bench.servers[bench.d].url),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "http_proxy": "http://127.0.0.1:1"},
    )
    while not await answers(bench.client, url):
        await asyncio.sleep(0.05)
    ports.close()
    try:
        answer = await bench.client.post(f"{url}/v1/completions", json={"prompt": "x"})
        assert answer.json() == ANSWER
        assert bench.d.body["kv_transfer_params"]["remote_bootstrap_addr"] == bench.servers[bench.bootstraps[0]].url
        bench.d.plays(asyncio.Event())
        bench.p.plays(asyncio.Event())
        held = asyncio.create_task(bench.client.post(f"{url}/v1/completions", json={"prompt": "x"}))
        await until(lambda: len(bench.p.calls) == len(bench.d.calls) == 2)
    finally:
        proxy.send_signal(signal.SIGTERM)
        _, log = await proxy.communicate()
    answer = await held
    assert answer.status_code == 503 and answer.json()["error"]["message"] == "proxy: shutting down"
    await asyncio.gather(bench.p.left.wait(), bench.d.left.wait())
    assert b"Traceback" not in log and b"POST" not in log, log


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def answers(client: httpx.AsyncClient, url: str) -> bool:
    try:
        await client.get(f"{url}/health")
    except httpx.ConnectError:
        return False
    return True
