"""One block of KV memory as a notebook holds it, through the endpoint, from tensors in place of an engine."""

import hashlib
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from pdlab.errors import PdlabError
from pdlab.lab import kv
from pdlab.lab.http import client
from pdlab.lab.kv import KVBlock, read_block, read_digests

DATA = bytes(range(256)) * 192  # 49,152 bytes
BLOCK = KVBlock(
    role="prefill", layer=3, layer_name="model.layers.3.self_attn.attn", block=17, base_address=0x7F00_0000_0000,
    block_len=49152, kv_block_len=49152, address=0x7F00_0000_0000 + 17 * 49152, shape=(3, 32, 128), dtype="float32",
    device="cpu", data=DATA, digest=hashlib.sha256(DATA).hexdigest()[:16],
)  # fmt: skip
URL, TOKEN = "http://127.0.0.1:8000", "a1b2c3"


class TestBlock:
    def test_arithmetic(self) -> None:
        assert BLOCK.arithmetic == "0x7f00000cc000 = 0x7f0000000000 + 17 × 49,152"
        left, right = BLOCK.arithmetic.replace("×", "*").replace(",", "").split(" = ")
        assert eval(left) == eval(right)

    def test_is_one_line_without_its_bytes(self) -> None:
        assert repr(BLOCK) == f"<prefill layer 3 block 17 at 0x7f00000cc000: 49,152 bytes, digest {BLOCK.digest}>"

    def test_is_a_snapshot(self) -> None:
        with pytest.raises(FrozenInstanceError):
            BLOCK.data = b""  # type: ignore[misc]

    def test_layout_on_a_cpu(self) -> None:
        shape, order = BLOCK.layout.splitlines()
        assert shape == (
            "blocks × KV heads × tokens × (K and V in the last dimension): a block is 3 × 32 × 128 values of float32"
        )
        assert order.startswith("CPU attention fills a head's bytes in an order of its own: the K of all tokens, then ")
        assert order.endswith("bytes are shown as bytes")

    def test_layout_on_a_gpu(self) -> None:
        shape, order = replace(BLOCK, device="cuda:0").layout.splitlines()
        assert shape == BLOCK.layout.splitlines()[0]
        assert order == "of each token of a head: its K, then its V"

    def test_layout_of_another_kind(self) -> None:
        other = replace(BLOCK, shape=(64, 576), dtype="bfloat16", device="cuda:0")
        assert other.layout == "a block is 64 × 576 values of bfloat16"

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_cpu_attention_does_fill_it_so(self, dtype: str) -> None:
        """What `layout` says: of each head's bytes, the first half are keys, the second values."""
        pytest.importorskip("vllm")
        import torch
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            pytest.skip("no CPU attention in this vLLM")
        current_platform.import_kernels()
        from vllm import _custom_ops as ops
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        kind, (heads, tokens, both) = getattr(torch, dtype), BLOCK.shape
        cache = torch.zeros(2, heads, tokens, both, dtype=kind)
        # as CPUAttentionBackendImpl.do_kv_cache_update does
        keys, values = cache.view(2, heads, 2 * tokens, both // 2).chunk(2, dim=2)
        numbers = torch.arange(1, tokens + 1, dtype=kind).view(tokens, 1, 1).expand(tokens, heads, both // 2)
        isa = _get_attn_isa(kind, tokens, both // 2)
        ops.cpu_attn_reshape_and_cache(
            numbers.contiguous(), -numbers.contiguous(), keys, values, tokens + torch.arange(tokens), isa
        )
        for head in cache[1].flatten(1):
            first, second = head.chunk(2)
            assert bool((first > 0).all())
            assert bool((second < 0).all())
        assert not bool(cache[0].any())


class TestHexdump:
    def test_lines_begin_with_their_address(self) -> None:
        assert BLOCK.hexdump().splitlines() == [
            "0x7f00000cc000  00 01 02 03 04 05 06 07 08 09 0a 0b 0c 0d 0e 0f",
            "0x7f00000cc010  10 11 12 13 14 15 16 17 18 19 1a 1b 1c 1d 1e 1f",
            "0x7f00000cc020  20 21 22 23 24 25 26 27 28 29 2a 2b 2c 2d 2e 2f",
            "0x7f00000cc030  30 31 32 33 34 35 36 37 38 39 3a 3b 3c 3d 3e 3f",
        ]

    def test_from_anywhere_and_of_any_length(self) -> None:
        assert BLOCK.hexdump(5, 3) == "0x7f00000cc005  05 06 07"
        assert BLOCK.hexdump(250, 18).splitlines() == [
            "0x7f00000cc0fa  fa fb fc fd fe ff 00 01 02 03 04 05 06 07 08 09",
            "0x7f00000cc10a  0a 0b",
        ]

    def test_ends_with_the_block(self) -> None:
        assert BLOCK.hexdump(49150) == "0x7f00000d7ffe  fe ff"

    @pytest.mark.parametrize("offset", [-1, 49152])
    def test_no_further(self, offset: int) -> None:
        with pytest.raises(PdlabError, match="the block has no byte"):
            BLOCK.hexdump(offset)


class TestDiffering:
    def other(self, *places: int, data: bytes = DATA) -> KVBlock:
        changed = bytearray(data)
        for place in places:
            changed[place] ^= 0x0A  # a newline's value must be no end of a run
        return replace(BLOCK, role="decode", block=4, address=5, data=bytes(changed))

    def test_equal(self) -> None:
        assert BLOCK.differing(self.other()) == BLOCK.differing(BLOCK) == []

    @pytest.mark.parametrize(
        ("places", "ranges"),
        [
            ([0], [(0, 1)]),
            ([49151], [(49151, 49152)]),
            ([7, 8, 9], [(7, 10)]),
            ([7, 9, 10, 300], [(7, 8), (9, 11), (300, 301)]),
            (range(49152), [(0, 49152)]),
        ],
    )
    def test_ranges(self, places: list[int], ranges: list[tuple[int, int]]) -> None:
        assert BLOCK.differing(self.other(*places)) == self.other(*places).differing(BLOCK) == ranges

    def test_padding_is_no_difference(self) -> None:
        mine = replace(BLOCK, kv_block_len=49000)
        assert mine.differing(replace(self.other(48999, 49000, 49151), kv_block_len=49000)) == [(48999, 49000)]
        assert mine.payload == DATA[:49000]

    def test_other_lengths(self) -> None:
        other = replace(BLOCK, data=DATA[:24576], kv_block_len=24576)
        with pytest.raises(PdlabError, match="a block of 49,152 bytes and one of 24,576 cannot be compared"):
            BLOCK.differing(other)


@pytest.mark.filterwarnings("ignore:You should not use the 'timeout' argument with the TestClient")
class TestReading:
    """From the endpoint that the engine loads, with tensors behind it."""

    @pytest.fixture
    def tensors(self) -> dict[str, Any]:
        torch = pytest.importorskip("torch")
        return {f"layers.{layer}": torch.randn(9, 3, 32, 16) for layer in range(2)}

    @pytest.fixture
    def engine(self, tensors: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
        """An engine of one worker, reached as `kv.client()` reaches one."""
        testclient = pytest.importorskip("fastapi.testclient")
        from fastapi import FastAPI

        from pdlab.inside import worker
        from pdlab.inside.endpoint import InstanceEndpoint

        registered = SimpleNamespace(
            device_kv_caches=tensors, kv_cache_config=SimpleNamespace(num_blocks=9),
            _physical_blocks_per_logical_kv_block=1, registered_layer_names=list(tensors),
            registered_layer_indices=[0, 1], kv_caches_base_addr=[tensor.data_ptr() for tensor in tensors.values()],
            block_len_per_layer=[6144, 6144], kv_block_len_per_layer=[6144, 6144],
        )  # fmt: skip
        monkeypatch.setattr(worker, "_connector_worker", lambda: registered)

        async def collective_rpc(method: str, args: tuple[Any, ...]) -> list[Any]:
            return [*engine.before, getattr(worker.RegisteredKV(), method)(*args)]

        engine = SimpleNamespace(collective_rpc=collective_rpc, before=[], host="127.0.0.1")
        monkeypatch.setenv("PDLAB_KV_TOKEN", TOKEN)
        app = FastAPI()
        InstanceEndpoint().attach_router(app)
        app.state.pdlab_engine_client = engine
        monkeypatch.setattr(kv, "client", lambda: testclient.TestClient(app, client=(engine.host, 1234)))
        return engine

    def test_a_block(self, engine: Any, tensors: dict[str, Any]) -> None:
        block = read_block(URL, TOKEN, 1, 8, "decode")
        tensor = tensors["layers.1"]
        assert block == KVBlock(
            role="decode", layer=1, layer_name="layers.1", block=8, base_address=tensor.data_ptr(), block_len=6144,
            kv_block_len=6144, address=tensor[8].data_ptr(), shape=(3, 32, 16), dtype="float32", device="cpu",
            data=tensor[8].numpy().tobytes(), digest=hashlib.sha256(tensor[8].numpy().tobytes()).hexdigest()[:16],
        )  # fmt: skip

    def test_it_stays_as_it_was_read(self, engine: Any, tensors: dict[str, Any]) -> None:
        before = read_block(URL, TOKEN, 0, 2, "prefill")
        tensors["layers.0"][2, 1, 0, 0] += 1
        changed = before.differing(read_block(URL, TOKEN, 0, 2, "prefill"))
        assert changed
        assert all(2048 <= start < stop <= 2052 for start, stop in changed)

    def test_digests(self, engine: Any) -> None:
        wanted = [[read_block(URL, TOKEN, layer, block, "prefill").digest for block in (3, 5, 0)] for layer in (0, 1)]
        assert read_digests(URL, TOKEN, [3, 5, 0]) == wanted
        assert read_digests(URL, TOKEN, [3, 5, 0], layers=[1]) == wanted[1:]
        assert read_digests(URL, TOKEN, []) == [[], []]

    def test_from_the_first_worker_that_holds_it(self, engine: Any) -> None:
        engine.before = [{"error": "no layer 1: layers 2 to 3 are registered"}]
        assert read_block(URL, TOKEN, 1, 0, "prefill").layer == 1
        assert len(read_digests(URL, TOKEN, [0])) == 2

    def test_no_such_block(self, engine: Any) -> None:
        with pytest.raises(PdlabError, match="no block 9: layer 1 has blocks 0 to 8") as caught:
            read_block(URL, TOKEN, 1, 9, "prefill")
        assert caught.value.hint
        with pytest.raises(PdlabError, match="no layer 2: layers 0 to 1 are registered"):
            read_digests(URL, TOKEN, [0], layers=[2])
        with pytest.raises(PdlabError, match="the body is not "):
            read_block(URL, TOKEN, -1, 0, "prefill")

    def test_too_many(self, engine: Any) -> None:
        with pytest.raises(PdlabError, match="more than 4,096 digests"):
            read_digests(URL, TOKEN, [0] * 4097)
        with pytest.raises(PdlabError, match="2 layers × 2049 blocks are more than 4,096 digests"):
            read_digests(URL, TOKEN, [0] * 2049)

    @pytest.mark.parametrize("token", [None, ""])
    def test_no_token(self, token: str | None, engine: Any) -> None:
        for read in (lambda: read_block(URL, token, 0, 0, "prefill"), lambda: read_digests(URL, token, [0])):
            with pytest.raises(PdlabError, match=r"^reading memory is off in this engine .*\n.*PDLAB_KV_TOKEN"):
                read()

    def test_another_token(self, engine: Any) -> None:
        with pytest.raises(PdlabError, match=r"with this engine's token only\n"):
            read_block(URL, "other", 0, 0, "prefill")

    def test_from_another_machine(self, engine: Any) -> None:
        engine.host = "192.168.1.5"
        with pytest.raises(PdlabError, match=r"from this machine only\n.*on the machine of the engine"):
            read_block(URL, TOKEN, 0, 0, "prefill")


class TestAnswersOfOtherServers:
    def answer(self, monkeypatch: pytest.MonkeyPatch, *args: Any, **options: Any) -> None:
        transport = httpx.MockTransport(lambda request: httpx.Response(*args, **options))
        monkeypatch.setattr(kv, "client", lambda: httpx.Client(transport=transport))

    def test_one_without_the_routes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answer(monkeypatch, 404, json={"detail": "Not Found"})
        with pytest.raises(PdlabError, match="reading memory is off in this engine"):
            read_block(URL, TOKEN, 0, 0, "prefill")

    @pytest.mark.parametrize("options", [{"text": "oh\nno"}, {"json": {"detail": 1}}, {"json": []}, {"json": "a"}])
    def test_one_that_fails(self, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        self.answer(monkeypatch, 500, **options)
        with pytest.raises(PdlabError) as caught:
            read_digests(URL, TOKEN, [0])
        assert (caught.value.message, caught.value.hint) == (f"{URL}: it failed with status 500", "its log says why")

    def test_none(self) -> None:
        assert kv.client is client
        with pytest.raises(PdlabError, match=r"the instance http://127\.0\.0\.1:9 does not answer"):
            read_block("http://127.0.0.1:9", TOKEN, 0, 0, "prefill")


def test_needs_neither_torch_nor_vllm() -> None:
    code = "import sys, pdlab.lab.kv; print(sorted({'torch', 'vllm', 'pdlab.inside'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
