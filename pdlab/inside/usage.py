"""What an engine holds now: blocks, requests, and entries of transfers; counted, not named."""

from typing import Any

METHOD = "pdlab_usage"  # of EngineCore: what `EngineCoreClient.call_utility_async` calls


def count_in_engine_core() -> None:
    """Give EngineCore a utility method that counts what its scheduler has."""
    from vllm.v1.engine.core import EngineCore

    setattr(EngineCore, METHOD, lambda core: of_scheduler(core.scheduler))


def of_scheduler(scheduler: Any) -> dict[str, int]:
    """Counts of a `vllm.v1.core.sched.scheduler.Scheduler`.

    Returns:
        blocks (that it can give away: all but the null block), used_blocks; running, waiting and parked requests (in
        `running`, `waiting`, `kv_holding_waiting`); kept: requests that ended and whose blocks it keeps.
    """
    pool = scheduler.kv_cache_manager.block_pool
    requests = list(scheduler.requests.values())
    return {
        "blocks": pool.num_gpu_blocks - 1,
        "used_blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "parked": len(scheduler.kv_holding_waiting),
        "kept": sum(request.is_finished() for request in requests),
    }


def of_worker(worker: Any) -> dict[str, int]:
    """Counts of a `MooncakeConnectorWorker`.

    Returns:
        sends: entries of `reqs_need_send`, on P; placeholders: those among them without a request id, made by a pull
        for a request that P has not finished, or never gets.
    """
    # A copy in one go: the sender's thread changes it meanwhile.
    entries = list(getattr(worker, "reqs_need_send", {}).values())
    return {"sends": len(entries), "placeholders": sum(entry.p_req_id == "" for entry in entries)}
