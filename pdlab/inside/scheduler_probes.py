"""What the probes in a scheduler capture. Each is a generator over one call: see pdlab.inside.tracer."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pdlab.inside.tracer import Seen, Tracer

# Once a request decodes, its state changes with every step. The first of these steps are noted, the others counted.
DECODE_STEPS_NOTED = 3


@dataclass
class Followed:
    """What was noted last of a request, and what happened since."""

    request: Any
    state: tuple[str, int, int] | None = None
    matched: tuple[int, bool] | None = None
    decode_steps: int = 0
    steps_since: int = 0
    tokens_of_others: int = 0
    answered: bool = False
    refused: int = 0


def add_request(trace: Tracer, scheduler: Any, request: Any) -> Seen:
    params = dict(request.kv_transfer_params or {})
    yield
    transfer = params.get("transfer_id")
    if not isinstance(transfer, str):
        return
    trace.follow(request.request_id, transfer)
    trace.followed[request.request_id] = Followed(request)
    trace.note(
        "scheduler", "request.added", transfer, request.request_id,
        status=request.status.name, num_prompt_tokens=request.num_prompt_tokens,
        block_hashes=len(request.block_hashes), block_size=scheduler.block_size,
        kv_transfer_params=params, abort_immediately=request.abort_immediately, **queues(scheduler),
    )  # fmt: skip


def get_num_new_matched_tokens(trace: Tracer, connector: Any, request: Any, num_computed_tokens: int) -> Seen:
    followed = trace.followed.get(request.request_id)
    if followed is None:
        return
    result = yield
    if result != followed.matched:  # it is asked again at each step while there is no room
        followed.matched = result
        trace.note(
            "scheduler", "tokens.matched", trace.transfer_of[request.request_id], request.request_id,
            num_computed_tokens=num_computed_tokens, external_tokens=result[0], load_async=result[1],
        )  # fmt: skip


def allocate_slots(trace: Tracer, manager: Any, request: Any, num_new_tokens: int, *_: Any, **asked: Any) -> Seen:
    followed = trace.followed.get(request.request_id)
    if followed is None or is_decoding(request):
        return
    free = manager.block_pool.get_num_free_blocks()
    result = yield
    refused, followed.refused = followed.refused, followed.refused + 1 if result is None else 0
    if result is None and refused:  # it is tried again at each step while there is no room
        return
    facts = {key: asked[key] for key in sorted(asked) if isinstance(asked[key], bool | int)}
    trace.note(
        "scheduler", "blocks.allocated", trace.transfer_of[request.request_id], request.request_id,
        **facts, num_new_tokens=num_new_tokens, skip_zeroing_group_ids=list(asked.get("skip_zeroing_group_ids", ())),
        allocated=result is not None, refused_before=refused, blocks=table(manager, request.request_id),
        free_before=free, free_after=manager.block_pool.get_num_free_blocks(),
    )  # fmt: skip


def update_state_after_alloc(
    trace: Tracer, connector: Any, request: Any, blocks: Any, num_external_tokens: int
) -> Seen:
    if request.request_id not in trace.followed:
        return
    before = flags(request.kv_transfer_params)
    yield
    needed = getattr(connector, "_reqs_need_recv", {}).get(request.request_id)
    trace.note(
        "scheduler", "connector.told", trace.transfer_of[request.request_id], request.request_id,
        num_external_tokens=num_external_tokens, flags_before=before, flags_after=flags(request.kv_transfer_params),
        need_recv=None if needed is None else plain(needed[1]),
        need_send=request.request_id in getattr(connector, "_reqs_need_send", {}),
    )  # fmt: skip


def set_kv_fetch_stage(trace: Tracer, scheduler: Any, request: Any, stage: str | None) -> Seen:
    if request.request_id not in trace.followed or stage is None:
        return
    yield
    trace.note(
        "scheduler", "stage.set", trace.transfer_of[request.request_id], request.request_id, stage=stage,
        status=request.status.name, num_computed_tokens=request.num_computed_tokens,
    )  # fmt: skip


def build_connector_meta(trace: Tracer, connector: Any, scheduler_output: Any) -> Seen:
    meta = yield
    for engine, pulls in meta.reqs_to_recv.items():
        for request_id, pull in pulls.items():
            trace.note(
                "scheduler", "metadata.built", pull.transfer_id, request_id, kind="recv",
                remote_engine_id=engine, remote_bootstrap_addr=pull.remote_bootstrap_addr,
                block_ids=plain(pull.local_block_ids),
            )  # fmt: skip
    for request_id, (transfer, block_ids) in meta.reqs_to_send.items():
        trace.note("scheduler", "metadata.built", transfer, request_id, kind="send", block_ids=plain(block_ids))
    for transfer in meta.reqs_not_processed:
        trace.note("scheduler", "metadata.built", transfer, kind="not processed")


def schedule(trace: Tracer, scheduler: Any, *_: Any, **__: Any) -> Seen:
    output = yield
    for request_id, followed in list(trace.followed.items()):
        request, mine = followed.request, output.num_scheduled_tokens.get(request_id, 0)
        others = output.total_num_scheduled_tokens - mine
        state = (request.status.name, request.num_computed_tokens, mine)
        if state == followed.state or is_noted_decode(followed, state):
            followed.steps_since += 1
            followed.tokens_of_others += others
            continue
        trace.note(
            "scheduler", "scheduled", trace.transfer_of.get(request_id, ()), request_id,
            status=state[0], num_computed_tokens=state[1], num_scheduled_tokens=mine, scheduled_for_others=others,
            queue=queue_of(scheduler, request), new_block_ids_to_zero=plain(output.new_block_ids_to_zero),
            steps_since=followed.steps_since, tokens_of_others_since=followed.tokens_of_others, **queues(scheduler),
        )  # fmt: skip
        followed.state, followed.steps_since, followed.tokens_of_others = state, 0, 0


def is_noted_decode(followed: Followed, state: tuple[str, int, int]) -> bool:
    """Whether it is one more step of plain decoding, of which enough were noted."""
    if followed.state is None or state[0] != "RUNNING" or followed.state[0] != "RUNNING":
        return False
    if not followed.answered:
        return False
    followed.decode_steps += 1
    return followed.decode_steps > DECODE_STEPS_NOTED


def update_request_with_output(
    trace: Tracer, scheduler: Any, request: Any, new_token_ids: list[int], *_: Any, **__: Any
) -> Seen:
    followed = trace.followed.get(request.request_id)
    if followed is None or followed.answered or not new_token_ids:
        return
    result = yield
    followed.answered = True
    trace.note(
        "scheduler", "token.first", trace.transfer_of[request.request_id], request.request_id,
        num_output_tokens=request.num_output_tokens, num_computed_tokens=request.num_computed_tokens,
        stopped=bool(result[1]), status=request.status.name,
    )  # fmt: skip


def request_finished(trace: Tracer, connector: Any, request: Any, block_ids: Any) -> Seen:
    if request.request_id not in trace.followed:
        return
    before = flags(request.kv_transfer_params)
    result = yield
    trace.note(
        "scheduler", "request.finished", trace.transfer_of[request.request_id], request.request_id,
        status=request.status.name, num_computed_tokens=request.num_computed_tokens,
        num_output_tokens=request.num_output_tokens, block_ids=plain(block_ids), flags_before=before,
        delay_free_blocks=result[0], kv_transfer_params=result[1],
    )  # fmt: skip


def update_from_kv_xfer_finished(trace: Tracer, scheduler: Any, output: Any) -> Seen:
    finished = [(way, request_id) for way in ("recving", "sending") for request_id in of(output, way)]
    before = {request_id: status_of(scheduler, request_id) for _, request_id in finished}
    transfers = {request_id: trace.transfer_of.get(request_id) for _, request_id in finished}
    yield
    for way, request_id in finished:
        if transfer := transfers[request_id]:
            trace.note(
                "scheduler", "transfer.reported", transfer, request_id, way=way, status_before=before[request_id],
                status_after=status_of(scheduler, request_id),
            )  # fmt: skip


def update_waiting_for_remote_kv(trace: Tracer, scheduler: Any, request: Any) -> Seen:
    if request.request_id not in trace.followed:
        return
    manager = scheduler.kv_cache_manager
    computed, blocks = request.num_computed_tokens, table(manager, request.request_id)
    failed = request.request_id in scheduler.failed_recving_kv_req_ids
    yield
    trace.note(
        "scheduler", "request.promoted", trace.transfer_of[request.request_id], request.request_id,
        load_failed=failed, num_tokens=request.num_tokens, num_computed_tokens_before=computed,
        num_computed_tokens_after=request.num_computed_tokens, blocks_before=blocks,
        blocks=table(manager, request.request_id),
    )  # fmt: skip


def handle_failed_loads(trace: Tracer, scheduler: Any, failed: Any, *_: Any) -> Seen:
    waiting = [r for r in trace.followed.values() if r.request.status.name == "WAITING_FOR_REMOTE_KVS"]
    before = {followed.request.request_id: followed.request.num_computed_tokens for followed in waiting}
    affected = yield
    for request_id, computed in before.items():
        request = trace.followed[request_id].request
        if request_id in affected or request.num_computed_tokens != computed:
            trace.note(
                "scheduler", "load.failed", trace.transfer_of[request_id], request_id,
                policy="fail" if request_id in affected else "recompute",
                num_computed_tokens_before=computed, num_computed_tokens_after=request.num_computed_tokens,
            )  # fmt: skip


def preempt_request(trace: Tracer, scheduler: Any, request: Any, *_: Any, **__: Any) -> Seen:
    if request.request_id not in trace.followed:
        return
    blocks = table(scheduler.kv_cache_manager, request.request_id)
    yield
    trace.note(
        "scheduler", "request.preempted", trace.transfer_of[request.request_id], request.request_id, blocks=blocks
    )


def finish_requests(trace: Tracer, scheduler: Any, request_ids: Any, finished_status: Any) -> Seen:
    if isinstance(request_ids, str):
        request_ids = [request_ids]
    elif not isinstance(request_ids, Collection):  # all; or what can be gone through only once, and not by us
        request_ids = trace.followed
    before = [
        (trace.followed[request_id].request, trace.transfer_of[request_id], status_of(scheduler, request_id))
        for request_id in request_ids
        if request_id in trace.followed
    ]
    aborted = yield
    for request, transfer, status in before:
        if request in aborted:
            trace.note(
                "scheduler", "request.aborted", transfer, request.request_id, status_before=status,
                status_after=request.status.name, blocks_kept=request.request_id in scheduler.requests,
            )  # fmt: skip


def free_blocks(trace: Tracer, scheduler: Any, request: Any) -> Seen:
    if request.request_id not in trace.followed:
        return
    manager = scheduler.kv_cache_manager
    blocks, free = list(blocks_of(manager, request.request_id)), manager.block_pool.get_num_free_blocks()
    computed = request.num_computed_tokens
    yield
    trace.note(
        "scheduler", "blocks.freed", trace.transfer_of[request.request_id], request.request_id,
        blocks=[row(block) for block in blocks], free_before=free,
        free_after=manager.block_pool.get_num_free_blocks(), num_computed_tokens=computed,
        status=request.status.name, decode_steps=trace.followed[request.request_id].decode_steps,
    )  # fmt: skip
    trace.forget(request.request_id)


# Small copies of vLLM's state -----------------------------------------------------------------------------------------


def is_decoding(request: Any) -> bool:
    return bool(request.status.name == "RUNNING" and request.num_computed_tokens >= request.num_prompt_tokens)


def blocks_of(manager: Any, request_id: str) -> Any:
    """The `KVCacheBlock`s of a request, in order, of its first KV cache group."""
    return manager.get_blocks(request_id).blocks[0]


def table(manager: Any, request_id: str) -> list[list[int]]:
    """Its block table: [block_id, ref_cnt, whether it has a hash (0 or 1)] for each logical block."""
    return [row(block) for block in blocks_of(manager, request_id)]


def row(block: Any) -> list[int]:
    return [block.block_id, block.ref_cnt, int(block.block_hash is not None)]


def queues(scheduler: Any) -> dict[str, int]:
    names = ("running", "waiting", "kv_holding_waiting")
    return {f"num_{name}": len(getattr(scheduler, name, ())) for name in names}


def queue_of(scheduler: Any, request: Any) -> str | None:
    """The scheduler's queue that holds the request; None where none does."""
    for name in ("running", "kv_holding_waiting", "waiting"):
        if any(held is request for held in getattr(scheduler, name, ())):
            return name
    return None


def status_of(scheduler: Any, request_id: str) -> str | None:
    request = scheduler.requests.get(request_id)
    return None if request is None else request.status.name


def of(output: Any, way: str) -> list[str]:
    return sorted(getattr(output, f"finished_{way}", None) or ())


def flags(params: Mapping[str, Any] | None) -> dict[str, Any]:
    return {key: (params or {}).get(key) for key in ("do_remote_prefill", "do_remote_decode")}


def plain(ids: Any) -> Any:
    """A copy in lists and ints: JSON knows neither tuples nor numpy's integers."""
    if ids is None:
        return None
    return [plain(each) if isinstance(each, list | tuple) else int(each) for each in ids]
