"""What the probes in a worker capture. Each is a generator over one call: see pdlab.inside.tracer."""

import time
from collections.abc import Iterable
from typing import Any

from pdlab.inside.scheduler_probes import plain
from pdlab.inside.tracer import Seen, Tracer, is_off

DESCRIPTORS_NOTED = 4_096  # of one transfer

# Which transfers a `_send_blocks` call is for: it is only given addresses. By the identity of its list of them.
planned: dict[int, list[str]] = {}


def register_kv_caches(trace: Tracer, worker: Any, kv_caches: Any) -> Seen:
    yield
    columns = zip(
        worker.registered_layer_names, worker.kv_caches_base_addr, worker.block_len_per_layer,
        worker.kv_block_len_per_layer, strict=True,
    )  # fmt: skip
    tensor = next(iter(kv_caches.values()))
    trace.note(
        "worker", "kv.registered", engine_id=worker.engine_id, rpc_port=worker.rpc_port, tp_rank=worker.tp_rank,
        regions=[list(column) for column in columns], storages=len(worker.seen_base_addresses),
        shape=list(getattr(tensor, "shape", ())), dtype=str(getattr(tensor, "dtype", "")),
    )  # fmt: skip
    if not isinstance(worker._xfer_meta_decoder, _Tee):
        worker._xfer_meta_decoder = _Tee(worker._xfer_meta_decoder, "decode", trace, pull_received)
        encoded = answer_encoded if worker.is_kv_producer else pull_encoded
        worker._encoder = _Tee(worker._encoder, "encode", trace, encoded)


class _Tee:
    """A codec of msgspec, whose messages are seen as they pass: the pull message and its answer, as on the wire."""

    def __init__(self, codec: Any, method: str, trace: Tracer, look: Any) -> None:
        self._codec, self._trace, self._look = codec, trace, look
        setattr(self, method, getattr(self, f"_{method}"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codec, name)

    def _decode(self, raw: Any) -> Any:
        message = self._codec.decode(raw)
        self._seen(message, len(raw))
        return message

    def _encode(self, message: Any) -> Any:
        raw = self._codec.encode(message)
        self._seen(message, len(raw))
        return raw

    def _seen(self, message: Any, size: int) -> None:
        if is_off():
            return
        try:
            self._look(self._trace, message, size)
        except Exception as error:
            self._trace.failed(self._look.__name__, error)


def pull_encoded(trace: Tracer, message: Any, size: int) -> None:
    transfers = [transfer for transfer, _ in message.req_blocks.values()]
    trace.note("worker", "pull.encoded", transfers, bytes=size, fields=message_fields(message))


def pull_received(trace: Tracer, message: Any, size: int) -> None:
    for d_req_id, (transfer, _) in message.req_blocks.items():
        trace.follow(d_req_id, transfer)  # P's answer names D's ids
    transfers = [transfer for transfer, _ in message.req_blocks.values()]
    trace.note("worker", "pull.received", transfers, bytes=size, fields=message_fields(message))


def answer_encoded(trace: Tracer, message: Any, size: int) -> None:
    ok, failed = list(message.ok_reqs or ()), list(message.err_reqs or ())
    trace.note(
        "worker", "answer.sent", transfers_of(trace, ok + failed), bytes=size, status=message.status.name,
        ok_reqs=ok, err_reqs=failed, err_msg=message.err_msg,
    )  # fmt: skip


def message_fields(message: Any) -> dict[str, Any]:
    """The fields of a `MooncakeXferMetadata`, as they are."""
    return {name: getattr(message, name) for name in message.__struct_fields__}


def register_with_bootstrap(trace: Tracer, worker: Any) -> Seen:
    yield
    trace.note(
        "worker", "bootstrap.registered", engine_id=worker.engine_id, dp_rank=worker.dp_rank, tp_rank=worker.tp_rank,
        pp_rank=worker.pp_rank, side_channel_port=worker.side_channel_port,
    )  # fmt: skip


def bootstrap_query(trace: Tracer, server: Any) -> Seen:
    workers = yield
    answered = {rank: entry.engine_id for rank, entry in workers.items()}
    if answered != getattr(server, "_pdlab_answered", None):  # the proxy asks again and again
        server._pdlab_answered = answered
        trace.note("worker", "bootstrap.queried", engine_ids=answered)


def start_load_kv(trace: Tracer, worker: Any, reqs_to_recv: Any) -> Seen:
    for engine, pulls in reqs_to_recv.items():
        for request_id, pull in pulls.items():
            trace.follow(request_id, pull.transfer_id)
            trace.note(
                "worker", "engine.known" if engine in worker._remote_agents else "engine.unknown", pull.transfer_id,
                request_id, remote_engine_id=engine, remote_bootstrap_addr=pull.remote_bootstrap_addr,
            )  # fmt: skip
    yield


def handle_new_engine_id(trace: Tracer, worker: Any, remote_engine_id: str, pull_metas: Any) -> Seen:
    pulls, began = dict(pull_metas), time.monotonic()
    yield
    agents = worker._remote_agents.get(remote_engine_id)
    for request_id, pull in pulls.items():
        trace.note(
            "worker", "engine.asked", pull.transfer_id, request_id, remote_engine_id=remote_engine_id,
            remote_bootstrap_addr=pull.remote_bootstrap_addr, found=agents is not None, worker_addrs=agents,
            seconds=time.monotonic() - began,
        )  # fmt: skip


def receive_from_worker(trace: Tracer, worker: Any, worker_addr: str, pull_metas: Any) -> Seen:
    pulls, began = dict(pull_metas), time.monotonic()
    for request_id, pull in pulls.items():
        trace.note(
            "worker", "pull.started", pull.transfer_id, request_id, worker_addr=worker_addr,
            block_ids=plain(pull.local_block_ids), requests_in_message=len(pulls),
        )  # fmt: skip
    yield
    for request_id, pull in pulls.items():
        trace.note(
            "worker", "pull.ended", pull.transfer_id, request_id, failed=pull.failed, seconds=time.monotonic() - began
        )


def send_kv_to_decode(trace: Tracer, worker: Any, identity: Any, sock: Any, meta: Any) -> Seen:
    for d_req_id, (transfer, block_ids) in meta.req_blocks.items():
        entry = worker.reqs_need_send.get(transfer)
        trace.note(
            "worker", "pull.matched", transfer, d_req_id, known=entry is not None,
            ready=entry is not None and entry.ready.is_set(), p_req_id=entry and entry.p_req_id,
            d_block_ids=plain(block_ids), waiting_in_queue=worker.sender_worker_queue.qsize(),
        )  # fmt: skip
    yield


def record_send_reqs(trace: Tracer, worker: Any, metadata: Any) -> Seen:
    asked = {request_id: (transfer, plain(ids)) for request_id, (transfer, ids) in metadata.reqs_to_send.items()}
    dropped = list(metadata.reqs_not_processed)
    before = {transfer: entry_of(worker, transfer) for transfer, _ in asked.values()}
    yield
    for request_id, (transfer, block_ids) in asked.items():
        trace.follow(request_id, transfer)
        trace.note(
            "worker", "send.recorded", transfer, request_id, block_ids=block_ids, before=before[transfer],
            after=entry_of(worker, transfer),
        )  # fmt: skip
    for transfer in dropped:
        trace.note("worker", "send.dropped", transfer)


def entry_of(worker: Any, transfer: str) -> dict[str, Any] | None:
    """What `reqs_need_send` holds under a transfer_id (a `SendBlockMeta`); None: nothing."""
    entry = worker.reqs_need_send.get(transfer)
    if entry is None:
        return None
    expires = entry.expire_time - time.perf_counter()
    return {
        "p_req_id": entry.p_req_id, "block_ids": plain(entry.local_block_ids), "ready": entry.ready.is_set(),
        "expires_in": None if expires == float("inf") else round(expires, 3),
        "need_send": entry.need_send, "sent": entry.sent, "sending": entry.sending,
    }  # fmt: skip


def build_transfer_params(
    trace: Tracer, worker: Any, ready_reqs: Any, agent_meta: Any, local_regions: Any, remote_regions: Any
) -> Seen:
    requests = [
        [d_req_id, entry.transfer_id, plain(entry.local_block_ids), plain(agent_meta.req_blocks[d_req_id][1])]
        for d_req_id, entry in ready_reqs
    ]
    src, dst, lengths, err_reqs, err_msg = yield
    transfers = [request[1] for request in requests]
    if src:
        planned[id(src)] = transfers
    regions = [
        [p.layer_name, p.base_addr, p.block_len, p.kv_block_len, d.base_addr, d.block_len, d.kv_block_len]
        for p, d in zip(local_regions, remote_regions, strict=True)
    ]
    trace.note(
        "worker", "transfer.planned", transfers, requests=requests, regions=regions,
        src_ptrs=src[:DESCRIPTORS_NOTED], dst_ptrs=dst[:DESCRIPTORS_NOTED], lengths=lengths[:DESCRIPTORS_NOTED],
        descriptors=len(src), err_reqs=list(err_reqs), err_msg=err_msg,
    )  # fmt: skip


def send_blocks(trace: Tracer, worker: Any, remote_session: str, src: Any, dst: Any, lengths: Any) -> Seen:
    transfers, began = planned.pop(id(src), []), time.monotonic()
    facts = {"remote_session": remote_session, "descriptors": len(src), "bytes": sum(lengths)}
    trace.note("worker", "transfer.started", transfers, **facts)
    result = yield
    trace.note("worker", "transfer.written", transfers, **facts, result=result, seconds=time.monotonic() - began)


def process_pulling_result(trace: Tracer, worker: Any, response: Any, pull_metas: Any) -> Seen:
    yield
    failed = set(response.err_reqs or ())
    for request_id in [*(response.ok_reqs or ()), *failed]:
        pull = pull_metas[request_id]
        trace.note(
            "worker", "answer.received", pull.transfer_id, request_id, status=response.status.name,
            ok=request_id not in failed, err_msg=response.err_msg, pull_tasks_count=pull.pull_tasks_count,
            finished_recving=request_id in worker.finished_recving_reqs,
        )  # fmt: skip


def handle_failed_recv(trace: Tracer, worker: Any, pull_metas: Any, req_ids: Any, reason: str) -> Seen:
    known = {request_id: pull_metas[request_id] for request_id in req_ids if request_id in pull_metas}
    pulls = {request_id: pull for request_id, pull in known.items() if not pull.failed}  # each fails once
    yield
    for request_id, pull in pulls.items():
        trace.note("worker", "pull.failed", pull.transfer_id, request_id, reason=reason)


def get_transfer_results(trace: Tracer, worker: Any) -> Seen:
    results = yield
    for way in ("finished_sending", "finished_recving", "failed_recving"):
        ids = sorted(getattr(results, way, None) or ())
        if ids:
            trace.note("worker", "transfers.finished", transfers_of(trace, ids), way=way, request_ids=ids)


def fetch_finished_sending(trace: Tracer, worker: Any) -> Seen:
    before = dict(worker.reqs_need_send) if worker.reqs_need_send else {}
    if not before:
        return
    yield
    for transfer in before.keys() - worker.reqs_need_send.keys():  # it drops those that have expired, no others
        trace.note("worker", "send.expired", transfer, before[transfer].p_req_id)


def transfers_of(trace: Tracer, request_ids: Iterable[str]) -> list[str]:
    return [trace.transfer_of[request_id] for request_id in request_ids if request_id in trace.transfer_of]
