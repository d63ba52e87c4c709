"""The bytes of KV memory, read at the addresses that were registered: plain tensors, no engine."""

import base64
import hashlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from pdlab.inside import memory
from pdlab.inside.memory import Region, block_digests, block_facts, digest, read, region_of
from pdlab.inside.worker import RegisteredKV

BLOCKS, SHAPE = 7, (3, 32, 16)  # KV heads, tokens, K and V


def filled(*shape: int, dtype: Any = None) -> Any:
    """A tensor in which no two values are equal nearby, so that a read at a wrong place is seen."""
    torch.manual_seed(sum(shape))
    return torch.randn(*shape).to(dtype or torch.float32)


def stored(tensor: Any) -> bytes:
    """The bytes of a tensor in the order of its indices; bfloat16, which numpy lacks, as the 16-bit values it is."""
    plain = tensor.contiguous()
    return bytes((plain.view(torch.int16) if plain.dtype == torch.bfloat16 else plain).numpy().tobytes())


def of(tensor: Any, layer: int = 0, **changes: Any) -> Region:
    """The region of a layer's tensor, as vLLM registers one."""
    block_len = tensor.stride(0) * tensor.element_size()
    region = Region(layer, f"layers.{layer}", tensor.data_ptr(), block_len, tensor[0].nbytes, tensor.shape[0])
    return replace(region, **changes)


def data(facts: dict[str, Any]) -> bytes:
    return base64.b64decode(facts["data"])


def separate(dtype: Any) -> list[Any]:
    return [filled(BLOCKS, *SHAPE, dtype=dtype) for _ in range(3)]


def shared(dtype: Any) -> list[Any]:
    """Layers one after the other in one storage that begins with something else."""
    whole = filled(5 + 3 * BLOCKS * 3 * 32 * 16, dtype=dtype)
    return list(whole[5:].view(3, BLOCKS, *SHAPE))


def padded(dtype: Any) -> list[Any]:
    """Blocks with 40 values of padding behind each."""
    payload = 3 * 32 * 16
    rows = [filled(BLOCKS, payload + 40, dtype=dtype) for _ in range(2)]
    return [row[:, :payload].unflatten(1, SHAPE) for row in rows]


def interleaved(dtype: Any) -> list[Any]:
    """Rows of a block that hold every layer: block-outermost memory."""
    whole = filled(BLOCKS, 3, *SHAPE, dtype=dtype)
    return [whole[:, layer] for layer in range(3)]


@pytest.mark.parametrize("layers", [separate, shared, padded, interleaved])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
class TestEveryWayToLieInMemory:
    def test_the_bytes_are_the_tensor_s(self, layers: Any, dtype: Any) -> None:
        for tensor in layers(dtype):
            for block in range(BLOCKS):
                facts = block_facts(tensor, of(tensor), block)
                assert data(facts)[: facts["kv_block_len"]] == stored(tensor[block])

    def test_the_address_is_where_the_tensor_has_it(self, layers: Any, dtype: Any) -> None:
        for tensor in layers(dtype):
            for block in range(BLOCKS):
                facts = block_facts(tensor, of(tensor), block)
                assert facts["address"] == tensor[block].data_ptr()
                assert facts["address"] == facts["base_addr"] + block * facts["block_len"]

    def test_digests_are_of_the_payload(self, layers: Any, dtype: Any) -> None:
        tensors = layers(dtype)
        regions = [of(tensor, layer) for layer, tensor in enumerate(tensors)]
        wanted = [[hashlib.sha256(stored(t[b])).hexdigest()[:16] for b in (4, 0)] for t in tensors]
        assert block_digests({f"layers.{i}": t for i, t in enumerate(tensors)}, regions, [4, 0], None) == wanted
        for row, tensor, region in zip(wanted, tensors, regions, strict=True):
            assert [block_facts(tensor, region, block)["digest"] for block in (4, 0)] == row

    def test_a_write_is_seen(self, layers: Any, dtype: Any) -> None:
        tensor = layers(dtype)[1]
        before = block_facts(tensor, of(tensor), 2)
        tensor[2, 1, 5, 3] += 1
        after = block_facts(tensor, of(tensor), 2)
        assert before["digest"] != after["digest"]
        where = [at for at, (a, b) in enumerate(zip(data(before), data(after), strict=True)) if a != b]
        place = ((1 * 32 + 5) * 16 + 3) * tensor.element_size()
        assert set(where) <= set(range(place, place + tensor.element_size()))


def test_facts() -> None:
    tensor = filled(BLOCKS, *SHAPE, dtype=torch.bfloat16)
    facts = block_facts(tensor, of(tensor, layer=4), 6)
    assert facts == {
        "layer": 4, "layer_name": "layers.4", "block": 6, "base_addr": tensor.data_ptr(),
        "address": tensor.data_ptr() + 6 * 3072, "block_len": 3072, "kv_block_len": 3072, "shape": [3, 32, 16],
        "stride": [1024, 32, 2], "dtype": "bfloat16", "device": "cpu", "data": facts["data"],
        "digest": digest(stored(tensor[6])),
    }  # fmt: skip


def test_padding_is_read_and_not_digested() -> None:
    whole = filled(BLOCKS, 3 * 32 * 16 + 40)
    tensor = whole[:, : 3 * 32 * 16].unflatten(1, SHAPE)
    facts = block_facts(tensor, of(tensor), 3)
    assert (facts["block_len"], facts["kv_block_len"]) == (6304, 6144)
    assert data(facts) == stored(whole[3])
    whole[3, -1] += 1
    again = block_facts(tensor, of(tensor), 3)
    assert data(again) != data(facts)
    assert again["digest"] == facts["digest"]


def test_the_last_block_of_a_later_layer_ends_with_the_storage() -> None:
    whole = filled(BLOCKS, 3, *SHAPE)
    facts = block_facts(whole[:, 2], of(whole[:, 2]), BLOCKS - 1)
    assert facts["block_len"] == 3 * facts["kv_block_len"]
    assert data(facts) == stored(whole[BLOCKS - 1, 2])


def test_a_flat_page_tensor() -> None:
    flat = filled(4 * 100)
    region = Region(0, "layers.0", flat.data_ptr(), block_len=400, kv_block_len=400, num_blocks=4)
    facts = block_facts(flat, region, 3)
    assert data(facts) == stored(flat[300:])
    assert (facts["shape"], facts["stride"]) == ([100], [4])


class TestOutOfRange:
    @pytest.mark.parametrize("block", [-1, BLOCKS, 1 << 62])
    def test_block(self, block: int) -> None:
        tensor = filled(BLOCKS, *SHAPE)
        with pytest.raises(ValueError, match=f"^no block {block}: layer 2 has blocks 0 to 6$"):
            block_facts(tensor, of(tensor, layer=2), block)
        with pytest.raises(ValueError, match="no block"):
            block_digests({"layers.2": tensor}, [of(tensor, layer=2)], [0, block], None)

    @pytest.mark.parametrize("layer", [-1, 14, 18])
    def test_layer(self, layer: int) -> None:
        regions = [of(filled(BLOCKS, *SHAPE), number) for number in (15, 16, 17)]
        with pytest.raises(ValueError, match=f"^no layer {layer}: layers 15 to 17 are registered$"):
            region_of(regions, layer)
        with pytest.raises(ValueError, match="no layer"):
            block_digests({}, regions, [0], [15, layer][1:])

    def test_a_layer_in_several_pieces(self) -> None:
        tensor = filled(BLOCKS, *SHAPE)
        with pytest.raises(ValueError, match=r"^layer 5 is not one region but 2 \(layers\.5\)$"):
            region_of([of(tensor, 5), of(tensor, 5)], 5)

    def test_what_is_not_in_the_storage_is_not_read(self) -> None:
        tensor = filled(BLOCKS, *SHAPE)
        begin, size = tensor.data_ptr(), tensor.nbytes
        assert read(tensor, begin + size - 8, 8) == stored(tensor)[-8:]
        assert read(tensor, begin, size) == stored(tensor)
        for address, length in ((begin - 1, 8), (begin + size - 7, 8), (begin + size, 1), (begin, size + 1), (0, 8)):
            with pytest.raises(ValueError, match="are not within the"):
                read(tensor, address, length)
        assert tensor.untyped_storage().nbytes() == size
        with pytest.raises(ValueError, match="are not within the"):
            block_facts(tensor, of(tensor, num_blocks=BLOCKS + 1), BLOCKS)

    def test_number_of_digests(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(memory, "MAX_DIGESTS", 6)
        tensor = filled(BLOCKS, *SHAPE)
        tensors, regions = {"layers.0": tensor, "layers.1": tensor}, [of(tensor, 0), of(tensor, 1)]
        assert len(block_digests(tensors, regions, [0, 1, 2], None)) == 2
        with pytest.raises(ValueError, match=r"^2 layers × 4 blocks are more than 6 digests$"):
            block_digests(tensors, regions, [0, 1, 2, 3], None)
        assert len(block_digests(tensors, regions, [0, 1, 2, 3], [1])) == 1


class TestTheWorkerExtension:
    """RegisteredKV, on what vLLM's own `register_kv_caches` wrote down."""

    @pytest.fixture
    def caches(self) -> dict[str, Any]:
        """Two layers of one storage, in an order that is not the model's."""
        pytest.importorskip("vllm")
        whole = filled(2, BLOCKS, *SHAPE, dtype=torch.bfloat16)
        return {"model.layers.1.self_attn.attn": whole[0], "model.layers.0.self_attn.attn": whole[1]}

    @pytest.fixture
    def worker(self, caches: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
        import vllm.distributed.kv_transfer as kv_transfer
        from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnectorWorker
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        spec = FullAttentionSpec(block_size=32, num_kv_heads=3, head_size=8, dtype=torch.bfloat16)
        groups = dict.fromkeys(caches, 0)
        worker = SimpleNamespace(
            use_mla=False, is_kv_consumer=True, _physical_blocks_per_logical_kv_block=1, _prepared_transfer_regions={},
            kv_cache_config=SimpleNamespace(num_blocks=BLOCKS, transfer_group_index_by_layer=groups),
            _layer_specs=dict.fromkeys(caches, spec), _log_debug_cache_registration=lambda *_: None,
            engine=SimpleNamespace(batch_register_memory=lambda addresses, lengths: 0),
        )  # fmt: skip
        MooncakeConnectorWorker.register_kv_caches(worker, caches)
        group = SimpleNamespace(connector_worker=worker)
        monkeypatch.setattr(kv_transfer, "get_kv_transfer_group", lambda: group)
        return worker

    def test_a_layer_is_the_model_s(self, worker: Any, caches: dict[str, Any]) -> None:
        for layer in (0, 1):
            name = f"model.layers.{layer}.self_attn.attn"
            for block in range(BLOCKS):
                facts = RegisteredKV().pdlab_kv_bytes(layer, block)
                assert facts["layer_name"] == name
                assert facts["address"] == caches[name][block].data_ptr()
                assert data(facts) == stored(caches[name][block])

    def test_digests(self, worker: Any) -> None:
        found = [[RegisteredKV().pdlab_kv_bytes(layer, block)["digest"] for block in (5, 2)] for layer in (0, 1)]
        assert RegisteredKV().pdlab_kv_digests([5, 2], [0, 1]) == found
        assert RegisteredKV().pdlab_kv_digests([5, 2]) == found[::-1]  # the order of registration

    def test_blocks_are_those_of_the_kernel(self, worker: Any) -> None:
        worker._physical_blocks_per_logical_kv_block, worker.kv_cache_config.num_blocks = 7, 1
        assert "error" not in RegisteredKV().pdlab_kv_bytes(0, 6)

    def test_nothing_is_raised(self, worker: Any) -> None:
        extension = RegisteredKV()
        assert extension.pdlab_kv_bytes(2, 0) == {"error": "no layer 2: layers 0 to 1 are registered"}
        assert extension.pdlab_kv_bytes(0, 7) == {"error": "no block 7: layer 0 has blocks 0 to 6"}
        assert extension.pdlab_kv_digests([0], [3]) == {"error": "no layer 3: layers 0 to 1 are registered"}
        del worker.device_kv_caches
        assert list(extension.pdlab_kv_bytes(0, 0)) == list(extension.pdlab_kv_digests([0])) == ["error"]

    def test_all_its_attributes_are_ours(self) -> None:
        # vLLM refuses to start a worker that has one of that name.
        assert all(name.startswith("pdlab_") for name in dir(RegisteredKV) if not name.startswith("__"))
