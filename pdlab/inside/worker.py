"""The worker extension (`--worker-extension-cls`): what only the worker knows about the KV memory it registered."""

from typing import Any


class RegisteredKV:
    """Mixed into vLLM's worker class; reached with `collective_rpc`."""

    def pdlab_registered_kv(self) -> dict[str, Any]:
        """The regions that `MooncakeConnectorWorker.register_kv_caches` registered.

        Returns:
            engine_id; host, rpc_port (Transfer Engine), side_channel_port (ZMQ; 0 on a decode instance);
            regions (a list of {layer, base_addr, block_len, kv_block_len}, lengths in bytes), num_blocks, block_size
            (tokens), tp_rank, pp_rank.
        """
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker = get_kv_transfer_group().connector_worker
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
