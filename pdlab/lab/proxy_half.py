"""The two halves of a request on their way: sent at once, awaited together, closed together."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from pdlab.lab.bodies import Body
from pdlab.lab.failure import Failure, reason

log = logging.getLogger("pdlab.proxy")


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


def latin(headers: Mapping[str, str]) -> httpx.Headers:
    """Headers on their way on, byte for byte as Starlette has read them."""
    return httpx.Headers(dict(headers), encoding="latin-1")
