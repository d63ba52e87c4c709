"""The routes that read KV memory: who may, and what they take; the engine behind them is a function."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")

from fastapi import FastAPI
from fastapi.testclient import TestClient

from pdlab.inside import endpoint
from pdlab.inside.endpoint import InstanceEndpoint, on_loopback

TOKEN = "a1b2c3"
HERE = ("127.0.0.1", 1234)
ROUTES = {
    "/pdlab/kv": ("pdlab_kv_bytes", {"layer": 3, "block": 17}, (3, 17)),
    "/pdlab/kv/digests": ("pdlab_kv_digests", {"blocks": [17, 4], "layers": [3]}, ([17, 4], [3])),
}
each_route = pytest.mark.parametrize("path", ROUTES)


class Engine:
    """An engine client: it answers `answers`, one a worker, and remembers what it was asked."""

    def __init__(self) -> None:
        self.answers: list[Any] = [{"data": "AAAA"}]
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    @property
    def engine_core(self) -> "Engine":
        return self

    async def call_utility_all_async(self, method: str) -> list[Any]:
        return [{"used_blocks": 5}, {"used_blocks": 7}]

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append((method, args))
        return self.answers


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def serve(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TestClient]:
    """A client, at that address, of an API server that was started with that token."""

    def serve(token: str | None = TOKEN, client: tuple[str, int] = HERE, knows: str | None = TOKEN) -> TestClient:
        if token is None:
            monkeypatch.delenv("PDLAB_KV_TOKEN", raising=False)
        else:
            monkeypatch.setenv("PDLAB_KV_TOKEN", token)
        app = FastAPI()
        InstanceEndpoint().attach_router(app)
        app.state.pdlab_engine_client, app.state.pdlab_identity = engine, {"model": "tiny"}
        headers = {} if knows is None else {"Authorization": f"Bearer {knows}"}
        return TestClient(app, client=client, headers=headers)

    return serve


def refusal(answer: Any) -> tuple[int, str]:
    """The status and the line of a refusal."""
    assert list(answer.json()) == ["error"]
    line = answer.json()["error"]
    assert "\n" not in line
    return answer.status_code, line


@each_route
def test_the_workers_are_asked(path: str, serve: Callable[..., TestClient], engine: Engine) -> None:
    method, body, args = ROUTES[path]
    answer = serve().post(path, json=body)
    assert (answer.status_code, answer.json()) == (200, {"workers": [{"data": "AAAA"}]})
    assert engine.calls == [(method, args)]


def test_all_layers(serve: Callable[..., TestClient], engine: Engine) -> None:
    engine.answers = [[["d1", "d2"]], [["d3", "d4"]]]
    for more in ({}, {"layers": None}):
        assert serve().post("/pdlab/kv/digests", json={"blocks": [1, 2], **more}).json() == {"workers": engine.answers}
    assert engine.calls == [("pdlab_kv_digests", ([1, 2], None))] * 2


@pytest.mark.parametrize("token", [TOKEN, None])
def test_what_it_holds(serve: Callable[..., TestClient], engine: Engine, token: str | None) -> None:
    """Of each EngineCore, and in the first the worker's: numbers, for anybody."""
    engine.answers = [{"sends": 3}, {"sends": 3}]
    assert serve(token).get("/pdlab/usage").json() == [{"used_blocks": 5, "sends": 3}, {"used_blocks": 7}]
    engine.answers = [{"error": "no"}]
    assert serve(token).get("/pdlab/usage").json() == [{"used_blocks": 5}, {"used_blocks": 7}]


class TestWhoMay:
    @each_route
    @pytest.mark.parametrize("token", [None, ""])
    def test_without_the_variable_there_is_no_route(
        self, path: str, token: str | None, serve: Callable[..., TestClient], engine: Engine
    ) -> None:
        for knows in (TOKEN, "", None):
            assert serve(token, knows=knows).post(path, json=ROUTES[path][1]).status_code == 404
        assert serve(token).get("/pdlab/instance").json() == {"model": "tiny", "workers": engine.answers}
        assert engine.calls == [("pdlab_registered_kv", ())]

    @each_route
    @pytest.mark.parametrize("knows", [None, "", "a1b2c", "a1b2c3x", "A1B2C3"])
    def test_the_token_must_fit(
        self, path: str, knows: str | None, serve: Callable[..., TestClient], engine: Engine
    ) -> None:
        line = "KV memory is read with this engine's token only"
        assert refusal(serve(knows=knows).post(path, json=ROUTES[path][1])) == (401, line)
        assert engine.calls == []

    @pytest.mark.parametrize("header", [TOKEN, f"Basic {TOKEN}", f"Bearer  {TOKEN}", b"Bearer \xe9\xff", ""])
    def test_as_a_bearer(self, header: str | bytes, serve: Callable[..., TestClient], engine: Engine) -> None:
        client = serve(knows=None)
        answer = client.post("/pdlab/kv", json={"layer": 0, "block": 0}, headers={"Authorization": header})
        assert refusal(answer)[0] == 401
        assert engine.calls == []

    @each_route
    @pytest.mark.parametrize("host", ["192.168.1.5", "10.0.0.1", "2001:db8::1", "::", "0.0.0.0", "testclient", ""])
    def test_from_here_only(self, path: str, host: str, serve: Callable[..., TestClient], engine: Engine) -> None:
        for knows in (TOKEN, None):
            answer = serve(client=(host, 1234), knows=knows).post(path, json=ROUTES[path][1])
            assert refusal(answer) == (403, "KV memory is read from this machine only")
        assert engine.calls == []

    @pytest.mark.parametrize("host", ["127.0.0.1", "127.4.5.6", "::1"])
    def test_here(self, host: str, serve: Callable[..., TestClient]) -> None:
        assert serve(client=(host, 1234)).post("/pdlab/kv", json={"layer": 0, "block": 0}).status_code == 200

    def test_a_socket_for_both_versions(self) -> None:
        assert on_loopback("::ffff:127.0.0.1")
        assert not on_loopback("::ffff:192.168.1.5")

    def test_a_stranger_s_body_is_not_looked_at(self, serve: Callable[..., TestClient]) -> None:
        assert serve(knows="other").post("/pdlab/kv", content=b"{").status_code == 401

    def test_only_post(self, serve: Callable[..., TestClient]) -> None:
        assert serve().get("/pdlab/kv").status_code == serve().get("/pdlab/kv/digests").status_code == 405

    def test_the_facts_need_no_token(self, serve: Callable[..., TestClient]) -> None:
        assert serve(client=("192.168.1.5", 1), knows=None).get("/pdlab/instance").status_code == 200


NOT_JSON = [b"", b"{", b"\xff\xfe{", b"[" * 100_000, b'{"layer": ' + b"9" * 5000 + b', "block": 0}']
NO_INDEX = [-1, 1.0, "1", True, None, [1], 1 << 63]


class TestBodies:
    @each_route
    @pytest.mark.parametrize("content", NOT_JSON, ids=range(len(NOT_JSON)))
    def test_not_json(self, path: str, content: bytes, serve: Callable[..., TestClient], engine: Engine) -> None:
        assert refusal(serve().post(path, content=content)) == (400, "the body is not JSON")
        assert engine.calls == []

    @each_route
    def test_null(self, path: str, serve: Callable[..., TestClient], engine: Engine) -> None:
        assert refusal(serve().post(path, content=b"null"))[1].startswith("the body is not {")
        assert engine.calls == []

    @pytest.mark.parametrize(
        "body",
        [
            *[{"layer": value, "block": 0} for value in NO_INDEX],
            *[{"layer": 0, "block": value} for value in NO_INDEX],
            *[{}, {"layer": 0}, {"block": 0}, {"layer": 0, "block": 0, "length": 9}, [0, 0], "0", 0],
        ],
        ids=repr,
    )
    def test_no_block(self, body: Any, serve: Callable[..., TestClient], engine: Engine) -> None:
        line = 'the body is not {"layer": index, "block": id}'
        assert refusal(serve().post("/pdlab/kv", json=body)) == (400, line)
        assert engine.calls == []

    @pytest.mark.parametrize(
        "body",
        [
            *[{"blocks": [0, value]} for value in NO_INDEX],
            *[{"blocks": [0], "layers": [0, value]} for value in NO_INDEX],
            *[{}, {"blocks": 0}, {"blocks": None}, {"blocks": {}}, {"blocks": "12"}, {"layers": [0]}],
            *[{"blocks": [0], "layers": 0}, {"blocks": [0], "layer": [0]}, [0], "0", 0],
        ],
        ids=repr,
    )
    def test_no_blocks(self, body: Any, serve: Callable[..., TestClient], engine: Engine) -> None:
        line = 'the body is not {"blocks": [id, ...], "layers": [index, ...] or left out}'
        assert refusal(serve().post("/pdlab/kv/digests", json=body)) == (400, line)
        assert engine.calls == []

    @pytest.mark.parametrize(
        ("blocks", "layers", "fits"),
        [
            (4096, None, True), (4097, None, False), (64, 64, True), (64, 65, False), (4096, 1, True),
            (4097, 0, False), (0, 4097, False), (0, 0, True),
        ],
    )  # fmt: skip
    def test_bounds(
        self, blocks: int, layers: int | None, fits: bool, serve: Callable[..., TestClient], engine: Engine
    ) -> None:
        body = {"blocks": list(range(blocks)), "layers": None if layers is None else list(range(layers))}
        answer = serve().post("/pdlab/kv/digests", json=body)
        if fits:
            assert answer.status_code == 200
        else:
            assert refusal(answer) == (400, "more than 4,096 digests in one call")
        assert len(engine.calls) == fits

    def test_the_bound_is_the_worker_s(self) -> None:
        assert endpoint.MAX_DIGESTS == 4096


class TestWhatTheWorkersSay:
    @each_route
    def test_no_such_layer_or_block(self, path: str, serve: Callable[..., TestClient], engine: Engine) -> None:
        engine.answers = [{"error": "no block 99: layer 3 has blocks 0 to 9"}, {"error": "other"}]
        answer = serve().post(path, json=ROUTES[path][1])
        assert refusal(answer) == (400, "no block 99: layer 3 has blocks 0 to 9")

    @each_route
    def test_a_layer_of_another_stage(self, path: str, serve: Callable[..., TestClient], engine: Engine) -> None:
        engine.answers = [{"error": "no layer 3: layers 0 to 1 are registered"}, {"data": "AAAA"}]
        answer = serve().post(path, json=ROUTES[path][1])
        assert (answer.status_code, answer.json()) == (200, {"workers": engine.answers})
