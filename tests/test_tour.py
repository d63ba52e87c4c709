"""The tour: what it gathers of a journey, and how it tells it. On a recorded journey of real engines."""

import dataclasses
import json
from typing import Any

import pytest

from pdlab import tour
from pdlab.errors import PdlabError
from pdlab.lab.instance import Instance
from pdlab.trace.answer import Answer
from pdlab.trace.journey import Journey
from tests.helpers import RECORDED

JOURNEY = Journey.load(RECORDED / "journeys" / "plain.json.gz")
FACTS = {
    "kv_role": "kv_producer", "layers": 30, "dtype": "float32", "vllm_version": "0.32.0",
    "workers": [{"engine_id": "e", "regions": [{}] * 30, "num_blocks": 364, "block_size": 32}],
}  # fmt: skip


def lab(alone: Answer = JOURNEY.answer, traced: bool = True) -> Any:
    """What `tour` takes of a lab; sending gives the recorded journey."""

    class Decode(Instance):
        def complete(self, *_: Any, **__: Any) -> Answer:
            return alone

    class Lab:
        prefill = Instance("prefill", "http://p", _facts=FACTS)
        decode = Decode("decode", "http://d", _facts=FACTS)
        proxy = Instance("decode", "http://proxy")
        trace_folder = RECORDED if traced else None

        def send(self, prompt: str, max_tokens: int, fresh: bool) -> Journey:
            assert fresh  # else a second tour would tell of a prompt that is cached
            return JOURNEY

    return Lab()


def test_it_gathers_it_all() -> None:
    journey, facts = tour.tour(lab(), "A prompt", 2)
    assert json.loads(json.dumps(facts, default=str)) == json.loads(json.dumps(facts))
    assert facts["equal"] and facts["missing"] == []
    assert facts["transfer"]["bytes"] == 7_372_800
    assert (facts["computed_on_prefill"], facts["computed_on_decode"]) == (143, 1)
    assert {step["number"] for step in facts["steps"]} == set(range(1, 24))
    assert (facts["prompt"], facts["transfer_id"]) == ("A prompt", journey.transfer_id)
    assert facts["versions"]["vllm"] == "0.32.0"


def test_it_tells_it_all() -> None:
    journey, facts = tour.tour(lab(), "A prompt", 2)
    text = tour.render(journey, facts, lab())
    assert "7,372,800 bytes = 30 regions × 5 blocks × 49,152 bytes" in text
    assert "computed on P   143 prompt tokens" in text
    assert "equal, token for token" in text
    assert sum(" ms  " in line for line in text.splitlines()) == len(journey.steps)


def test_it_says_when_the_answers_differ() -> None:
    other = lab(dataclasses.replace(JOURNEY.answer, token_ids=(1, 3)))
    journey, facts = tour.tour(other, "A prompt", 2)
    assert not facts["equal"]
    assert "NOT EQUAL" in tour.render(journey, facts, other)


def test_a_lab_that_is_not_traced_is_refused() -> None:
    with pytest.raises(PdlabError, match="not traced"):
        tour.tour(lab(traced=False), "A prompt", 2)
