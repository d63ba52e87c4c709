"""One request through five actors, as one object: on engines that run."""

import itertools
import threading
import time
import uuid
from pathlib import Path

import pytest

from pdlab.errors import RequestError
from pdlab.lab.lab import Lab
from pdlab.source.anchors import ANCHORS
from pdlab.trace.event import ACTORS
from pdlab.trace.journey import Journey
from pdlab.trace.steps import NUMBERS
from tests.live import until

PROMPT = list(range(1000, 1143))
ON_P, ON_D = (1, 2, 3, 4, 5, 6, 14), (1, 2, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 19, 20, 21, 22, 23)


@pytest.fixture(scope="module")
def journey(lab: Lab) -> Journey:
    """Of 143 tokens, after P alone was warmed up, so that block ids differ."""
    for number in range(3):
        lab.prefill.complete(f"{number}: {'something else to read, ' * 20}", max_tokens=2)
    return lab.send(PROMPT, max_tokens=6, fresh=True)


def test_all_steps_are_there_from_five_actors(journey: Journey) -> None:
    assert {step.number for step in journey.steps} == set(NUMBERS)
    assert {step.actor for step in journey.steps} == set(ACTORS)
    assert journey.missing == []
    assert journey.complete


def test_steps_are_in_causal_order(journey: Journey) -> None:
    # Step 1 is twice the proxy's: it belongs to the side whose half is sent, which need not be sent at the same moment.
    halves = {"prefill": "P", "decode": "D"}
    times = {(s.number, halves.get(s.facts.get("role", ""), s.actor[0])): s.time for s in journey.steps}

    def when(number: int, side: str) -> float:
        return times.get((number, side), times.get((number, "PD"[side == "P"]), -1))

    for chain, side in ((ON_P, "P"), (ON_D, "D"), ((16, 17), "P")):
        for before, after in itertools.pairwise(chain):
            assert when(before, side) <= when(after, side), (before, after)


def test_every_step_has_an_anchor_that_resolves(journey: Journey) -> None:
    for step in journey.steps:
        place = ANCHORS[step.anchor].resolve()
        assert place.first_line <= place.marked_first <= place.last_line


def test_threads_are_those_of_the_mechanism(journey: Journey) -> None:
    assert journey.step(15).thread.startswith("vllm-mooncake-sender")
    assert journey.step(9).thread == "MainThread"
    assert "_async_loop" in journey.step(12).thread


def test_blocks_differ_on_the_two_sides(journey: Journey) -> None:
    assert len(journey.prefill.block_ids) == len(journey.decode.block_ids) == 5
    assert journey.prefill.block_ids != journey.decode.block_ids
    assert [block.tokens for block in journey.decode.blocks] == [32, 32, 32, 32, 15]
    assert [block.hashed for block in journey.decode.blocks] == [True, True, True, True, False]
    assert not any(block.hashed for block in journey.decode.tables[0][1])
    assert all(block.ref_count == 1 for block in journey.decode.blocks)


def test_addresses_are_base_plus_block_times_length(lab: Lab, journey: Journey) -> None:
    assert all(write.as_computed for write in journey.writes)
    ours, theirs = (instance.registered_kv["regions"] for instance in (lab.decode, lab.prefill))
    # By layer: where D's free blocks lie apart, a layer has several descriptors.
    to, source = ({w.layer: getattr(w, base) for w in journey.writes} for base in ("destination_base", "source_base"))
    assert list(to.values()) == [region["base_addr"] for region in ours]
    assert list(source.values()) == [region["base_addr"] for region in theirs]
    moved = [block for write in journey.writes if write.layer == 0 for block in write.destination_blocks]
    assert moved == journey.decode.block_ids


def test_it_adds_up(journey: Journey) -> None:
    summary = journey.summary()
    assert summary["prompt_tokens"] == summary["computed_on_prefill"] == 143
    assert summary["computed_on_decode"] == 1
    transfer = summary["transfer"]
    assert (transfer["regions"], transfer["blocks"]) == (30, 5)
    assert transfer["block_bytes"] == 3 * 32 * 2 * 64 * 4  # KV heads × tokens × (K and V) × head size × float32
    assert transfer["bytes"] == journey.bytes_moved == 30 * 5 * transfer["block_bytes"]
    assert transfer["seconds"] > 0


def test_computed_tokens_go_to_n_minus_one_and_back(journey: Journey) -> None:
    assert [count for _, count in journey.computed_tokens["P"]] == [0, 143]
    assert [count for _, count in journey.computed_tokens["D"]][:5] == [0, 143, 142, 143, 144]
    names = [status for _, status in journey.status["D"]]
    assert names == ["WAITING", "WAITING_FOR_REMOTE_KVS", "WAITING", "RUNNING", "FINISHED_LENGTH_CAPPED"]


def test_stages_have_their_seconds(journey: Journey) -> None:
    assert journey.seconds["P computes the prompt"] > 0
    assert journey.seconds["time to first token"] > journey.seconds["D waits for the KV"] > journey.seconds["P writes"]


def test_a_repeated_prompt_pulls_one_block(lab: Lab) -> None:
    prompt = list(range(4000, 4143))
    lab.send(prompt)
    again = lab.send(prompt)
    (first, *_) = again.writes
    assert again.summary()["transfer"]["blocks"] == 1
    assert first.source_blocks == (again.prefill.block_ids[-1],)  # of P's five, the last
    assert first.destination_blocks == (again.decode.block_ids[-1],)
    assert again.step(7).facts["num_computed_tokens"] == 128


@pytest.mark.parametrize(("tokens", "blocks", "hashed"), [(1, 1, 0), (31, 1, 0), (32, 1, 1), (33, 2, 1), (128, 4, 4)])
def test_prompts_of_other_lengths(lab: Lab, tokens: int, blocks: int, hashed: int) -> None:
    journey = lab.send(list(range(5000, 5000 + tokens)), max_tokens=2, fresh=True)
    assert journey.missing == []
    assert len(journey.decode.blocks) == blocks
    assert sum(block.hashed for block in journey.decode.blocks) == hashed
    promoted = journey.step(20).facts
    assert (promoted["num_computed_tokens_before"], promoted["num_computed_tokens_after"]) == (tokens, tokens - 1)


def test_a_fragmented_decode_side_takes_more_descriptors(lab: Lab) -> None:
    fragment(lab)
    journey = lab.send(PROMPT, max_tokens=2, fresh=True)
    ids = journey.decode.block_ids
    runs = 1 + sum(b != a + 1 for a, b in itertools.pairwise(ids))
    assert runs > 1, ids
    assert len(journey.writes) >= 30 * runs
    assert all(write.as_computed for write in journey.writes)
    assert journey.bytes_moved == 30 * 5 * 49152


def fragment(lab: Lab) -> None:
    """Have D's free list begin with blocks that do not follow each other: short requests that end one by one.

    Each fills less than a block, and even the first lasts until the last has its own: in turn they would share one.
    """
    threads = [
        threading.Thread(target=lab.decode.complete, args=([6000 + n] * 8, 12 + 2 * n), kwargs={"ignore_eos": True})
        for n in range(5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_many_at_once_are_kept_apart(lab: Lab) -> None:
    prompts = [list(range(7000 + 50 * n, 7000 + 50 * n + 40 + 20 * n)) for n in range(6)]
    journeys = [lab.submit(prompt, max_tokens=4, fresh=True) for prompt in prompts]
    for prompt, journey in zip(prompts, journeys, strict=True):
        journey.wait()
        assert journey.missing == []
        assert journey.prompt_tokens == journey.prefill.prompt_tokens == journey.decode.prompt_tokens == len(prompt)
        assert journey.bytes_moved == 30 * -(-len(prompt) // 32) * 49152
    assert len({journey.transfer_id for journey in journeys}) == 6


def test_a_half_that_never_came_is_said_to_be_missing(lab: Lab) -> None:
    transfer = f"xfer-{uuid.uuid4()}"
    params = {
        "do_remote_decode": False, "do_remote_prefill": True, "transfer_id": transfer, "remote_engine_id": "nobody",
        "remote_bootstrap_addr": lab.prefill.bootstrap,
    }  # fmt: skip
    with pytest.raises(RequestError):
        lab.decode.complete(PROMPT, 1, kv_transfer_params=params)

    def noted() -> Journey | None:
        found = lab.trace().of(transfer)
        return found if found and found.of("pull.failed") and found.of("load.failed") else None

    assert until(noted)
    journey = noted()
    assert journey is not None
    assert "P scheduler: no event" in journey.missing
    assert "step 5: P is finished and keeps the blocks" in journey.missing
    assert journey.of("pull.failed")[0].facts["reason"].startswith("remote engine_id nobody not found")
    assert journey.of("load.failed")[0].facts["policy"] == "fail"


def test_a_refused_request_has_a_journey_that_says_so(lab: Lab) -> None:
    with pytest.raises(RequestError) as raised:
        lab.send(PROMPT, n=2)
    assert isinstance(raised.value.journey, Journey)
    assert "failed: 400 for the request: not served by prefill/decode" in repr(raised.value.journey)


def test_a_saved_journey_is_the_same(journey: Journey, tmp_path: Path) -> None:
    again = Journey.load(journey.save(tmp_path / "journey.json.gz"))
    assert again.outline() == journey.outline()
    assert again.summary() == journey.summary()
    assert again.writes == journey.writes
    assert again.text == journey.text


def test_the_trace_has_them_all(lab: Lab, journey: Journey) -> None:
    began = time.monotonic()
    new = lab.send(PROMPT, max_tokens=2)
    trace = lab.trace()
    assert trace.of(str(journey.transfer_id)) is not None
    assert [one.transfer_id for one in lab.trace(since=began)] == [new.transfer_id]
    assert trace.probe_errors == {}
    assert {event.name for event in trace.startup} >= {"kv.registered", "bootstrap.registered"}


def test_no_prompt_is_in_the_trace(lab: Lab) -> None:
    words = "unmistakable marmalade"
    lab.send(f"{words} {words}")
    ids = lab.send([31337, 31338, 31339] * 20).prompt_tokens
    assert ids == 60
    assert lab.trace_folder is not None
    text = "".join(path.read_text() for path in lab.trace_folder.glob("*.jsonl"))
    assert "marmalade" not in text
    assert "31337,31338" not in text.replace(" ", "")


def test_the_outline_is_the_same_each_time(lab: Lab) -> None:
    first = lab.send(PROMPT, max_tokens=6, fresh=True).outline()
    with lab.hold("before_decode_send") as hold:  # P comes first this time
        journey = lab.submit(PROMPT, max_tokens=6, fresh=True)
        hold.wait()
        journey.until(6)
    assert journey.wait().outline() == first
