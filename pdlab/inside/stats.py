"""The `vllm.stat_logger_plugins` entry point: writes down what the engine reports about its steps and transfers.

These are the numbers behind vLLM's own log lines, before they are averaged and rounded: `SchedulerStats` and
`IterationStats` as they reach every stat logger. One JSON object a line, in the file that `PDLAB_STEPS` names.
"""

import json
import os
import time
from pathlib import Path
from typing import Any, TextIO

from vllm.v1.metrics.loggers import StatLoggerBase

LIMIT_BYTES = 16 << 20


class StepLog(StatLoggerBase):
    """Records steps that computed prompt tokens, KV transfers, and finished requests.

    Fields of a line, all optional but `t` (seconds, `time.monotonic`):
        prompt_tokens_scheduled, prompt_requests: of `SchedulerIterationDetails`.
        transfers: list of {seconds, bytes, descriptors}, of `MooncakeKVConnectorStats`.
        failures: {name: count} of the same, where not zero.
        finished: list of {request_id, reason, prompt_tokens, cached_tokens, generated_tokens}.
    """

    def __init__(self, vllm_config: Any, engine_index: int = 0):
        path = os.environ.get("PDLAB_STEPS")
        self._file: TextIO | None = Path(path).open("a", buffering=1) if path else None  # noqa: SIM115

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if self._file is None:
            return
        line = {**_of_scheduler(scheduler_stats), **_of_iteration(iteration_stats)}
        if line:
            self._write({"t": time.monotonic(), **line})

    def _write(self, line: dict[str, Any]) -> None:
        assert self._file is not None
        if self._file.tell() > LIMIT_BYTES:
            self._file.truncate(0)
        self._file.write(json.dumps(line) + "\n")

    def log_engine_initialized(self) -> None:
        pass


def _of_scheduler(stats: Any) -> dict[str, Any]:
    line: dict[str, Any] = {}
    details = getattr(stats, "iteration_details", None)
    if details is not None and details.num_ctx_tokens:
        line["prompt_tokens_scheduled"] = details.num_ctx_tokens
        line["prompt_requests"] = details.num_ctx_requests
    kv = getattr(stats, "kv_connector_stats", None) or {}
    columns = zip(
        kv.get("transfer_duration", ()), kv.get("bytes_transferred", ()), kv.get("num_descriptors", ()), strict=True
    )
    transfers = [{"seconds": s, "bytes": b, "descriptors": d} for s, b, d in columns]
    if transfers:
        line["transfers"] = transfers
    failures = {
        name: len(kv[name])
        for name in ("num_failed_transfers", "num_failed_recvs", "num_kv_expired_reqs")
        if kv.get(name)
    }
    if failures:
        line["failures"] = failures
    return line


def _of_iteration(stats: Any) -> dict[str, Any]:
    finished = getattr(stats, "finished_requests", None) or ()
    rows = [
        {
            "request_id": r.request_id,
            "reason": str(r.finish_reason),
            "prompt_tokens": r.num_prompt_tokens,
            "cached_tokens": r.num_cached_tokens,
            "generated_tokens": r.num_generation_tokens,
        }
        for r in finished
    ]
    return {"finished": rows} if rows else {}
