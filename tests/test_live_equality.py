"""The claim everything rests on: P and D together answer as one engine alone does, token for token."""

import pytest

from pdlab.lab.lab import Lab

WORD = " time"
SHARED = "You are a careful assistant who answers briefly. " * 12
PROMPTS = [
    [19556],  # 1 token
    [19556, 284],
    "Once upon a time, in a village by the sea, there lived",
    "The first ten prime numbers are",
    "def fibonacci(n):\n    ",
    "Translate to French: good morning ->",
    "日本の首都は",
    "Ünïcödé, emoji 🙂 and tabs\t\tare text too:",
    SHARED + "Question: what is the capital of Italy? Answer:",
    SHARED + "Question: how many legs has a spider? Answer:",
    SHARED + "Question: how many legs has a spider? Answer:",  # the same again
    [1] + [655] * 30,  # 31, 32 and 33 tokens: around one block
    [1] + [655] * 31,
    [1] + [655] * 32,
    [1] + [655] * 127,  # 128 tokens: full blocks only
    WORD * 143,
    "List: " + ", ".join(str(n) for n in range(120)),
    "The history of computing is long. " * 100,
    "The history of computing is long. " * 100 + "In short,",
    [1] + [(7 * n) % 40000 + 100 for n in range(1499)],  # 1,500 tokens
]


@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_proxy_and_single_engine_agree(lab: Lab, number: int) -> None:
    prompt = PROMPTS[number]
    together = lab.send(prompt, max_tokens=16)
    alone = lab.decode.complete(prompt, max_tokens=16)
    assert together.token_ids == alone.token_ids
    assert together.prompt_tokens == alone.prompt_tokens
    assert together.finish_reason == alone.finish_reason


def test_prompts_are_as_varied_as_they_say() -> None:
    assert len(PROMPTS) == 20
    lengths = {len(prompt) for prompt in PROMPTS if isinstance(prompt, list)}
    assert {1, 31, 32, 33, 128, 1500} <= lengths
