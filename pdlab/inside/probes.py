"""The table of probe points: one line each. Which symbol of vLLM, what is noted, and what is captured."""

from pdlab.inside import scheduler_probes as s
from pdlab.inside import worker_probes as w
from pdlab.inside.tracer import Probe

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
MANAGER = "vllm.v1.core.kv_cache_manager:KVCacheManager"
MOONCAKE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake"
MCS = f"{MOONCAKE}.mooncake_connector:MooncakeConnectorScheduler"
MCW = f"{MOONCAKE}.mooncake_connector:MooncakeConnectorWorker"
BOOTSTRAP = f"{MOONCAKE}.mooncake_utils:MooncakeBootstrapServer"

# fmt: off
PROBES = (
    # The scheduler, and its half of the connector (EngineCore's main thread).
    Probe(f"{SCHEDULER}.add_request", "request.added", s.add_request, "its kv_transfer_params, length, the queues"),
    Probe(f"{MCS}.get_num_new_matched_tokens", "tokens.matched", s.get_num_new_matched_tokens, "local and external tokens"),
    Probe(f"{MANAGER}.allocate_slots", "blocks.allocated", s.allocate_slots, "the arguments, the block table, free blocks"),
    Probe(f"{MCS}.update_state_after_alloc", "connector.told", s.update_state_after_alloc, "flags before and after, blocks to pull"),
    Probe(f"{SCHEDULER}._set_kv_fetch_stage", "stage.set", s.set_kv_fetch_stage, "the stage of its load, its status then"),
    Probe(f"{MCS}.build_connector_meta", "metadata.built", s.build_connector_meta, "what goes to the worker, where not empty"),
    Probe(f"{SCHEDULER}.schedule", "scheduled", s.schedule, "status, queue, computed and scheduled tokens, on change"),
    Probe(f"{SCHEDULER}._update_request_with_output", "token.first", s.update_request_with_output, "that it came, not which"),
    Probe(f"{MCS}.request_finished", "request.finished", s.request_finished, "status, blocks, whether their release waits"),
    Probe(f"{SCHEDULER}._update_from_kv_xfer_finished", "transfer.reported", s.update_from_kv_xfer_finished, "what the worker reported"),
    Probe(f"{SCHEDULER}._update_waiting_for_remote_kv", "request.promoted", s.update_waiting_for_remote_kv, "computed tokens and hashes, before and after"),
    Probe(f"{SCHEDULER}._handle_invalid_blocks", "load.failed", s.handle_failed_loads, "the requests whose load failed, the policy"),
    Probe(f"{SCHEDULER}._handle_failed_recving", "load.failed", s.handle_failed_loads, "the same, with several KV cache groups"),
    Probe(f"{SCHEDULER}._preempt_request", "request.preempted", s.preempt_request, "the blocks it loses"),
    Probe(f"{SCHEDULER}.finish_requests", "request.aborted", s.finish_requests, "status before, whether its blocks are kept"),
    Probe(f"{SCHEDULER}._free_blocks", "blocks.freed", s.free_blocks, "ids, references and hashes after, free blocks"),
    # The worker's half of the connector: main thread, sender and receiver loops, sender pool.
    Probe(f"{MCW}.register_kv_caches", "kv.registered", w.register_kv_caches, "regions: layer, address, lengths"),
    Probe(f"{MCW}.register_worker_with_bootstrap", "bootstrap.registered", w.register_with_bootstrap, "engine id, ranks, port"),
    Probe(f"{BOOTSTRAP}.query", "bootstrap.queried", w.bootstrap_query, "the engine ids it answered with"),
    Probe(f"{MCW}._start_load_kv", "engine.known", w.start_load_kv, "whether P's addresses are known already"),
    Probe(f"{MCW}.handle_new_engine_id", "engine.asked", w.handle_new_engine_id, "what the bootstrap server answered"),
    Probe(f"{MCW}.receive_kv_from_single_worker", "pull.started", w.receive_from_worker, "where to, which blocks, seconds"),
    Probe(f"{MCW}.send_kv_to_decode", "pull.matched", w.send_kv_to_decode, "whether P knows the transfer_id, and is ready"),
    Probe(f"{MCW}.record_send_reqs", "send.recorded", w.record_send_reqs, "the entry of reqs_need_send, before and after"),
    Probe(f"{MCW}._build_transfer_params", "transfer.planned", w.build_transfer_params, "regions, blocks, addresses, lengths"),
    Probe(f"{MCW}._send_blocks", "transfer.written", w.send_blocks, "session, bytes, return code, thread, seconds"),
    Probe(f"{MCW}.process_pulling_result", "answer.received", w.process_pulling_result, "P's answer, as D understands it"),
    Probe(f"{MCW}._handle_failed_recv", "pull.failed", w.handle_failed_recv, "the reason"),
    Probe(f"{MCW}.get_transfer_results", "transfers.finished", w.get_transfer_results, "the three sets, where not empty"),
    Probe(f"{MCW}.fetch_finished_sending_reqs", "send.expired", w.fetch_finished_sending, "whose blocks P kept in vain"),
)
# fmt: on
