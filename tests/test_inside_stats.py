"""What the engine reports of its steps, written down: vLLM's own statistics objects, no engine."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.stats import MooncakeKVConnectorStats
from vllm.v1.engine import FinishReason
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import FinishedRequestStats, IterationStats, SchedulerIterationDetails, SchedulerStats

from pdlab.inside import stats
from pdlab.inside.stats import StepLog


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "steps.jsonl"
    monkeypatch.setenv("PDLAB_STEPS", str(path))
    return path


@pytest.fixture
def record(steps: Path) -> Callable[..., dict[str, Any] | None]:
    """Have a StepLog record these, and return the line that it wrote."""
    log = StepLog(vllm_config=None)

    def record(scheduler: SchedulerStats | None, iteration: IterationStats | None = None) -> dict[str, Any] | None:
        before = len(lines(steps))
        log.record(scheduler, iteration)
        written = lines(steps)[before:]
        assert len(written) <= 1
        return written[0] if written else None

    return record


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def step(tokens: int, requests: int = 1) -> SchedulerStats:
    details = SchedulerIterationDetails(
        iteration_index=3, num_ctx_requests=requests, num_ctx_tokens=tokens, num_generation_requests=2,
        num_generation_tokens=2, elapsed_ms=1.5,
    )  # fmt: skip
    return SchedulerStats(iteration_details=details)


def transfers(*rows: tuple[float, int, int]) -> MooncakeKVConnectorStats:
    made = MooncakeKVConnectorStats()
    for row in rows:
        made.record_transfer(*row)
    return made


def test_a_step_that_computed_prompt_tokens(record: Callable[..., dict[str, Any] | None]) -> None:
    line = record(step(tokens=77, requests=2))
    assert line is not None
    assert line.pop("t") > 0
    assert line == {"prompt_tokens_scheduled": 77, "prompt_requests": 2}


@pytest.mark.parametrize("scheduler", [None, SchedulerStats(), step(tokens=0, requests=0)])
def test_a_step_that_did_not_is_left_out(
    scheduler: SchedulerStats | None, record: Callable[..., dict[str, Any] | None]
) -> None:
    assert record(scheduler) is None
    assert record(scheduler, IterationStats()) is None


def test_transfers(record: Callable[..., dict[str, Any] | None]) -> None:
    made = transfers((0.25, 4423680, 30), (0.5, 1474560, 150))
    line = record(SchedulerStats(kv_connector_stats=made.clone_and_reset().data))
    assert line is not None
    assert {key: value for key, value in line.items() if key != "t"} == {
        "transfers": [
            {"seconds": 0.25, "bytes": 4423680, "descriptors": 30},
            {"seconds": 0.5, "bytes": 1474560, "descriptors": 150},
        ]
    }
    assert record(SchedulerStats(kv_connector_stats=made.data)) is None  # it was reset


def test_failures(record: Callable[..., dict[str, Any] | None]) -> None:
    made = MooncakeKVConnectorStats()
    made.record_failed_transfer()
    made.record_failed_transfer()
    made.record_kv_expired_req()
    line = record(SchedulerStats(kv_connector_stats=made.data))
    assert line is not None
    assert {key: value for key, value in line.items() if key != "t"} == {
        "failures": {"num_failed_transfers": 2, "num_kv_expired_reqs": 1}
    }


def test_knows_every_statistic_of_the_connector() -> None:
    # One that upstream adds or renames would be lost without a word.
    assert set(MooncakeKVConnectorStats().data) == {
        "transfer_duration", "bytes_transferred", "num_descriptors", "num_failed_transfers", "num_failed_recvs",
        "num_kv_expired_reqs",
    }  # fmt: skip


def test_another_connector_s_statistics_are_no_error(record: Callable[..., dict[str, Any] | None]) -> None:
    assert record(SchedulerStats(kv_connector_stats={"other": [1]})) is None


def test_finished_requests(record: Callable[..., dict[str, Any] | None]) -> None:
    iteration = IterationStats()
    counts = {"num_prompt_tokens": 77, "num_cached_tokens": 64, "num_generation_tokens": 12}
    iteration.finished_requests = [FinishedRequestStats(FinishReason.LENGTH, "cmpl-pdlab-1-0", **counts)]
    finished = {
        "request_id": "cmpl-pdlab-1-0", "reason": "length", "prompt_tokens": 77, "cached_tokens": 64,
        "generated_tokens": 12,
    }  # fmt: skip
    for scheduler, more in ((None, {}), (step(1), {"prompt_tokens_scheduled": 1, "prompt_requests": 1})):
        line = record(scheduler, iteration)
        assert line is not None
        del line["t"]
        assert line == {**more, "finished": [finished]}


def test_a_line_is_on_disk_at_once(steps: Path) -> None:
    log = StepLog(vllm_config=None)
    log.record(step(5), None)
    assert steps.read_text().endswith("\n")


def test_nothing_is_written_without_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PDLAB_STEPS", raising=False)
    monkeypatch.chdir(tmp_path)
    log = StepLog(vllm_config=None)
    log.record(step(5), None)
    log.record(SchedulerStats(kv_connector_stats=transfers((1.0, 2, 3)).data), IterationStats())
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_bounded_and_goes_on(steps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "LIMIT_BYTES", 1000)
    log = StepLog(vllm_config=None)
    sizes = []
    for tokens in range(1, 101):
        log.record(step(tokens), None)
        sizes.append(steps.stat().st_size)
        assert lines(steps)[-1]["prompt_tokens_scheduled"] == tokens
    assert 1000 < max(sizes) < 1200
    restarts = sum(sizes[number] < sizes[number - 1] for number in range(1, 100))
    assert 2 <= restarts <= 20  # and not with each line


def test_two_engines_may_share_the_file(steps: Path) -> None:
    first, second = StepLog(None, engine_index=0), StepLog(None, engine_index=1)
    first.record(step(1), None)
    second.record(step(2), None)
    first.record(step(3), None)
    assert [line["prompt_tokens_scheduled"] for line in lines(steps)] == [1, 2, 3]


def test_is_what_vllm_s_entry_point_wants(steps: Path) -> None:
    assert issubclass(StepLog, StatLoggerBase)
    log: StatLoggerBase = StepLog(None, 0)
    log.record(scheduler_stats=None, iteration_stats=None, mm_cache_stats=None, engine_idx=0)
    log.log_engine_initialized()
    log.log()
    assert steps.read_text() == ""
