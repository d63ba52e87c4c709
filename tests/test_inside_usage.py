"""What an engine says it holds: counted in vLLM's own scheduler, in this process (see tests/engine.py)."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from pdlab.inside.usage import METHOD, count_in_engine_core, of_scheduler, of_worker
from tests.helpers import engine_module

PROMPT = range(7_000_000, 7_000_143)  # five blocks
NOTHING = {"blocks": 99, "used_blocks": 0, "running": 0, "waiting": 0, "parked": 0, "kept": 0}


@pytest.fixture(scope="module")
def e() -> Any:
    return engine_module()


def test_p_keeps_the_blocks_of_what_it_has_computed(e: Any, tmp_path: Path) -> None:
    p = e.Engine("P", tmp_path / "model")
    assert of_scheduler(p.scheduler) == NOTHING
    p.add("a", PROMPT, e.for_p("x"))
    assert of_scheduler(p.scheduler) == NOTHING | {"waiting": 1}
    p.step()
    assert of_scheduler(p.scheduler) == NOTHING | {"used_blocks": 5, "kept": 1}
    p.step(finished_sending={"a"}, finished_recving=None, invalid_block_ids=set())
    assert of_scheduler(p.scheduler) == NOTHING


def test_d_parks_what_waits_and_keeps_the_blocks_of_what_was_aborted(e: Any, tmp_path: Path) -> None:
    d = e.Engine("D", tmp_path / "model")
    d.add("a", PROMPT, e.for_d("x"), 20)
    d.step()
    assert of_scheduler(d.scheduler) == NOTHING | {"used_blocks": 5, "parked": 1}
    d.scheduler.finish_requests("a", e.RequestStatus.FINISHED_ABORTED)
    assert of_scheduler(d.scheduler) == NOTHING | {"used_blocks": 5, "kept": 1}


def test_a_worker_s_entries() -> None:
    entries = {"x": SimpleNamespace(p_req_id="a"), "y": SimpleNamespace(p_req_id="")}
    assert of_worker(SimpleNamespace(reqs_need_send=entries)) == {"sends": 2, "placeholders": 1}
    assert of_worker(SimpleNamespace()) == {"sends": 0, "placeholders": 0}  # D has none


def test_engine_core_can_be_asked(e: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine.core import EngineCore

    monkeypatch.delattr(EngineCore, METHOD, raising=False)
    count_in_engine_core()
    core = SimpleNamespace(scheduler=e.Engine("P", tmp_path / "model").scheduler)
    assert getattr(EngineCore, METHOD)(core) == NOTHING
    monkeypatch.delattr(EngineCore, METHOD)
