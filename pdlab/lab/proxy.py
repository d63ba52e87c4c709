"""The double-send proxy: one request in, two requests out, one answer back.

    client ──▶ proxy ──┬──▶ prefill instance (P): computes the prompt's KV and one token that nobody reads
                       │         ║ KV, from P to D, not through the proxy
                       └──▶ decode instance (D): waits for that KV, then generates ──▶ proxy ──▶ client

Both halves leave at once and carry the same transfer_id, which is all that P and D know of each other's request. The
proxy does not wait for P: D knows when its KV is there. What is left to the proxy is what no engine can do: tell D
which P to pull from, refuse what P/D cannot serve, and end one half when the other fails or the client leaves.

    python -m pdlab.lab.proxy --port 8000 --prefill URL=BOOTSTRAP_URL [--prefill ...] --decode URL [--decode ...]
"""

import argparse
import asyncio
import itertools
import json
import logging
import os
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pdlab.lab.bodies import Body, decode_body, prefill_body, refusal
from pdlab.lab.failure import Failure, reason

log = logging.getLogger("pdlab.proxy")
LOOK = 0.8  # seconds between two looks whether P is still there, while D has said nothing
FETCHING = re.compile(r"^vllm:num_requests_kv_fetch_by_stage\{.*\} (\S+)$", re.MULTILINE)
QUICK = httpx.Timeout(2.0)  # for /health, /query and /v1/models, which wait behind no request


def create_app(
    prefill: Sequence[tuple[str, str]],
    decode: Sequence[str],
    *,
    engine_ids_live_s: float = 1,
    make_half: "Callable[..., Half] | None" = None,
) -> Starlette:
    """The proxy as an ASGI app: `prefill` holds pairs (instance URL, bootstrap URL). ValueError where one is empty."""
    if not prefill or not decode:
        raise ValueError("the proxy needs at least one prefill and one decode instance")
    proxy = Proxy([Prefill(*urls, engine_ids_live_s) for urls in prefill], [url.rstrip("/") for url in decode])
    proxy.make_half = make_half or Half
    return proxy.app


class Proxy:
    def __init__(self, prefills: list["Prefill"], decodes: list[str]) -> None:
        self.prefills, self.decodes = prefills, decodes
        self.prefill_turn, self.decode_turn = itertools.cycle(prefills), itertools.cycle(decodes)
        self.starting: set[Half] = set()
        self.make_half: Callable[..., Half] = Half
        generations = ("/v1/completions", "/v1/chat/completions")
        routes = [Route(path, self.double_send, methods=["POST"]) for path in generations]
        routes += [Route("/v1/models", self.models), Route("/health", self.health)]
        self.app = Starlette(routes=routes, lifespan=self.lifespan)

    @asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        # No read timeout: a generation may take any time to start. vLLM closes a connection that was idle for 5 s;
        # ours expire earlier, or a request could be sent into one that is just being closed.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2)
        timeout = httpx.Timeout(None, connect=5)
        async with httpx.AsyncClient(trust_env=False, timeout=timeout, limits=limits) as self.client:
            yield
            await asyncio.gather(*(half.close() for half in self.starting))

    async def double_send(self, request: Request) -> Response:
        request_id, transfer_id = request.headers.get("X-Request-Id") or str(uuid.uuid4()), f"xfer-{uuid.uuid4()}"
        ids = {"X-Request-Id": request_id, "X-Transfer-Id": transfer_id}
        headers = {"X-Request-Id": request_id, "Content-Type": "application/json"} | authorization(request)
        try:
            body = read_body(await request.body())
            if body.pop("kv_transfer_params", None) is not None:
                log.warning("%s: dropped the client's own kv_transfer_params", request_id)
            p, d = next(self.prefill_turn), next(self.decode_turn)
            dp_rank, engine_id = await p.next_engine(self.client)
            for_rank = {} if dp_rank is None else {"X-data-parallel-rank": str(dp_rank)}

            prefill = self.send("prefill", p.url, request, headers | for_rank, prefill_body(body, transfer_id))
            decode = self.send("decode", d, request, headers, decode_body(body, transfer_id, engine_id, p.bootstrap))
            try:
                await first_chunk(
                    prefill, decode, p.lost(self.client, engine_id, d, lambda: self.after(decode)), request
                )
            except BaseException:
                await asyncio.gather(prefill.close(), decode.close())
                raise
        except Failure as failure:
            return failure.response(ids)
        except asyncio.CancelledError:  # by uvicorn, when it has waited long enough for open requests
            return Failure.at("proxy", 503, "shutting down").response(ids)
        return Relay(prefill, decode, ids)

    def send(self, role: str, url: str, request: Request, headers: Mapping[str, str], body: Body) -> "Half":
        """Send one half. Both halves of every request leave here."""
        half = self.make_half(f"{role} instance {url}", self.client, url + request.url.path, headers, body)
        self.starting.add(half)
        half.started.add_done_callback(lambda _: self.starting.discard(half))
        return half

    def after(self, decode: "Half") -> int:
        """How many halves left for the same D after this one, and are not answered yet."""
        return sum(half.hop == decode.hop and half.left > decode.left for half in self.starting)

    async def models(self, request: Request) -> Response:
        url = self.decodes[0]
        try:
            answer = await self.client.get(f"{url}/v1/models", headers=latin(authorization(request)), timeout=QUICK)
        except httpx.RequestError as error:
            return Failure.at(f"decode instance {url}", 502, reason(error)).response({})
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))

    async def health(self, _request: Request) -> Response:
        hops = [(f"prefill instance {p.url}", f"{p.url}/health") for p in self.prefills]
        hops += [(f"bootstrap {p.bootstrap}", f"{p.bootstrap}/query") for p in self.prefills]
        hops += [(f"decode instance {url}", f"{url}/health") for url in self.decodes]

        async def trouble(hop: str, url: str) -> str:
            try:
                answer = await self.client.get(url, timeout=QUICK)
            except httpx.RequestError as error:
                return f"{hop}: {reason(error)}"
            return "" if answer.is_success else f"{hop}: status {answer.status_code}"

        failing = [line for line in await asyncio.gather(*(trouble(*hop) for hop in hops)) if line]
        return JSONResponse({"healthy": not failing, "failing": failing}, 503 if failing else 200)


def read_body(raw: bytes) -> Body:
    """The client's JSON object. Raises Failure (400) for what P/D cannot serve, before P has worked for it."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise Failure.at("request", 400, "the body is not a JSON object")
    if why := refusal(body):
        raise Failure.at("request", 400, f"not served by prefill/decode: {why}")
    return body


# The two halves on their way ------------------------------------------------------------------------------------------


class Half:
    """One of the two HTTP calls that a request becomes: sent when made, `started` when its first chunk is here."""

    answer: httpx.Response | None = None
    first: bytes
    rest: AsyncIterator[bytes]

    def __init__(self, hop: str, client: httpx.AsyncClient, url: str, headers: Mapping[str, str], body: Body) -> None:
        self.hop, self.client, self.id, self.left = hop, client, headers["X-Request-Id"], time.monotonic()
        # Not httpx's json=, which refuses some of what json.loads has let pass (NaN, lone surrogates).
        self.request = client.build_request("POST", url, headers=latin(headers), content=json.dumps(body))
        self.started = asyncio.create_task(self.start(streamed=body["kv_transfer_params"]["do_remote_prefill"]))
        self.started.add_done_callback(self.report)

    async def start(self, streamed: bool) -> None:
        try:
            self.answer = await self.client.send(self.request, stream=streamed)
            self.rest = self.answer.aiter_bytes()
            self.first = await anext(self.rest, b"")
            if not self.answer.is_success:
                body = self.first + b"".join([chunk async for chunk in self.rest])
                raise Failure(self.hop, self.answer.status_code, body, self.answer.headers.get("content-type"))
        except httpx.RequestError as error:
            raise Failure.at(self.hop, 502, reason(error)) from None
        # vLLM sends the 200 of an event stream before it knows how the request goes. We can still tell the client.
        if self.first.startswith(b'data: {"error"'):
            body = self.first.splitlines()[0].removeprefix(b"data: ")
            with suppress(ValueError, KeyError, TypeError):
                raise Failure(self.hop, HTTPStatus(json.loads(body)["error"]["code"]), body)

    def report(self, started: "asyncio.Task[None]") -> None:
        if not started.cancelled() and (error := started.exception()):
            log.warning("%s: %s", self.id, error)

    async def close(self) -> None:
        """Close the connection, which is how an engine learns that nobody waits any more."""
        self.started.cancel()
        await asyncio.wait([self.started])
        if self.answer:
            await self.answer.aclose()


async def first_chunk(prefill: Half, decode: Half, lost: Coroutine[Any, Any, None], request: Request) -> None:
    """Return when D's first chunk is here. Raises Failure if P or D fails, or the client leaves, before that."""
    left, gone = asyncio.create_task(client_left(request)), asyncio.create_task(lost)
    waiting = {prefill.started, decode.started, left, gone}
    try:
        while not decode.started.done():
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if decode.started in done:  # whatever else there is
                return decode.started.result()
            for task in done:
                task.result()  # raises the Failure of a half; a P that ended well is no longer of interest
            if left in done:
                raise Failure.at("client", 400, "left before the first chunk")
    finally:
        for task in (left, gone):
            task.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody else will ask
            task.cancel()


async def client_left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Relay(StreamingResponse):
    """Hands D's chunks on as they come, and leaves nothing open however that ends."""

    def __init__(self, prefill: Half, decode: Half, ids: Mapping[str, str]) -> None:
        assert decode.answer, "started"
        self.prefill, self.decode, self.whole = prefill, decode, False
        self.type = decode.answer.headers.get("content-type", "application/json")
        super().__init__(self.chunks(), decode.answer.status_code, {**ids, "content-type": self.type})

    async def chunks(self) -> AsyncIterator[bytes]:
        yield self.decode.first
        try:
            async for chunk in self.decode.rest:
                yield chunk
            self.whole = True
        except httpx.RequestError as error:
            failure = Failure.at(self.decode.hop, 502, reason(error))
            log.warning("%s: after the first chunk: %s", self.decode.id, failure)
            if not self.type.startswith("text/event-stream"):
                raise failure from None  # cuts the connection: a part must not look like the whole
            yield b"\n\ndata: " + failure.body + b"\n\n"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)  # returns early when the client leaves
        finally:
            await self.decode.close()
            if not self.whole:
                await self.prefill.close()


# Who computes the prompt ----------------------------------------------------------------------------------------------


class Prefill:
    """A prefill instance and its bootstrap server, which knows the engine id of each of its DP ranks."""

    def __init__(self, url: str, bootstrap: str, engine_ids_live_s: float) -> None:
        self.url, self.bootstrap, self.live_s = url.rstrip("/"), bootstrap.rstrip("/"), engine_ids_live_s
        self.hop = f"bootstrap {self.bootstrap} of prefill instance {self.url}"
        self.engine_ids: dict[int, str] = {}
        self.read_at, self.reading, self.turn = -float("inf"), asyncio.Lock(), itertools.count()

    async def next_engine(self, client: httpx.AsyncClient) -> tuple[int | None, str]:
        """The DP rank whose turn it is (None where there is only one), and its engine id."""
        async with self.reading:
            # An instance that came back has new ids, and D would wait in vain for an engine of the old ones. To come
            # back takes it far longer than ids are believed here.
            if time.monotonic() - self.read_at > self.live_s:
                self.engine_ids, self.read_at = await self.query(client), time.monotonic()
        ranks = sorted(self.engine_ids)
        rank = ranks[next(self.turn) % len(ranks)]
        return rank if len(ranks) > 1 else None, self.engine_ids[rank]

    async def lost(self, client: httpx.AsyncClient, engine_id: str, decode: str, after: Callable[[], int]) -> None:
        """Raises Failure once P, with this engine id, is gone and a request waits for its KV on `decode`.

        D does not see that P has died: it waits for VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT and another 60 s. A D that has
        its KV needs P no more, and of an answer that is not streamed nothing is seen before its end. So D is asked how
        many of its requests wait for KV; KV comes in the order of the requests, or nearly: they are the last that left.

        Args:
            after: how many requests left for `decode` later than this one, and are not answered yet.
        """
        looks = 0
        while looks < 2:  # twice: what D says is as old as its last step
            await asyncio.sleep(LOOK)
            with suppress(httpx.HTTPError, ValueError, AttributeError):  # to be busy is not to be gone
                gone = await self.is_gone(client, engine_id)
                looks = looks + 1 if gone and await waiting_for_kv(client, decode) > after() else 0
        raise Failure.at(f"prefill instance {self.url}", 502, "it ended, or was started again, before D had its KV")

    async def is_gone(self, client: httpx.AsyncClient, engine_id: str) -> bool:
        """Whether nothing listens at its bootstrap server's port any more, or another engine does."""
        try:
            answer = (await client.get(f"{self.bootstrap}/query", timeout=QUICK)).raise_for_status()
        except httpx.NetworkError:
            return True
        return engine_id not in {entry.get("engine_id") for entry in answer.json().values()}

    async def query(self, client: httpx.AsyncClient) -> dict[int, str]:
        try:
            answer = (await client.get(f"{self.bootstrap}/query", timeout=QUICK)).raise_for_status()
            engine_ids = {int(rank): str(entry["engine_id"]) for rank, entry in answer.json().items()}
        except httpx.RequestError as error:
            raise Failure.at(self.hop, 503, reason(error)) from None
        except (httpx.HTTPStatusError, ValueError, AttributeError, KeyError, TypeError):
            raise Failure.at(self.hop, 503, "does not answer as a bootstrap server") from None
        if not engine_ids:
            raise Failure.at(self.hop, 503, "no engine has registered yet")
        return engine_ids


async def waiting_for_kv(client: httpx.AsyncClient, decode: str) -> float:
    """How many requests have, as D's metrics say, their KV on its way or not asked for yet."""
    answer = (await client.get(f"{decode}/metrics", timeout=QUICK)).raise_for_status()
    return sum(map(float, FETCHING.findall(answer.text)))


def authorization(request: Request) -> dict[str, str]:
    return {name: value for name, value in request.headers.items() if name == "authorization"}


def latin(headers: Mapping[str, str]) -> httpx.Headers:
    """Headers on their way on, byte for byte as Starlette has read them."""
    return httpx.Headers(dict(headers), encoding="latin-1")


# The command ----------------------------------------------------------------------------------------------------------


def watched_halves() -> Callable[..., Half] | None:
    """Where PDLAB_TRACE asks for it: halves that note what happens to them, and wait at closed gates."""
    if not os.environ.get("PDLAB_TRACE"):
        return None
    from pdlab.lab.proxy_trace import watched

    return watched(Path(os.environ["PDLAB_TRACE"]))


def url_pair(text: str) -> tuple[str, str]:
    url, _, bootstrap = text.partition("=")
    if not url or not bootstrap:
        raise argparse.ArgumentTypeError(f"{text!r} is not URL=BOOTSTRAP_URL")
    return url, bootstrap


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m pdlab.lab.proxy", description="The double-send proxy.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--prefill", type=url_pair, action="append", required=True, metavar="URL=BOOTSTRAP_URL", help="may be repeated"
    )
    parser.add_argument("--decode", action="append", required=True, metavar="URL", help="may be repeated")
    args = parser.parse_args(argv)

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would log every call
    log.info("prefill %s, decode %s", " ".join(map("=".join, args.prefill)), " ".join(args.decode))
    app = create_app(args.prefill, args.decode, make_half=watched_halves())
    # The grace is short: a request that waits for KV must not keep the proxy from ending.
    config = uvicorn.Config(app, host=args.host, port=args.port, access_log=False, timeout_graceful_shutdown=2)
    uvicorn.Server(config).run()


if __name__ == "__main__":
    main()
