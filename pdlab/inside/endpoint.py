"""The `vllm.endpoint_plugins` entry point: what this instance is, registered and holds, and the bytes in its KV memory.

Loaded only where `VLLM_PLUGINS` names `pdlab`. `GET /pdlab/instance` answers facts, `GET /pdlab/usage` counts. KV is
the prompt in another form, so `POST /pdlab/kv` and `POST /pdlab/kv/digests` exist only where `PDLAB_KV_TOKEN` is set,
and answer only who knows it and is on this machine; so does `POST /pdlab/prefix_cache/reset`, the one that changes
something.
"""

import asyncio
import hmac
import ipaddress
import os
from collections.abc import Callable
from typing import Any, TypeGuard

from starlette.requests import Request
from starlette.responses import JSONResponse

from pdlab.inside.identity import identity
from pdlab.inside.memory import MAX_DIGESTS
from pdlab.inside.usage import METHOD


class InstanceEndpoint:
    """An `EndpointPlugin` of vLLM (`vllm.plugins.endpoint_plugins.interface`)."""

    name = "pdlab"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        async def instance() -> dict[str, Any]:
            state = app.state
            layouts = await state.pdlab_engine_client.collective_rpc("pdlab_registered_kv")
            if state.pdlab_identity is None:
                state.pdlab_identity = await asyncio.to_thread(identity, state.vllm_config)
            return {**state.pdlab_identity, "workers": layouts}

        async def usage() -> list[dict[str, Any]]:
            return await usage_of(app.state.pdlab_engine_client)

        app.get("/pdlab/instance")(instance)
        app.get("/pdlab/usage")(usage)
        if token := os.environ.get("PDLAB_KV_TOKEN"):
            attach_memory(app, token)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        state.pdlab_engine_client = engine_client
        state.pdlab_identity = None


async def usage_of(engine_client: Any) -> list[dict[str, Any]]:
    """What `pdlab.inside.usage` counts: of each EngineCore (one a DP rank), and in the first of all its workers."""
    cores, workers = await asyncio.gather(
        engine_client.engine_core.call_utility_all_async(METHOD), engine_client.collective_rpc("pdlab_worker_usage")
    )
    counted = {} if "error" in workers[0] else workers[0]
    return [cores[0] | counted, *cores[1:]]


def attach_memory(app: Any, token: str) -> None:
    """Add the routes that read KV memory, and the one that empties the prefix cache.

    Those that read answer {"workers": [one answer a worker, in the order of ranks]}; a worker without that layer (of
    another pipeline stage) answers {"error": line}, and if all do, it is a 400.
    """

    async def kv(request: Request) -> JSONResponse:
        """{layer, block}: `RegisteredKV.pdlab_kv_bytes`."""
        return await _answer(request, token, "pdlab_kv_bytes", block_arguments)

    async def digests(request: Request) -> JSONResponse:
        """{blocks, layers?}: `RegisteredKV.pdlab_kv_digests`."""
        return await _answer(request, token, "pdlab_kv_digests", digest_arguments)

    async def reset(request: Request) -> JSONResponse:
        """`EngineClient.reset_prefix_cache`: whether it could be, which it cannot while a request holds blocks."""
        try:
            admit(request, token)
        except Refused as refused:
            return JSONResponse({"error": refused.line}, refused.status)
        return JSONResponse({"reset": bool(await request.app.state.pdlab_engine_client.reset_prefix_cache())})

    async def trace(request: Request) -> JSONResponse:
        """{on}: `RegisteredKV.pdlab_trace`."""
        return await _answer(request, token, "pdlab_trace", switch_argument)

    app.post("/pdlab/kv")(kv)
    app.post("/pdlab/kv/digests")(digests)
    app.post("/pdlab/prefix_cache/reset")(reset)
    app.post("/pdlab/trace")(trace)


class Refused(Exception):
    """A request that is not served: its HTTP status, and one line."""

    def __init__(self, status: int, line: str) -> None:
        super().__init__(line)
        self.status, self.line = status, line


def admit(request: Request, token: str) -> None:
    """Raises:
    Refused: 403, the client is on another host; 401, it does not know the token.
    """
    if not on_loopback(request.client.host if request.client else ""):
        raise Refused(403, "KV memory is read from this machine only")
    given = request.headers.get("authorization", "").encode("latin-1")
    if not hmac.compare_digest(given, f"Bearer {token}".encode()):
        raise Refused(401, "KV memory is read with this engine's token only")


def on_loopback(host: str) -> bool:
    """Whether a client's address is in 127.0.0.0/8 (also as a socket for both IP versions shows it) or ::1."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def switch_argument(body: Any) -> tuple[bool]:
    """The switch of {on}.

    Raises:
        Refused: 400, the body is another.
    """
    if not isinstance(body, dict) or set(body) != {"on"} or not isinstance(body["on"], bool):
        raise Refused(400, 'the body is not {"on": true} or {"on": false}')
    return (body["on"],)


def block_arguments(body: Any) -> tuple[int, int]:
    """Layer and block of {layer, block}.

    Raises:
        Refused: 400, the body is another.
    """
    fields: dict[str, Any] = body if isinstance(body, dict) else {}
    if set(fields) != {"layer", "block"} or not _are_indices(list(fields.values())):
        raise Refused(400, 'the body is not {"layer": index, "block": id}')
    return fields["layer"], fields["block"]


def digest_arguments(body: Any) -> tuple[list[int], list[int] | None]:
    """Blocks and layers of {blocks, layers?}; layers is None where it is left out: all.

    Raises:
        Refused: 400, the body is another, or asks for more than MAX_DIGESTS (the worker, which knows how many layers
            there are, looks again).
    """
    fields: dict[str, Any] = body if isinstance(body, dict) else {}
    blocks, layers = fields.get("blocks"), fields.get("layers")
    if set(fields) - {"blocks", "layers"} or not _are_indices(blocks) or not (layers is None or _are_indices(layers)):
        raise Refused(400, 'the body is not {"blocks": [id, ...], "layers": [index, ...] or left out}')
    if max(1, len(blocks)) * max(1, len(layers or ())) > MAX_DIGESTS:
        raise Refused(400, f"more than {MAX_DIGESTS:,} digests in one call")
    return blocks, layers


def _are_indices(values: Any) -> TypeGuard[list[int]]:
    # A bool is no index, and more than 63 bits msgpack cannot carry to the engine.
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


async def _answer(
    request: Request, token: str, method: str, arguments: Callable[[Any], tuple[Any, ...]]
) -> JSONResponse:
    try:
        admit(request, token)
        args = arguments(await _json(request))
        answers = await request.app.state.pdlab_engine_client.collective_rpc(method, args=args)
        return JSONResponse({"workers": _unless_all_failed(answers)})
    except Refused as refused:
        return JSONResponse({"error": refused.line}, refused.status)


async def _json(request: Request) -> Any:
    try:
        return await request.json()
    except (ValueError, RecursionError):
        raise Refused(400, "the body is not JSON") from None


def _unless_all_failed(answers: list[Any]) -> list[Any]:
    errors = [answer["error"] for answer in answers if isinstance(answer, dict) and "error" in answer]
    if errors and len(errors) == len(answers):
        raise Refused(400, errors[0])
    return answers
