"""The worker extension (`--worker-extension-cls`): what only the worker knows about the KV memory it registered."""

from collections.abc import Callable
from typing import Any, TypeVar

from pdlab.inside.memory import Region, block_digests, block_facts, region_of
from pdlab.inside.usage import of_worker

T = TypeVar("T")


class RegisteredKV:
    """Mixed into vLLM's worker class; reached with `collective_rpc`."""

    def pdlab_registered_kv(self) -> dict[str, Any]:
        """The regions that `MooncakeConnectorWorker.register_kv_caches` registered.

        Returns:
            engine_id; host, rpc_port (Transfer Engine), side_channel_port (ZMQ; 0 on a decode instance);
            regions (a list of {layer, base_addr, block_len, kv_block_len}, lengths in bytes), num_blocks, block_size
            (tokens), tp_rank, pp_rank.
        """
        worker = _connector_worker()
        rows = zip(
            worker.registered_layer_names, worker.kv_caches_base_addr,
            worker.block_len_per_layer, worker.kv_block_len_per_layer, strict=True,
        )  # fmt: skip
        return {
            "engine_id": worker.engine_id,
            "host": worker.hostname,
            "rpc_port": worker.rpc_port,
            "side_channel_port": worker.side_channel_port,
            "regions": [{"layer": n, "base_addr": b, "block_len": bl, "kv_block_len": kl} for n, b, bl, kl in rows],
            "num_blocks": worker.kv_cache_config.num_blocks,
            "block_size": worker.block_size,
            "tp_rank": worker.tp_rank,
            "pp_rank": worker.pp_rank,
        }

    def pdlab_kv_bytes(self, layer: int, block: int) -> dict[str, Any]:
        """One block of one layer, read at its registered address; between two steps of the engine.

        A transfer that is writing at that moment is not waited for.

        Args:
            layer: the layer's index in the model.
            block: a block id as the connector sends it (`_logical_to_kernel_block_ids`).

        Returns:
            What `pdlab.inside.memory.block_facts` returns, or {"error": one line}.
        """

        def facts() -> dict[str, Any]:
            worker = _connector_worker()
            region = region_of(_regions(worker), layer)
            return block_facts(worker.device_kv_caches[region.layer_name], region, block)

        return _or_error(facts)

    def pdlab_kv_digests(self, blocks: list[int], layers: list[int] | None = None) -> list[list[str]] | dict[str, Any]:
        """Digests of the KV in these blocks, [layer][block]; of every registered region if `layers` is None.

        Returns:
            What `pdlab.inside.memory.block_digests` returns, or {"error": one line}.
        """

        def digests() -> list[list[str]]:
            worker = _connector_worker()
            return block_digests(worker.device_kv_caches, _regions(worker), blocks, layers)

        return _or_error(digests)

    def pdlab_worker_usage(self) -> dict[str, Any]:
        """What `pdlab.inside.usage.of_worker` counts, or {"error": one line}."""
        return _or_error(lambda: of_worker(_connector_worker()))

    def pdlab_trace(self, on: bool) -> bool:
        """Trace from now on, or leave everything as vLLM has it, in this worker's process.

        Returns:
            Whether this process has probes at all.
        """
        from pdlab.inside.tracer import switch

        return switch(on)


# Functions and not methods: vLLM takes every attribute of the extension for a call of the worker's.


def _connector_worker() -> Any:
    """The `MooncakeConnectorWorker` of this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().connector_worker


def _regions(worker: Any) -> list[Region]:
    num_blocks = worker.kv_cache_config.num_blocks * worker._physical_blocks_per_logical_kv_block
    rows = zip(
        worker.registered_layer_indices, worker.registered_layer_names, worker.kv_caches_base_addr,
        worker.block_len_per_layer, worker.kv_block_len_per_layer, strict=True,
    )  # fmt: skip
    return [Region(*row, num_blocks) for row in rows]


def _or_error(make: Callable[[], T]) -> T | dict[str, Any]:
    """What `make` returns, or {"error": one line}: a worker must not raise.

    EngineCore survives an exception of a utility call, but `MultiprocExecutor.collective_rpc` stops at the first worker
    that failed and leaves the others' answers in their queues, where the next call, a model step, takes them for its
    own.
    """
    try:
        return make()
    except ValueError as error:
        return {"error": str(error)}
    except Exception as error:
        return {"error": " ".join(f"{type(error).__name__}: {error}".split())}
