"""One block of KV memory as a notebook holds it: where it lies, why there, and its bytes."""

import base64
import re
from dataclasses import dataclass, field
from typing import Any

import httpx

from pdlab.checks import of_kind, whole
from pdlab.errors import PdlabError
from pdlab.lab.http import client
from pdlab.lab.settings import Role


@dataclass(frozen=True)
class KVBlock:
    """One layer's part of one block, as it lay in an engine's registered memory when it was read.

    Attributes:
        role: "prefill" or "decode": whose memory.
        layer: the layer's index in the model.
        layer_name: vLLM's name of it.
        block: its id, as it stands in block tables and transfer messages.
        base_address: of the layer's block 0 (`MooncakeConnectorWorker.kv_caches_base_addr`).
        block_len: bytes from one block to the next (`block_len_per_layer`).
        kv_block_len: bytes of it that hold KV (`kv_block_len_per_layer`), at its start; equal to block_len unless
            blocks are padded.
        address: of this block; base_address + block × block_len.
        shape: of a block in the layer's tensor.
        dtype: of its values, as torch names it ("bfloat16").
        device: where the memory is, as torch names it ("cpu", "cuda:0").
        data: the block_len bytes at address.
        digest: 16 hexadecimal digits of the SHA-256 of the first kv_block_len of them.
    """

    role: Role
    layer: int
    layer_name: str
    block: int
    base_address: int
    block_len: int
    kv_block_len: int
    address: int
    shape: tuple[int, ...]
    dtype: str
    device: str
    data: bytes = field(repr=False)
    digest: str

    @property
    def arithmetic(self) -> str:
        """address = base address + block id × block length (bytes)."""
        return f"{self.address:#x} = {self.base_address:#x} + {self.block} × {self.block_len:,}"

    @property
    def payload(self) -> bytes:
        """The bytes that hold KV, without padding."""
        return self.data[: self.kv_block_len]

    @property
    def layout(self) -> str:
        """What the bytes mean, as text, for a layer that caches keys and values (LBHNC, not MLA)."""
        if len(self.shape) != 3:
            return f"a block is {_times(self.shape)} values of {self.dtype}"
        registered = (
            "blocks × KV heads × tokens × (K and V in the last dimension): "
            f"a block is {_times(self.shape)} values of {self.dtype}"
        )
        return f"{registered}\n{_order(self.device)}"

    def hexdump(self, offset: int = 0, length: int = 64) -> str:
        """`length` bytes from `offset` as text, 16 a line behind the address of the first.

        Raises:
            PdlabError: the block has no such offset.
        """
        whole("length", length)
        if offset not in range(len(self.data)):
            said = f"{offset:,}" if isinstance(offset, int) else repr(offset)
            raise PdlabError(f"the block has no byte {said}", f"its bytes are 0 to {len(self.data) - 1:,}")
        stop = min(offset + length, len(self.data))
        starts = range(offset, stop, 16)
        return "\n".join(f"{self.address + at:#x}  {self.data[at : min(at + 16, stop)].hex(' ')}" for at in starts)

    def differing(self, other: "KVBlock") -> list[tuple[int, int]]:
        """The ranges [start, stop) of bytes in which the KV of two blocks differs, padding aside; [] if they are equal.

        Raises:
            PdlabError: they are not of one length.
        """
        mine, theirs = self.payload, of_kind(other, KVBlock, "give what kv(layer, block) returned").payload
        if len(mine) != len(theirs):
            raise PdlabError(
                f"a block of {len(mine):,} bytes and one of {len(theirs):,} cannot be compared",
                "two engines of a lab have equal lengths if their models, dtypes and block sizes are equal",
            )
        unequal = int.from_bytes(mine) ^ int.from_bytes(theirs)
        return [run.span() for run in re.finditer(rb"[^\0]+", unequal.to_bytes(len(mine)))]

    def __repr__(self) -> str:
        return (
            f"<{self.role} layer {self.layer} block {self.block} at {self.address:#x}: "
            f"{self.block_len:,} bytes, digest {self.digest}>"
        )


def read_block(url: str, token: str | None, layer: int, block: int, role: Role) -> KVBlock:
    """One block of one layer, read from the engine at `url`; with several workers, from the first that holds it.

    Args:
        token: PDLAB_KV_TOKEN of that engine; None if it has none.

    Raises:
        PdlabError: it does not answer, reads no memory, or has no such layer or block.
    """
    found = _ask(url, token, "/pdlab/kv", {"layer": layer, "block": block})
    return KVBlock(
        role=role, base_address=found["base_addr"], shape=tuple(found["shape"]), data=base64.b64decode(found["data"]),
        **{name: found[name] for name in ("layer", "layer_name", "block", "block_len", "kv_block_len", "address")},
        **{name: found[name] for name in ("dtype", "device", "digest")},
    )  # fmt: skip


def read_digests(url: str, token: str | None, blocks: list[int], layers: list[int] | None = None) -> list[list[str]]:
    """Digests of the KV in these blocks of the engine at `url`, [layer][block]; `layers` None means all of them.

    Args:
        token: PDLAB_KV_TOKEN of that engine; None if it has none.

    Raises:
        PdlabError: it does not answer, reads no memory, has no such layer or block, or it is more than 4,096 digests.
    """
    body = {"blocks": blocks} if layers is None else {"blocks": blocks, "layers": layers}
    return list(_ask(url, token, "/pdlab/kv/digests", body))


def _times(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape))


def _order(device: str) -> str:
    if device != "cpu":
        return "of each token of a head: its K, then its V"
    # CPUAttentionBackendImpl.do_kv_cache_update views a head's bytes as (2 × tokens, head size) and halves that.
    return (
        "CPU attention fills a head's bytes in an order of its own: the K of all tokens, then their V, each packed for "
        "this CPU's instructions; so bytes are shown as bytes"
    )


def _ask(url: str, token: str | None, path: str, body: dict[str, Any]) -> Any:
    """The answer of the first worker that has one."""
    if not token:
        raise _off(url)
    try:
        answer = client().post(f"{url}{path}", json=body, headers={"Authorization": f"Bearer {token}"}, timeout=60)
    except httpx.HTTPError as error:
        raise PdlabError(
            f"the instance {url} does not answer ({error})", "is it running, and reachable from here?"
        ) from None
    if answer.status_code != 200:
        raise _refused(url, answer)
    workers = answer.json()["workers"]
    return next(found for found in workers if not (isinstance(found, dict) and "error" in found))


def _off(url: str) -> PdlabError:
    return PdlabError(
        f"reading memory is off in this engine ({url})", "it needs PDLAB_KV_TOKEN in its environment when it starts"
    )


def _refused(url: str, answer: httpx.Response) -> PdlabError:
    if answer.status_code == 404:
        return _off(url)
    try:
        line = str(answer.json()["error"])
    except (ValueError, TypeError, LookupError):
        line = f"it failed with status {answer.status_code}"
    hints = {
        400: "lab.prefill.registered_kv and lab.decode.registered_kv say which layers and blocks there are",
        401: "is this the engine that was started with that token?",
        403: "run the notebook on the machine of the engine",
    }
    return PdlabError(f"{url}: {line}", hints.get(answer.status_code, "its log says why"))
