"""What the probes see of vLLM: of its own scheduler, connector and workers, in this process (see tests/engine.py)."""

import ast
import functools
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm")

from pdlab.inside import scheduler_probes, tracer, worker_probes
from pdlab.inside.probes import MCS, PROBES
from pdlab.inside.tracer import Probe, Tracer
from pdlab.trace.steps import steps_of
from tests.helpers import Noted, engine_module, wait_until
from tests.helpers import tracer as make_tracer

if TYPE_CHECKING:
    from tests.engine import Engine, Pair

N, PROMPT = 143, range(7_000_000, 7_000_143)  # as in tests/engine.py, which only a fixture imports


@pytest.fixture(scope="module")
def e() -> Any:
    return engine_module()


# That they fit the vLLM that is installed ----------------------------------------------------------------------------

each_probe = pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.symbol.rpartition(":")[2])
# Where vLLM calls the functions that are probed.
CALLERS = [
    "vllm.v1.core.sched.scheduler", "vllm.v1.core.sched.async_scheduler", "vllm.v1.core.kv_cache_manager",
    "vllm.v1.engine.core", "vllm.v1.worker.kv_connector_model_runner_mixin", MCS.partition(":")[0],
    MCS.partition(":")[0].replace("connector.v1.mooncake.mooncake_connector", "connector.v1.mooncake.mooncake_utils"),
]  # fmt: skip


@functools.cache
def calls() -> dict[str, set[tuple[int, tuple[str, ...]]]]:
    """How vLLM calls each method: with how many arguments by position, and which by name."""
    found: dict[str, set[tuple[int, tuple[str, ...]]]] = {}
    for module in CALLERS:
        spec = importlib.util.find_spec(module)
        assert spec and spec.origin
        for node in ast.walk(ast.parse(Path(spec.origin).read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                names = tuple(keyword.arg or "**" for keyword in node.keywords)
                starred = any(isinstance(arg, ast.Starred) for arg in node.args)
                if not starred and "**" not in names:
                    found.setdefault(node.func.attr, set()).add((len(node.args), names))
    return found


@each_probe
def test_its_look_takes_what_vllm_s_function_takes(probe: Probe, e: Any) -> None:
    original = getattr(*e.owner_of(probe.symbol))
    parameters = list(inspect.signature(original).parameters.values())
    kinds = {parameter.kind for parameter in parameters}
    assert kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}, probe.symbol
    by_position = [p for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    required = [p.name for p in by_position if p.default is p.empty]
    optional = {p.name for p in parameters} - set(required)
    look = inspect.signature(probe.look)
    for args, kwargs in [
        (required, {}),
        ([p.name for p in by_position], {}),
        (required, dict.fromkeys(optional)),
    ]:
        inspect.signature(original).bind(*args, **kwargs)
        bound = look.bind("a tracer", *args, **kwargs)
        for name, given in bound.arguments.items():  # and takes each for what it is, where it has the same name
            if name in required:
                assert given == name, f"{probe.symbol} gives {given} where its look expects {name}"


@each_probe
def test_its_look_takes_each_call_that_vllm_makes(probe: Probe, e: Any) -> None:
    owner, name = e.owner_of(probe.symbol)
    original, look = inspect.signature(getattr(owner, name)), inspect.signature(probe.look)
    fitting = []
    for count, names in calls().get(name, set()):
        args, kwargs = ["self", *range(count)], dict.fromkeys(names)
        try:
            original.bind(*args, **kwargs)
        except TypeError:
            continue  # of another class
        look.bind("a tracer", *args, **kwargs)
        fitting.append(names)
    # Two are not called, but handed on: to FastAPI, and to the thread pool.
    assert fitting or name in ("query", "_send_blocks"), f"{probe.symbol} is called nowhere"


@each_probe
def test_its_look_is_a_generator_of_one_yield_at_most(probe: Probe) -> None:
    assert inspect.isgeneratorfunction(probe.look)
    source = inspect.getsource(probe.look)
    assert source.count("yield") == 1
    assert probe.event and probe.captures


def test_the_events_of_the_table_are_told_apart() -> None:
    assert len({probe.symbol for probe in PROBES}) == len(PROBES)
    names = [probe.event for probe in PROBES]
    assert {name for name in names if names.count(name) > 1} == {"load.failed"}  # of one and of several groups


# One request, from its admission to the last token -------------------------------------------------------------------


@pytest.fixture(scope="module")
def journey(e: Any, tmp_path_factory: pytest.TempPathFactory) -> "Pair":
    """A request that went through; another one, of D alone, decoded beside it."""
    folder = tmp_path_factory.mktemp("journey")
    made = {side: make_tracer(side, folder) for side in "PD"}
    with e.probed({side: trace for side, (trace, _) in made.items()}):
        pair = e.Pair(folder, made)
        pair.p.memory.random_(256)
        pair.d.add("another", range(8_000_000, 8_000_070), None, max_tokens=1000)
        pair.d.step()
        pair.send("xfer-1")
        pair.run(lambda: "blocks.freed" in pair.d_noted.names and "blocks.freed" in pair.p_noted.names)
        pair.end()
    return pair


def test_each_of_the_engines_steps_is_seen(journey: "Pair") -> None:
    steps = steps_of(journey.events, 0.0)
    assert {step.number for step in steps} == set(range(2, 24))  # the first one is the proxy's
    assert journey.fine()


def test_what_p_s_scheduler_does_is_seen_in_order(journey: "Pair") -> None:
    mine = [event for event in journey.p_noted.events if event.actor == "P scheduler"]
    assert [event.name for event in mine] == [
        "request.added", "tokens.matched", "blocks.allocated", "connector.told", "metadata.built", "scheduled",
        "token.first", "request.finished", "metadata.built", "scheduled", "blocks.freed", "transfer.reported",
    ]  # fmt: skip
    assert {event.transfers for event in mine} == {("xfer-1",)}
    assert {event.request_id for event in mine} == {"p-xfer-1"}
    assert {event.thread for event in mine} == {"MainThread"}
    noted = journey.p_noted
    added = noted.facts("request.added")
    assert (added["num_prompt_tokens"], added["block_hashes"], added["block_size"]) == (N, 4, 32)
    assert added["kv_transfer_params"] == {
        "do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "xfer-1",
    }  # fmt: skip
    allocated = noted.facts("blocks.allocated")
    assert allocated["blocks"] == [[1, 1, 1], [2, 1, 1], [3, 1, 1], [4, 1, 1], [5, 1, 0]]
    assert (allocated["allocated"], allocated["free_before"] - allocated["free_after"]) == (True, 5)
    first, second = (event.facts["block_ids"] for event in noted.named("metadata.built"))
    assert (first, second) == ([], [[1, 2, 3, 4, 5]])
    finished = noted.facts("request.finished")
    assert (finished["status"], finished["delay_free_blocks"]) == ("FINISHED_LENGTH_CAPPED", True)
    freed = noted.facts("blocks.freed")
    assert [references for _, references, _ in freed["blocks"]] == [0] * 5
    assert freed["free_after"] - freed["free_before"] == 5


def test_what_d_s_scheduler_does_is_seen_in_order(journey: "Pair") -> None:
    mine = [event for event in journey.d_noted.events if event.actor == "D scheduler"]
    names = [event.name for event in mine if event.name != "scheduled"]
    assert names == [
        "request.added", "tokens.matched", "stage.set", "blocks.allocated", "connector.told", "stage.set",
        "metadata.built", "stage.set", "transfer.reported", "request.promoted", "blocks.allocated", "connector.told",
        "token.first", "request.finished", "blocks.freed",
    ]  # fmt: skip
    noted = journey.d_noted
    matched = noted.facts("tokens.matched")
    assert (matched["num_computed_tokens"], matched["external_tokens"], matched["load_async"]) == (0, N, True)
    parked, resumed = noted.named("blocks.allocated")
    assert (parked.facts["num_new_tokens"], parked.facts["num_external_computed_tokens"]) == (0, N)
    assert (parked.facts["delay_cache_blocks"], parked.facts["reserved_blocks"]) == (True, 0)
    assert parked.facts["skip_zeroing_group_ids"] == [0]
    assert [has_hash for _, _, has_hash in parked.facts["blocks"]] == [0] * 5
    assert (resumed.facts["num_new_tokens"], resumed.facts["delay_cache_blocks"]) == (1, False)
    told, again = noted.named("connector.told")
    assert told.facts["flags_before"] == {"do_remote_prefill": True, "do_remote_decode": False}
    assert told.facts["flags_after"] == {"do_remote_prefill": False, "do_remote_decode": False}
    assert told.facts["need_recv"] == [[block_id for block_id, _, _ in parked.facts["blocks"]]]
    assert (again.facts["num_external_tokens"], again.facts["need_recv"]) == (0, None)
    assert [event.facts["stage"] for event in noted.named("stage.set")] == [
        "waiting_to_start", "in_progress", "completed_waiting",
    ]  # fmt: skip
    promoted = noted.facts("request.promoted")
    assert (promoted["num_computed_tokens_before"], promoted["num_computed_tokens_after"]) == (N, N - 1)
    assert [has_hash for _, _, has_hash in promoted["blocks"]] == [1, 1, 1, 1, 0]
    assert promoted["load_failed"] is False


def test_the_transfer_is_seen_on_both_sides(journey: "Pair") -> None:
    p, d = journey.p_noted, journey.d_noted
    names = [event.name for event in p.events if event.actor == "P worker"]
    assert sorted(names) == sorted([
        "bootstrap.registered", "kv.registered", "bootstrap.queried", "send.recorded", "send.recorded",
        "pull.received", "pull.matched", "transfer.planned", "transfer.started", "transfer.written", "answer.sent",
        "transfers.finished",
    ])  # fmt: skip
    assert [event.name for event in d.events if event.actor == "D worker"] == [
        "kv.registered", "engine.unknown", "engine.asked", "pull.started", "pull.encoded", "answer.received",
        "pull.ended", "transfers.finished",
    ]  # fmt: skip
    sent, received = d.facts("pull.encoded"), p.facts("pull.received")
    assert sent == received  # bytes and fields: as on the wire
    assert sent["fields"]["kv_caches_base_addr"] == [region[1] for region in d.facts("kv.registered")["regions"]]
    assert p.named("pull.received")[0].transfers == ("xfer-1",)
    planned, written = p.facts("transfer.planned"), p.facts("transfer.written")
    assert planned["descriptors"] == written["descriptors"] == len(planned["lengths"])
    assert sum(planned["lengths"]) == written["bytes"] == 5 * 3 * 8192  # blocks, layers, bytes a block
    assert written["result"] == 0
    assert p.named("transfer.written")[0].transfers == ("xfer-1",)
    assert p.named("transfer.written")[0].thread.startswith("vllm-mooncake-sender")
    assert p.facts("answer.sent")["ok_reqs"] == ["d-xfer-1"]
    assert p.named("answer.sent")[0].transfers == d.named("answer.received")[0].transfers == ("xfer-1",)
    assert d.facts("answer.received")["finished_recving"] is True
    made, ready = (event.facts["after"] for event in p.named("send.recorded"))
    assert (made["ready"], made["expires_in"]) == (False, None)
    assert (ready["ready"], ready["block_ids"]) == (True, [[1, 2, 3, 4, 5]])
    assert 470 < ready["expires_in"] <= 480
    assert d.facts("engine.asked")["found"] is True
    assert p.facts("bootstrap.queried")["engine_ids"] == {"0": "engine-P"}


def test_the_bytes_are_where_they_were_noted_to_go(journey: "Pair") -> None:
    ((_, _, from_blocks, to_blocks),) = journey.p_noted.facts("transfer.planned")["requests"]
    assert bool((journey.p.memory[:, from_blocks[0]] == journey.d.memory[:, to_blocks[0]]).all())
    assert int(journey.d.memory[:, to_blocks[0]].sum()) > 0


def test_of_the_tokens_nothing_is_noted(e: Any, journey: "Pair") -> None:
    text = "\n".join(line for noted in (journey.p_noted, journey.d_noted) for _, line in noted.lines)
    tokens = {*PROMPT, *range(8_000_000, 8_000_070), *range(e.SAMPLED, journey.d.sampled)}
    assert len(tokens) > N + 70 + 20  # as many were sampled
    numbers = {int(number) for number in re.findall(r"(?<![\d.])\d+(?![\d.])", text)}
    assert 143 in numbers and not numbers & tokens
    assert "token_ids" not in text


def test_of_a_request_that_is_not_p_d_s_nothing_is_noted(journey: "Pair") -> None:
    assert "another" not in str([line for _, line in journey.d_noted.lines])
    scheduled = [event.facts for event in journey.d_noted.named("scheduled")]
    assert {facts["scheduled_for_others"] for facts in scheduled} <= {0, 1}  # it is counted, though
    assert any(facts["scheduled_for_others"] == 1 for facts in scheduled)


# What is noted when nothing changes, and what is forgotten ------------------------------------------------------------


@pytest.fixture
def traces(e: Any, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """The probes of P and D, installed, with tracers of this test."""
    made = {side: make_tracer(side, tmp_path) for side in "PD"}
    with e.probed({side: trace for side, (trace, _) in made.items()}):
        yield {"folder": tmp_path, **made}
    for _, noted in made.values():
        noted.close()


Made = tuple["Engine", Tracer, Noted]


@pytest.fixture
def p(e: Any, traces: dict[str, Any]) -> Made:
    return e.Engine("P", traces["folder"] / "model"), *traces["P"]


@pytest.fixture
def d(e: Any, traces: dict[str, Any]) -> Made:
    return e.Engine("D", traces["folder"] / "model"), *traces["D"]


def test_steps_in_which_nothing_changes_are_counted_and_not_noted(e: Any, d: Made) -> None:
    engine, trace, noted = d
    engine.add("another", range(40), None, max_tokens=2000)
    engine.step()
    engine.add("d1", PROMPT, e.for_d("xfer-1"))
    engine.step()
    before = len(noted.lines)
    for _ in range(500):
        engine.step()
    assert len(noted.lines) == before
    parked = noted.facts("scheduled")
    assert (parked["status"], parked["queue"]) == ("WAITING_FOR_REMOTE_KVS", "kv_holding_waiting")
    assert (parked["num_computed_tokens"], parked["num_scheduled_tokens"]) == (N, 0)
    engine.step(finished_recving={"d1"})
    engine.step()
    _, resumed = noted.named("scheduled")
    assert resumed.facts["steps_since"] == resumed.facts["tokens_of_others_since"] == 501
    assert (resumed.facts["num_scheduled_tokens"], resumed.facts["scheduled_for_others"]) == (1, 1)
    assert not trace.errors


def test_of_a_long_decode_the_first_steps_are_noted_and_the_others_counted(e: Any, d: Made) -> None:
    engine, trace, noted = d
    engine.add("d1", PROMPT, e.for_d("xfer-1"), max_tokens=1500)
    engine.step()
    engine.step(finished_recving={"d1"})
    while "d1" in engine.scheduler.requests:
        engine.step()
    assert scheduler_probes.DECODE_STEPS_NOTED == 3
    # Parked, resumed, and the first three steps after its first token.
    assert [event.facts["num_computed_tokens"] for event in noted.named("scheduled")] == [N, N, N + 1, N + 2, N + 3]
    assert len(noted.lines) < 30
    assert noted.facts("blocks.freed")["decode_steps"] == 1499
    assert noted.facts("request.finished")["num_output_tokens"] == 1500
    assert noted.facts("token.first")["num_output_tokens"] == 1
    assert not trace.errors


def test_a_prompt_in_chunks_is_noted_chunk_by_chunk(e: Any, p: Made) -> None:
    engine, trace, noted = p
    engine.add("p1", range(1300), e.for_p("xfer-1"))
    for _ in range(20):
        engine.step()
    chunks = [event.facts["num_scheduled_tokens"] for event in noted.named("scheduled")]
    assert chunks == [512, 512, 276, 0]
    assert noted.facts("token.first")["num_computed_tokens"] == 1300
    assert not trace.errors


def test_while_there_is_no_room_one_refusal_is_noted(e: Any, traces: dict[str, Any]) -> None:
    trace, noted = traces["D"]
    engine = e.Engine("D", traces["folder"] / "model", blocks=8)  # 7 besides the null block
    engine.add("another", range(100), None, max_tokens=100)
    engine.step()
    engine.add("d1", PROMPT, e.for_d("xfer-1"))
    for _ in range(50):
        engine.step()
    refused = noted.facts("blocks.allocated")
    assert (refused["allocated"], refused["refused_before"], refused["blocks"]) == (False, 0, [])
    assert refused["free_before"] == refused["free_after"] == 3
    while len(noted.named("blocks.allocated")) == 1:
        engine.step()
    _, allocated = noted.named("blocks.allocated")
    assert allocated.facts["allocated"] is True
    assert allocated.facts["refused_before"] == 100 - 1  # one a step, until the other was done
    assert len(noted.named("tokens.matched")) == 1  # which is asked as often
    assert not trace.errors


@pytest.mark.parametrize("side", ["P", "D"])
def test_ten_thousand_requests_leave_nothing_behind(side: str, e: Any, traces: dict[str, Any]) -> None:
    trace, noted = traces[side]
    engine = e.Engine(side, traces["folder"] / "model")
    noted.note = lambda event: None
    for first in range(0, 10_000, 16):
        ids = {f"r{number}" for number in range(first, first + 16)}
        for request_id in ids:
            engine.add(request_id, range(5), e.for_p(f"xfer-{request_id}") if side == "P" else e.for_d("xfer"))
        engine.step()
        assert set(trace.followed) == ids
        engine.step(**{"finished_sending" if side == "P" else "finished_recving": ids})
        if side == "D":
            engine.step()
        assert not engine.scheduler.requests
    assert (trace.followed, trace.transfer_of, dict(trace.errors)) == ({}, {}, {})


def test_what_a_worker_remembers_takes_no_room_from_the_scheduler(
    e: Any, p: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    # P's worker follows D's ids too, to say whose answer it sends, and is not told when they end.
    monkeypatch.setattr(tracer, "FOLLOWED_LIMIT", 20)
    engine, trace, noted = p
    for number in range(100):
        message = xfer_metadata(e, {f"d{number}": (f"xfer-{number}", [[1]])})
        worker_probes.pull_received(trace, message, 100)
        engine.add(f"p{number}", range(5), e.for_p(f"xfer-{number}"))
        engine.step()
        engine.step(finished_sending={f"p{number}"})
    assert [event.transfers for event in noted.named("blocks.freed")] == [(f"xfer-{n}",) for n in range(100)]
    assert len(trace.transfer_of) <= 20
    assert not trace.errors


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": True}, {"transfer_id": 7}, {"transfer_id": None}])
def test_a_request_without_a_transfer_id_is_not_followed(params: Any, e: Any, d: Made, p: Made) -> None:
    for engine, trace, noted in (d, p):
        if engine.side == "D" and params and params.get("do_remote_decode"):
            continue  # D's connector takes none
        engine.add("r1", PROMPT, params, max_tokens=10)
        while engine.scheduler.requests:
            engine.step()
        assert (noted.lines, trace.followed, trace.transfer_of, dict(trace.errors)) == ([], {}, {}, {})


# Failures, aborts, preemption ----------------------------------------------------------------------------------------


def parked(e: Any, made: Made, request_id: str = "d1") -> list[int]:
    """Park a request of D; the ids of its blocks."""
    engine, _, noted = made
    engine.add(request_id, PROMPT, e.for_d(f"xfer-{request_id}"), max_tokens=5)
    engine.step()
    return [block_id for block_id, _, _ in noted.named("blocks.allocated")[-1].facts["blocks"]]


def aborts(noted: Noted) -> list[tuple[Any, ...]]:
    facts = [(event.transfers, event.facts) for event in noted.named("request.aborted")]
    return [(*transfers, f["status_before"], f["status_after"], f["blocks_kept"]) for transfers, f in facts]


def test_an_abort_while_parked_keeps_the_blocks(e: Any, d: Made) -> None:
    engine, trace, noted = d
    parked(e, d)
    engine.scheduler.finish_requests("d1", e.RequestStatus.FINISHED_ABORTED)
    assert aborts(noted) == [("xfer-d1", "WAITING_FOR_REMOTE_KVS", "FINISHED_ABORTED", True)]
    assert "blocks.freed" not in noted.names and set(trace.followed) == {"d1"}
    engine.step(finished_recving={"d1"})
    reported = noted.facts("transfer.reported")
    assert (reported["status_before"], reported["status_after"]) == ("FINISHED_ABORTED", None)
    assert noted.facts("blocks.freed")["free_after"] == 99
    assert (trace.followed, trace.transfer_of, dict(trace.errors)) == ({}, {}, {})


def test_an_abort_before_the_first_step_tells_p_with_an_empty_pull(e: Any, d: Made) -> None:
    engine, trace, noted = d
    engine.add("d1", PROMPT, e.for_d("xfer-1"))
    engine.scheduler.finish_requests(["d1"], e.RequestStatus.FINISHED_ABORTED)
    assert aborts(noted) == [("xfer-1", "WAITING", "FINISHED_ABORTED", False)]
    finished = noted.facts("request.finished")
    assert (finished["status"], finished["delay_free_blocks"]) == ("FINISHED_ABORTED", False)
    engine.step()
    built = noted.named("metadata.built")[0]
    assert (built.transfers, built.facts["kind"], built.facts["block_ids"]) == (("xfer-1",), "recv", [])
    assert (trace.followed, trace.transfer_of, dict(trace.errors)) == ({}, {}, {})


def test_an_abort_of_p_tells_the_worker_to_drop_it(e: Any, p: Made) -> None:
    engine, trace, noted = p
    engine.add("p1", range(1300), e.for_p("xfer-1"))
    engine.step()
    engine.scheduler.finish_requests(iter(["p1"]), e.RequestStatus.FINISHED_ABORTED)  # to be gone through once only
    assert aborts(noted) == [("xfer-1", "RUNNING", "FINISHED_ABORTED", False)]
    assert noted.facts("request.finished")["delay_free_blocks"] is False
    engine.step()
    dropped = noted.named("metadata.built")[-1]
    assert (dropped.transfers, dropped.request_id, dropped.facts) == (("xfer-1",), None, {"kind": "not processed"})
    assert (trace.followed, trace.transfer_of, dict(trace.errors)) == ({}, {}, {})


def test_only_what_was_aborted_is_noted_as_aborted(e: Any, p: Made) -> None:
    engine, trace, noted = p
    for number in range(3):
        engine.add(f"p{number}", range(5), e.for_p(f"xfer-{number}"))
    engine.scheduler.finish_requests([], e.RequestStatus.FINISHED_ABORTED)
    engine.scheduler.finish_requests(["unknown"], e.RequestStatus.FINISHED_ABORTED)
    assert aborts(noted) == []
    engine.step()  # they have finished, and keep their blocks for D
    engine.scheduler.finish_requests(["p0"], e.RequestStatus.FINISHED_ABORTED)
    assert aborts(noted) == []
    engine.add("p3", range(5), e.for_p("xfer-3"))
    engine.scheduler.finish_requests(None, e.RequestStatus.FINISHED_ABORTED)
    assert aborts(noted) == [("xfer-3", "WAITING", "FINISHED_ABORTED", False)]
    assert not trace.errors


def test_a_failed_load_fails_the_request(e: Any, d: Made) -> None:
    engine, trace, noted = d
    blocks = parked(e, d)
    engine.step(finished_recving={"d1"}, invalid_block_ids=set(blocks))
    failed = noted.facts("load.failed")
    before, after = failed["num_computed_tokens_before"], failed["num_computed_tokens_after"]
    assert (failed["policy"], before, after) == ("fail", N, 0)
    assert [row[2] for row in aborts(noted)] == ["FINISHED_ERROR"]
    assert noted.facts("blocks.freed")["status"] == "FINISHED_ERROR"
    assert (trace.followed, trace.transfer_of, dict(trace.errors)) == ({}, {}, {})


def test_a_failed_load_is_computed_again_where_the_policy_says_so(e: Any, traces: dict[str, Any]) -> None:
    trace, noted = traces["D"]
    engine = e.Engine("D", traces["folder"] / "model", policy="recompute")
    blocks = parked(e, (engine, trace, noted))
    engine.step(finished_recving={"d1"}, invalid_block_ids=set(blocks[2:]))
    failed, other = noted.facts("load.failed"), parked(e, (engine, trace, noted), "d2")
    assert (failed["policy"], failed["num_computed_tokens_after"]) == ("recompute", 64)
    promoted = noted.facts("request.promoted")
    assert (promoted["load_failed"], promoted["num_computed_tokens_after"]) == (True, 64)
    engine.step(finished_recving={"d2"}, invalid_block_ids=set(other[2:]))
    engine.step()
    nothing_left = noted.named("request.promoted")[-1].facts
    assert (nothing_left["load_failed"], nothing_left["num_computed_tokens_after"]) == (True, 64)
    while engine.scheduler.requests:
        engine.step()
    assert (trace.followed, trace.transfer_of, dict(trace.errors)) == ({}, {}, {})


def test_a_cold_load_that_failed_whole_gives_its_blocks_back(e: Any, traces: dict[str, Any]) -> None:
    trace, noted = traces["D"]
    engine = e.Engine("D", traces["folder"] / "model", policy="recompute")
    blocks = parked(e, (engine, trace, noted))
    engine.step(finished_recving={"d1"}, invalid_block_ids=set(blocks))
    engine.step()
    promoted = noted.facts("request.promoted")
    assert (len(promoted["blocks_before"]), promoted["blocks"], promoted["num_computed_tokens_after"]) == (5, [], 0)
    assert not trace.errors


def test_a_preemption_shows_the_blocks_that_are_lost(e: Any, traces: dict[str, Any]) -> None:
    trace, noted = traces["D"]
    engine = e.Engine("D", traces["folder"] / "model", blocks=8)
    for name in ("d1", "d2"):
        engine.add(name, range(90), {"transfer_id": f"xfer-{name}"}, max_tokens=80)  # each 3 blocks, later 6
    for _ in range(1000):
        if not engine.scheduler.requests:
            break
        engine.step()
    preempted = noted.named("request.preempted")
    assert preempted and all(event.facts["blocks"] for event in preempted)
    statuses = [event.facts["status"] for event in noted.named("scheduled") if event.request_id == "d2"]
    assert statuses[0] == "RUNNING" and "PREEMPTED" in statuses and statuses[-1] == "RUNNING"
    assert len(noted.lines) < 60
    assert (trace.followed, trace.transfer_of, dict(trace.errors)) == ({}, {}, {})


# The workers, when something goes wrong -------------------------------------------------------------------------------


@pytest.fixture
def pair(e: Any, traces: dict[str, Any]) -> Iterator["Pair"]:
    pair = e.Pair(traces["folder"], traces)
    yield pair
    pair.end()


def test_an_error_of_the_transfer_engine_is_seen_on_both_sides(
    e: Any, pair: "Pair", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair.p.worker.engine, "result", -1)
    pair.send("xfer-1")
    pair.run(lambda: not pair.d.scheduler.requests)
    assert pair.p_noted.facts("transfer.written")["result"] == -1
    wait_until(lambda: "pull.ended" in pair.d_noted.names)
    answer, failed = pair.p_noted.facts("answer.sent"), pair.d_noted.facts("pull.failed")
    assert (answer["ok_reqs"], answer["err_reqs"]) == ([], ["d-xfer-1"])
    assert answer["err_msg"] == failed["reason"] == "Mooncake transfer engine returned -1"
    assert pair.d_noted.facts("answer.received")["ok"] is False
    assert pair.d_noted.facts("pull.ended")["failed"] is True
    assert pair.d_noted.facts("load.failed")["policy"] == "fail"
    assert aborts(pair.d_noted) == [("xfer-1", "WAITING_FOR_REMOTE_KVS", "FINISHED_ERROR", True)]
    assert "blocks.freed" not in pair.p_noted.names  # P keeps them until they expire
    assert pair.fine()


def test_each_failure_is_noted_once(e: Any, pair: "Pair") -> None:
    pull = e.connector.PullReqMeta("d1", "xfer-1", [[1, 2]], "engine-P", "http://127.0.0.1:1")
    for reason in ("the first", "the second"):
        pair.d.worker._handle_failed_recv({"d1": pull}, ["d1", "unknown"], reason)
    assert pair.d_noted.facts("pull.failed")["reason"] == "the first"
    assert pair.fine()


def test_an_engine_that_nobody_knows(e: Any, pair: "Pair") -> None:
    pair.d.add("d1", PROMPT, e.for_d("xfer-1", pair.p.url, engine="engine-X"))
    pair.run()
    assert pair.d_noted.facts("engine.asked")["found"] is False
    assert "engine-X not found" in pair.d_noted.facts("pull.failed")["reason"]
    assert pair.fine()


def test_what_expires_on_p_is_seen(e: Any, pair: "Pair") -> None:
    pair.p.add("p1", PROMPT, e.for_p("xfer-1"))
    e.step_until(lambda: any(entry.ready.is_set() for entry in pair.p.worker.reqs_need_send.values()), pair.p)
    pair.p.worker.reqs_need_send["xfer-1"].expire_time = 0
    pair.run()
    (expired,) = pair.p_noted.named("send.expired")
    assert (expired.transfers, expired.request_id) == (("xfer-1",), "p1")
    assert pair.p_noted.named("transfers.finished")[0].facts == {"way": "finished_sending", "request_ids": ["p1"]}
    assert pair.p_noted.named("blocks.freed")
    assert pair.fine()


def test_a_request_that_p_gives_up_is_dropped_by_its_worker(e: Any, pair: "Pair") -> None:
    pair.p.add("p1", range(1300), e.for_p("xfer-1"))
    e.step_until(lambda: pair.p.worker.reqs_need_send, pair.p)
    pair.p.scheduler.finish_requests("p1", e.RequestStatus.FINISHED_ABORTED)
    e.step_until(lambda: pair.p_noted.named("send.dropped"), pair.p)
    assert pair.p_noted.named("send.dropped")[0].transfers == ("xfer-1",)
    assert pair.fine()


def test_d_may_come_first(e: Any, pair: "Pair") -> None:
    pair.d.add("d-1", PROMPT, e.for_d("xfer-1", pair.p.url))
    e.step_until(lambda: pair.p_noted.named("pull.matched"), pair.p, pair.d)
    assert pair.p_noted.facts("pull.matched")["known"] is False
    pair.p.add("p-1", PROMPT, e.for_p("xfer-1"))
    pair.run()
    made, ready = pair.p_noted.named("send.recorded")
    assert (made.facts["before"]["p_req_id"], ready.facts["after"]["p_req_id"]) == ("", "p-1")
    assert pair.fine()


def test_several_requests_in_one_message_are_one_transfer_of_several(e: Any, pair: "Pair") -> None:
    transfers = [f"xfer-{number}" for number in range(3)]
    for number, transfer in enumerate(transfers):
        pair.send(transfer, prompt=range(1000 * number, 1000 * number + N))
    e.step_until(lambda: len(pair.p_noted.named("send.recorded")) == 6, pair.p)  # all are ready
    pair.run()
    (encoded,) = pair.d_noted.named("pull.encoded")
    assert list(encoded.transfers) == transfers
    written = pair.p_noted.named("transfer.written")
    assert sorted(transfer for event in written for transfer in event.transfers) == transfers
    assert sum(event.facts["bytes"] for event in written) == 3 * 5 * 3 * 8192
    assert not worker_probes.planned
    assert pair.fine()


# The codecs of the wire -----------------------------------------------------------------------------------------------


def xfer_metadata(e: Any, req_blocks: dict[str, Any]) -> Any:
    layers = [[10**14, 2 * 10**14], [8192, 8192], [8192, 8192]]
    return e.connector.MooncakeXferMetadata("127.0.0.1", 4711, 1, 0, req_blocks, *layers)


@pytest.fixture
def codecs(e: Any, tmp_path: Path) -> Iterator[tuple[Any, Any, Tracer, Noted]]:
    """msgspec's encoder, and a decoder of pull messages, as the worker makes them."""
    import msgspec

    trace, noted = make_tracer("P", tmp_path)
    yield msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(e.connector.MooncakeXferMetadata), trace, noted
    noted.close()


def test_the_bytes_on_the_wire_are_the_same(e: Any, codecs: Any) -> None:
    encoder, decoder, trace, noted = codecs
    message = xfer_metadata(e, {"d1": ("xfer-1", [[1, 2]]), "d2": ("xfer-2", [[]])})
    raw = encoder.encode(message)
    seen_in_d = worker_probes._Tee(encoder, "encode", trace, worker_probes.pull_encoded)
    seen_in_p = worker_probes._Tee(decoder, "decode", trace, worker_probes.pull_received)
    assert seen_in_d.encode(message) == raw
    assert seen_in_p.decode(raw) == decoder.decode(raw)
    assert type(seen_in_p.decode(memoryview(raw))) is e.connector.MooncakeXferMetadata
    encoded, received, _ = noted.events
    assert encoded.transfers == received.transfers == ("xfer-1", "xfer-2")
    assert encoded.facts == received.facts
    assert encoded.facts["bytes"] == len(raw)
    fields = encoded.facts["fields"]
    assert fields["req_blocks"] == {"d1": ["xfer-1", [[1, 2]]], "d2": ["xfer-2", [[]]]}
    assert set(fields) == set(e.connector.MooncakeXferMetadata.__struct_fields__)
    assert trace.transfer_of == {"d1": "xfer-1", "d2": "xfer-2"}  # whose they are, when P answers
    assert not trace.errors


def test_an_answer_is_noted_for_those_whose_it_is(e: Any, codecs: Any) -> None:
    encoder, _, trace, noted = codecs
    tee, status = worker_probes._Tee(encoder, "encode", trace, worker_probes.answer_encoded), e.connector
    trace.follow("d1", "xfer-1"), trace.follow("d2", "xfer-2")
    answers = [
        e.connector.MooncakeXferResponse(status.MooncakeXferResponseStatus.CONTINUE, ok_reqs=["d1"]),
        e.connector.MooncakeXferResponse(status.MooncakeXferResponseStatus.FINISH, err_reqs=["d2"], err_msg="late"),
        e.connector.MooncakeXferResponse(status.MooncakeXferResponseStatus.ERROR, err_msg="no rank"),
    ]
    for answer in answers:
        assert tee.encode(answer) == encoder.encode(answer)
    assert [event.transfers for event in noted.events] == [("xfer-1",), ("xfer-2",), ()]
    assert [event.facts["status"] for event in noted.events] == ["CONTINUE", "FINISH", "ERROR"]
    assert [event.facts["bytes"] for event in noted.events] == [len(encoder.encode(answer)) for answer in answers]
    assert not trace.errors


def test_what_a_codec_cannot_read_it_refuses_as_before(codecs: Any) -> None:
    encoder, decoder, trace, noted = codecs
    tee = worker_probes._Tee(decoder, "decode", trace, worker_probes.pull_received)
    for raw in (b"", b"\xc1", encoder.encode({"remote_port": 1})):
        with pytest.raises(Exception) as plain:
            decoder.decode(raw)
        with pytest.raises(type(plain.value)) as seen:
            tee.decode(raw)
        assert str(seen.value) == str(plain.value)
    assert tee.type is decoder.type  # what else it has is there
    assert not noted.lines and not trace.errors


def test_a_message_that_the_probe_does_not_expect_passes(codecs: Any) -> None:
    encoder, _, trace, noted = codecs
    tee = worker_probes._Tee(encoder, "encode", trace, worker_probes.pull_encoded)
    assert tee.encode({"another": 1}) == encoder.encode({"another": 1})
    assert trace.errors == {"pull_encoded": 1}
    assert noted.names == ["probe.failed"]


def test_the_codecs_are_replaced_once(e: Any, pair: "Pair") -> None:
    pages = pair.d.worker.device_kv_caches
    encoder, decoder = pair.d.worker._encoder, pair.d.worker._xfer_meta_decoder
    pair.d.worker.register_kv_caches(pages)
    assert pair.d.worker._encoder is encoder and pair.d.worker._xfer_meta_decoder is decoder
    assert isinstance(encoder, worker_probes._Tee) and not isinstance(encoder._codec, worker_probes._Tee)


def test_many_descriptors_are_cut_short(e: Any, traces: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_probes, "DESCRIPTORS_NOTED", 4)
    trace, noted = traces["P"]
    look = worker_probes.build_transfer_params(trace, None, [], None, [], [])
    next(look)
    src = list(range(10))
    with pytest.raises(StopIteration):
        look.send((src, src, src, [], None))
    planned = noted.facts("transfer.planned")
    assert (planned["src_ptrs"], planned["descriptors"]) == ([0, 1, 2, 3], 10)
    assert worker_probes.planned.pop(id(src)) == []


def test_every_line_can_be_read_again(journey: "Pair") -> None:
    for noted in (journey.p_noted, journey.d_noted):
        for event, line in noted.lines:
            assert json.loads(line)[1] == event.name
            assert len(line) < 20_000
