"""The anchors: where each step, probe point and claim is in vLLM 0.32.0, by symbol and marker."""

from pdlab.source.anchor import Anchor

MOONCAKE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake"
CONNECTOR = f"{MOONCAKE}.mooncake_connector"
BOOTSTRAP = f"{MOONCAKE}.mooncake_utils:MooncakeBootstrapServer"
PLANNER = f"{CONNECTOR}:MooncakeConnectorScheduler"  # the connector's half in the scheduler
WORKER = f"{CONNECTOR}:MooncakeConnectorWorker"
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
MANAGER = "vllm.v1.core.kv_cache_manager:KVCacheManager"
POOL = "vllm.v1.core.block_pool:BlockPool"
ENGINE = "vllm.v1.engine.core"
PROXY = "pdlab.lab.proxy:Proxy"
BODIES = "pdlab.lab.bodies"

ANCHORS: dict[str, Anchor] = {
    # Before the first request
    "start.registration": Anchor(f"{WORKER}.register_kv_caches", "self.engine.batch_register_memory("),
    "start.bootstrap": Anchor(f"{WORKER}.register_worker_with_bootstrap", "client.post("),
    # The journey of one request
    "step.1": Anchor(f"{PROXY}.double_send", 'self.send("prefill"'),
    "step.2": Anchor(f"{SCHEDULER}.add_request", "self._enqueue_waiting_request("),
    "step.3": Anchor(f"{SCHEDULER}.schedule", "request.status = RequestStatus.RUNNING"),
    "step.4": Anchor(f"{WORKER}.record_send_reqs", "SendBlockMeta("),
    "step.5": Anchor(f"{PLANNER}.request_finished", "self._reqs_need_send["),
    "step.6": Anchor(f"{WORKER}.record_send_reqs", "send_meta.ready.set()"),
    "step.7": Anchor(f"{PLANNER}.get_num_new_matched_tokens", "return count, True"),
    "step.8": Anchor(f"{SCHEDULER}.schedule", "delay_cache_blocks=load_kv_async"),
    "step.9": Anchor(f"{SCHEDULER}.schedule", "RequestStatus.WAITING_FOR_REMOTE_KVS"),
    "step.10": Anchor(f"{PLANNER}.build_connector_meta", "meta.add_new_req("),
    "step.11": Anchor(f"{WORKER}.handle_new_engine_id", "self._connect_to_prefiller_bootstrap("),
    "step.12": Anchor(f"{WORKER}.receive_kv_from_single_worker", "sock.send(encoded_data)"),
    "step.13": Anchor(f"{WORKER}.send_kv_to_decode", "transfer_id not in self.reqs_need_send"),
    "step.14": Anchor(f"{WORKER}._build_transfer_params", "src_ptrs.append("),
    "step.15": Anchor(f"{WORKER}._send_blocks", "batch_transfer_sync_write("),
    "step.16": Anchor(f"{WORKER}.send_kv_to_decode", "ok_reqs=["),
    "step.17": Anchor(f"{SCHEDULER}._update_from_kv_xfer_finished", "kv_connector_output.finished_sending"),
    "step.18": Anchor(f"{WORKER}.process_pulling_result", "self.finished_recving_reqs.add("),
    "step.19": Anchor(f"{SCHEDULER}._update_from_kv_xfer_finished", "self.finished_recving_kv_req_ids.add("),
    "step.20": Anchor(f"{SCHEDULER}._update_waiting_for_remote_kv", "request.num_tokens - 1"),
    "step.21": Anchor(f"{SCHEDULER}.schedule", "tokens = request.num_computed_tokens"),
    "step.22": Anchor(f"{SCHEDULER}._update_request_with_output", "request.append_output_token_ids("),
    "step.23": Anchor(f"{SCHEDULER}._free_blocks", "self._free_request_blocks("),
    # What the probes wrap
    "probe.register_worker": Anchor(f"{BOOTSTRAP}.register_worker"),
    "probe.query": Anchor(f"{BOOTSTRAP}.query"),
    "probe.register_kv_caches": Anchor(f"{WORKER}.register_kv_caches"),
    "probe.register_worker_with_bootstrap": Anchor(f"{WORKER}.register_worker_with_bootstrap"),
    "probe.preprocess_add_request": Anchor(f"{ENGINE}:EngineCore.preprocess_add_request"),
    "probe.add_request": Anchor(f"{SCHEDULER}.add_request"),
    "probe.get_num_new_matched_tokens": Anchor(f"{PLANNER}.get_num_new_matched_tokens"),
    "probe.get_computed_blocks": Anchor(f"{MANAGER}.get_computed_blocks"),
    "probe.allocate_slots": Anchor(f"{MANAGER}.allocate_slots"),
    "probe._inflight_prefill_reserved_blocks": Anchor(f"{SCHEDULER}._inflight_prefill_reserved_blocks"),
    "probe.update_state_after_alloc": Anchor(f"{PLANNER}.update_state_after_alloc"),
    "probe.build_connector_meta": Anchor(f"{PLANNER}.build_connector_meta"),
    "probe.schedule": Anchor(f"{SCHEDULER}.schedule"),
    "probe._preempt_request": Anchor(f"{SCHEDULER}._preempt_request"),
    "probe._update_request_with_output": Anchor(f"{SCHEDULER}._update_request_with_output"),
    "probe._start_load_kv": Anchor(f"{WORKER}._start_load_kv"),
    "probe.handle_new_engine_id": Anchor(f"{WORKER}.handle_new_engine_id"),
    "probe.start_load_kv": Anchor(f"{WORKER}.start_load_kv"),
    "probe._connect_to_prefiller_bootstrap": Anchor(f"{WORKER}._connect_to_prefiller_bootstrap"),
    "probe.receive_kv": Anchor(f"{WORKER}.receive_kv"),
    "probe.receive_kv_from_single_worker": Anchor(f"{WORKER}.receive_kv_from_single_worker"),
    "probe._sender_worker": Anchor(f"{WORKER}._sender_worker"),
    "probe.send_kv_to_decode": Anchor(f"{WORKER}.send_kv_to_decode"),
    "probe.record_send_reqs": Anchor(f"{WORKER}.record_send_reqs"),
    "probe.resolve_need_send": Anchor(f"{WORKER}.resolve_need_send"),
    "probe._prepare_transfer_regions": Anchor(f"{WORKER}._prepare_transfer_regions"),
    "probe._build_transfer_params": Anchor(f"{WORKER}._build_transfer_params"),
    "probe.group_concurrent_contiguous": Anchor(f"{CONNECTOR}:group_concurrent_contiguous"),
    "probe._send_blocks": Anchor(f"{WORKER}._send_blocks"),
    "probe.process_pulling_result": Anchor(f"{WORKER}.process_pulling_result"),
    "probe._handle_failed_recv": Anchor(f"{WORKER}._handle_failed_recv"),
    "probe.get_transfer_results": Anchor(f"{WORKER}.get_transfer_results"),
    "probe.fetch_finished_sending_reqs": Anchor(f"{WORKER}.fetch_finished_sending_reqs"),
    "probe._update_from_kv_xfer_finished": Anchor(f"{SCHEDULER}._update_from_kv_xfer_finished"),
    "probe._handle_blocked_waiting_request": Anchor(f"{SCHEDULER}._handle_blocked_waiting_request"),
    "probe._update_waiting_for_remote_kv": Anchor(f"{SCHEDULER}._update_waiting_for_remote_kv"),
    "probe.cache_blocks": Anchor(f"{MANAGER}.cache_blocks"),
    "probe.cache_full_blocks": Anchor(f"{POOL}.cache_full_blocks"),
    "probe._connector_finished": Anchor(f"{SCHEDULER}._connector_finished"),
    "probe.request_finished": Anchor(f"{PLANNER}.request_finished"),
    "probe._free_blocks": Anchor(f"{SCHEDULER}._free_blocks"),
    "probe.free_blocks": Anchor(f"{POOL}.free_blocks"),
    "probe._handle_invalid_blocks": Anchor(f"{SCHEDULER}._handle_invalid_blocks"),
    "probe._handle_failed_recving": Anchor(f"{SCHEDULER}._handle_failed_recving"),
    "probe.finish_requests": Anchor(f"{SCHEDULER}.finish_requests"),
    "probe._set_kv_fetch_stage": Anchor(f"{SCHEDULER}._set_kv_fetch_stage"),
    # What decides each claim that is made of the mechanism
    "claim.1a": Anchor(f"{PROXY}.double_send", "decode_body(body"),
    "claim.1b": Anchor(f"{BODIES}:prefill_body", '"do_remote_decode": True'),
    "claim.1c": Anchor(f"{PLANNER}.update_state_after_alloc", 'params["do_remote_prefill"] = False'),
    "claim.2a": Anchor(f"{PROXY}.double_send", "xfer-{uuid.uuid4()}"),
    "claim.2b": Anchor(f"{WORKER}.send_kv_to_decode", "send_meta.ready.wait()"),
    "claim.2c": Anchor(f"{WORKER}._build_transfer_params", "n_local < n_remote"),
    "claim.3a": Anchor(f"{SCHEDULER}.schedule", "RequestStatus.WAITING_FOR_REMOTE_KVS"),
    "claim.3b": Anchor("vllm.v1.kv_cache_interface:KVCacheConfig.needs_kv_cache_zeroing"),
    "claim.3c": Anchor(f"{SCHEDULER}.schedule", "self._inflight_prefill_reserved_blocks()"),
    "claim.4a": Anchor(f"{WORKER}.receive_kv_from_single_worker", "kv_caches_base_addr="),
    "claim.4b": Anchor(f"{WORKER}._connect_to_prefiller_bootstrap", "client.get("),
    "claim.4c": Anchor(f"{WORKER}._send_blocks", "batch_transfer_sync_write("),
    "claim.4d": Anchor(f"{SCHEDULER}.schedule", "num_new_tokens = 0"),
    "claim.4e": Anchor(f"{ENGINE}:EngineCoreProc.run_engine_core", "_dp{dp_rank}"),
    "claim.5a": Anchor(f"{POOL}.cache_full_blocks", "self._insert_block_hash("),
    "claim.5b": Anchor(f"{SCHEDULER}._update_waiting_for_remote_kv", "computed_tokens == request.num_tokens"),
    "claim.5c": Anchor(f"{WORKER}.send_kv_to_decode", "run_in_executor("),
    "claim.7": Anchor(f"{PLANNER}.request_finished", "delay_free_blocks = any("),
    "claim.9": Anchor(f"{WORKER}.start_load_kv"),
    "claim.10": Anchor(PLANNER),
    "claim.11": Anchor(f"{WORKER}.__init__", "mooncake_protocol"),
}
