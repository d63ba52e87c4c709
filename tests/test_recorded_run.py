"""The real run data/journey.json.gz, played: what its scenes showed on real engines. No engine runs here."""

from itertools import pairwise
from typing import Any

import pytest

import pdlab
from pdlab.errors import RequestError
from pdlab.paths import repo_root
from pdlab.recorded import scenes

TAPE = repo_root() / "data" / "journey.json.gz"
pytestmark = pytest.mark.skipif(
    not TAPE.exists(), reason="data/journey.json.gz is not there: python3 -m pdlab record journey"
)


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PDLAB_RUN", "recorded")
    monkeypatch.delenv("PDLAB_DATA", raising=False)
    return pdlab.up(run="journey")


def test_it_is_small_and_says_on_what_it_was_recorded(lab: Any) -> None:
    assert TAPE.stat().st_size < 300_000
    about = scenes.whole(lab).about
    assert about["versions"]["vllm"] == "0.32.0" and about["model"] == "SmolLM2-135M-Instruct"
    for shown in (repr(lab), repr(lab.decode), repr(scenes.whole(lab)), repr(lab.processes())):
        assert f"; recorded {about['when']} on {about['where']}" in shown


def test_whole_all_23_steps(lab: Any) -> None:
    journey = scenes.whole(lab)
    assert [*dict.fromkeys(sorted(step.number for step in journey.steps))] == list(range(1, 24))
    assert journey.missing == [] and journey.complete and journey.prompt_tokens == 143
    assert len(journey.writes) == 30 * len(runs_of(journey)) and all(write.as_computed for write in journey.writes)
    regions = lab.decode.registered_kv["regions"]
    assert journey.bytes_moved == sum(5 * region["block_len"] for region in regions)
    assert len(journey.token_ids) == 6


def runs_of(journey: Any) -> list[tuple[int, ...]]:
    """The destination blocks of layer 0, by descriptor."""
    return [write.destination_blocks for write in journey.writes if write.layer == 0]


def test_again_a_prefix_hit_still_pulls_the_last_block(lab: Any) -> None:
    first, second = scenes.again(lab)
    assert first.token_ids == second.token_ids
    assert [len(blocks) for journey in (first, second) for blocks in [journey.decode.block_ids]] == [5, 5]
    assert sum(map(len, runs_of(first))) == 5
    assert runs_of(second) == [(second.decode.block_ids[-1],)]
    assert second.writes[0].source_blocks == (second.prefill.block_ids[-1],)


def test_fragmented_blocks_that_lie_apart(lab: Any) -> None:
    journey = scenes.fragmented(lab)
    blocks = journey.decode.block_ids[:5]
    assert all(after != before + 1 for before, after in pairwise(blocks))
    assert len(journey.writes) == 30 * 5 and all(write.as_computed for write in journey.writes)


def test_held_before_the_write(lab: Any) -> None:
    with lab.hold("before_write") as hold:
        journey = lab.submit(scenes.PROMPT, max_tokens=3, fresh=True)
        assert len(hold.wait()) == 1 and lab.held() == {journey.transfer_id: "before_write"}
        assert journey.held == "before_write" and not journey.done and journey.bytes_moved == 0
        assert journey.decode.status[-1][1] == "WAITING_FOR_REMOTE_KVS"
        assert journey.prefill.status[-1][1] == "FINISHED_LENGTH_CAPPED"
        assert len(lab.decode.complete(scenes.OTHER, max_tokens=4).token_ids) == 4
    whole = journey.wait()
    assert whole.missing == [] and len(whole.token_ids) == 3
    assert whole.token_ids == scenes.whole(lab).token_ids[:3]


def test_compared_all_bytes_are_equal(lab: Any) -> None:
    journey, comparison, rewritten = scenes.compared(lab)
    assert comparison.equal and comparison.held == "before_answer" and len(comparison.pairs) == 30 * 5
    assert comparison.bytes == journey.bytes_moved
    assert 0 < len(rewritten) <= 30
    assert {each.block for each in rewritten} == {journey.decode.block_ids[4]}


def test_p_first(lab: Any) -> None:
    journey = scenes.p_first(lab)
    assert journey.step(13).says == "P came first, P is ready"
    assert journey.step(6).time < next(step.time for step in journey.steps if step.actor == "D scheduler")


def test_refused_by_the_proxy(lab: Any) -> None:
    error = scenes.refused(lab)
    assert isinstance(error, RequestError) and error.status == 400 and "more than one answer" in str(error)
