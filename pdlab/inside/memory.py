"""KV memory as numbers and bytes: which region holds a layer, and what lies at the address of a block.

Knows torch and no vLLM. One code for CPU and CUDA: bytes are read where the region was registered, never by indexing
the tensor, so that what is shown is what a transfer of that address would move.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

MAX_DIGESTS = 4096  # (layer, block) pairs in one call: the engine computes nothing else meanwhile


@dataclass(frozen=True)
class Region:
    """One region as `MooncakeConnectorWorker.register_kv_caches` registered it.

    Attributes:
        layer: the layer's index in the model (`registered_layer_indices`).
        layer_name: its name in `device_kv_caches`.
        base_addr: of block 0 (`kv_caches_base_addr`).
        block_len: bytes from one block to the next (`block_len_per_layer`).
        kv_block_len: bytes of a block that hold KV, at its start (`kv_block_len_per_layer`); the rest is not the
            block's own: padding, or other layers in the same row.
        num_blocks: blocks that an id may name.
    """

    layer: int
    layer_name: str
    base_addr: int
    block_len: int
    kv_block_len: int
    num_blocks: int

    def address(self, block: int) -> int:
        """Where that block begins.

        Raises:
            ValueError: there is no such block.
        """
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"no block {block}: layer {self.layer} has blocks 0 to {self.num_blocks - 1}")
        return self.base_addr + block * self.block_len


def region_of(regions: Sequence[Region], layer: int) -> Region:
    """The one region that holds that layer.

    Raises:
        ValueError: there is no such layer, or its blocks are not in one piece.
    """
    found = [region for region in regions if region.layer == layer]
    if not found:
        layers = sorted(region.layer for region in regions)
        raise ValueError(f"no layer {layer}: layers {layers[0]} to {layers[-1]} are registered")
    if len(found) > 1:
        names = ", ".join(sorted({region.layer_name for region in found}))
        raise ValueError(f"layer {layer} is not one region but {len(found)} ({names})")
    return found[0]


def read(tensor: torch.Tensor, address: int, length: int) -> bytes:
    """`length` bytes at `address`, which lies in the storage behind `tensor`, copied.

    Raises:
        ValueError: they are not all within that storage.
    """
    storage = tensor.untyped_storage()
    start = address - storage.data_ptr()
    if start < 0 or start + length > storage.nbytes():  # set_ would enlarge the storage
        raise ValueError(
            f"{length:,} bytes at {address:#x} are not within the {storage.nbytes():,} bytes at {storage.data_ptr():#x}"
        )
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, start, (length,), (1,))
    return bytes(view.cpu().numpy().tobytes())


def digest(payload: bytes) -> str:
    """16 hexadecimal digits of the SHA-256 of a block's KV."""
    return hashlib.sha256(payload).hexdigest()[:16]


def block_facts(tensor: torch.Tensor, region: Region, block: int) -> dict[str, Any]:
    """One block of one layer.

    Args:
        tensor: the layer's, [blocks, ...] or flat, of which `region` was registered.

    Returns:
        base_addr; address (base_addr + block * block_len); block_len, kv_block_len (bytes); shape, stride (bytes),
        dtype, device of the tensor's view of a block; layer, layer_name, block; data (base64 of the block_len bytes at
        that address; fewer if the storage ends first, never fewer than kv_block_len); digest (of the first
        kv_block_len of them).

    Raises:
        ValueError: there is no such block, or it is not in the tensor's storage.
    """
    address = region.address(block)
    storage = tensor.untyped_storage()
    rest = storage.data_ptr() + storage.nbytes() - address
    data = read(tensor, address, max(region.kv_block_len, min(region.block_len, rest)))
    view = tensor[0] if tensor.dim() > 1 else tensor[: region.kv_block_len // tensor.element_size()]
    return {
        "layer": region.layer,
        "layer_name": region.layer_name,
        "block": block,
        "base_addr": region.base_addr,
        "address": address,
        "block_len": region.block_len,
        "kv_block_len": region.kv_block_len,
        "shape": list(view.shape),
        "stride": [step * tensor.element_size() for step in view.stride()],
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "device": str(tensor.device),
        "data": base64.b64encode(data).decode(),
        "digest": digest(data[: region.kv_block_len]),
    }


def block_digests(
    tensors: Mapping[str, torch.Tensor], regions: Sequence[Region], blocks: Sequence[int], layers: Sequence[int] | None
) -> list[list[str]]:
    """Digests of KV, [layer][block], in the order asked for.

    Args:
        tensors: by layer name, as `MooncakeConnectorWorker.device_kv_caches`.
        layers: indices; None for every region, in the order of registration.

    Raises:
        ValueError: there is no such layer or block, or it is more than MAX_DIGESTS of them.
    """
    chosen = regions if layers is None else [region_of(regions, layer) for layer in layers]
    if len(chosen) * len(blocks) > MAX_DIGESTS:
        raise ValueError(f"{len(chosen)} layers × {len(blocks)} blocks are more than {MAX_DIGESTS:,} digests")
    return [
        [digest(read(tensors[region.layer_name], region.address(block), region.kv_block_len)) for block in blocks]
        for region in chosen
    ]
