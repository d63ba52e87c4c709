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
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pdlab.lab.bodies import Body, decode_body, prefill_body, refusal
from pdlab.lab.failure import Failure, reason
from pdlab.lab.proxy_half import Half, Relay, first_chunk, latin
from pdlab.lab.proxy_prefill import QUICK, Prefill

log = logging.getLogger("pdlab.proxy")


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
    def __init__(self, prefills: list[Prefill], decodes: list[str]) -> None:
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


def authorization(request: Request) -> dict[str, str]:
    return {name: value for name, value in request.headers.items() if name == "authorization"}


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
