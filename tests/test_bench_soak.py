"""The soak: what its clients ask, what an answer is to them, and the verdict; without engines."""

import asyncio
import json
import random
from collections import Counter
from typing import Any

import httpx
import pytest

from pdlab.bench import clients, soak
from pdlab.bench.clients import LEFT, LOST, REFUSED, SERVED, WRONG, Ask, Case, Clients, judge

RIGHT = (216, 38, 28)
SSE = {"content-type": "text/event-stream; charset=utf-8"}
ERROR = {
    "error": {
        "message": "bootstrap http://127.0.0.1:45811 of prefill instance http://127.0.0.1:44043: connection refused",
        "type": "ServiceUnavailableError",
        "param": None,
        "code": 503,
    }
}


def piece(tokens: list[int] | None, finish_reason: str | None) -> dict[str, Any]:
    """A completion, or a chunk of one, as vLLM writes it."""
    choice = {
        "index": 0, "text": " 6", "logprobs": None, "finish_reason": finish_reason, "stop_reason": None,
        "token_ids": tokens, "prompt_token_ids": None,
    }  # fmt: skip
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "tiny", "choices": [choice]}


def whole(tokens: list[int] | None, finish_reason: str | None = "length") -> httpx.Response:
    return httpx.Response(200, json=piece(tokens, finish_reason))


def streamed(*pieces: dict[str, Any], done: bool = True) -> httpx.Response:
    lines = "".join(f"data: {json.dumps(each)}\n\n" for each in pieces) + ("data: [DONE]\n\n" if done else "")
    return httpx.Response(200, headers=SSE, text=lines)


def test_a_seed_draws_the_same_again() -> None:
    def draw(seed: int) -> list[Ask]:
        rng = random.Random(seed)
        return clients.plan(clients.choose_cases(rng), 200, rng)

    assert draw(1) == draw(1) != draw(2)


def test_prompts_are_mixed() -> None:
    cases = clients.choose_cases(random.Random(0))
    prompts = {case.prompt for case in cases}
    lists = [prompt for prompt in prompts if not isinstance(prompt, str)]
    assert len(prompts) == 24
    assert {case.max_tokens for case in cases} == set(range(1, 17))
    assert (min(map(len, lists)), max(map(len, lists))) == (1, 596)
    assert max(Counter(prompt[:96] for prompt in lists).values()) == 5  # begin alike


@pytest.mark.parametrize(("requests", "leaving"), [(10, 1), (1000, 50)])
def test_one_of_twenty_clients_leaves(requests: int, leaving: int) -> None:
    rng = random.Random(0)
    asks = clients.plan(clients.choose_cases(rng), requests, rng)
    moments = [ask.leaves for ask in asks if ask.leaves is not None]
    assert len(asks) == requests
    assert len(moments) == leaving and all(0 <= moment <= 1.5 for moment in moments)
    assert {ask.stream for ask in asks} == {ask.fresh for ask in asks} == {True, False}


def test_a_fresh_request_has_a_salt_that_no_other_has() -> None:
    ask = Ask(Case((1000, 1001), 3), stream=False, fresh=True)
    assert ask.body()["prompt"] == [1000, 1001]
    assert ask.body()["cache_salt"] != ask.body()["cache_salt"]
    assert "cache_salt" not in Ask(ask.case, stream=False, fresh=False).body()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (whole([216, 38, 28]), SERVED),
        (whole([216, 38, 29]), WRONG),
        (whole([216, 38], "stop"), WRONG),
        (whole([]), LOST),
        (whole([216, 38, 28], None), LOST),
        (httpx.Response(200, text=""), LOST),
        (httpx.Response(200, json=[]), LOST),
        (httpx.Response(503, json=ERROR), REFUSED),
        (httpx.Response(502, json={"error": {"message": ""}}), LOST),
        (httpx.Response(500, text="Internal Server Error"), LOST),
        (streamed(piece([216], None), piece([38], None), piece([28], "length")), SERVED),
        (streamed(piece([216], None), piece([38, 28], "length"), done=False), SERVED),
        (streamed(piece([216], None), piece([28], "length")), WRONG),
        (streamed(piece([216], None), piece([38], None), piece([28], None)), LOST),
        (streamed(piece([216], None), ERROR), REFUSED),
        (streamed(), LOST),
        (httpx.Response(200, headers=SSE, text='data: {"choices": [{"index'), LOST),
    ],
)
def test_what_an_answer_is(answer: httpx.Response, expected: str) -> None:
    what, why = judge(answer, RIGHT)
    assert what == expected
    assert bool(why) == (what != SERVED)


def test_an_end_of_line_within_a_text_ends_no_event() -> None:
    chunk = json.dumps(piece(list(RIGHT), "length")).replace(" 6", "\u2028\x85")
    assert judge(httpx.Response(200, headers=SSE, text=f"data: {chunk}\n\ndata: [DONE]\n\n"), RIGHT)[0] == SERVED


def test_no_tokens_can_be_right() -> None:
    assert judge(whole([], "stop"), ())[0] == SERVED


class Scripted(Clients):
    """Clients of a server that answers what a test says."""

    def __init__(self, *answers: httpx.Response | Exception | None) -> None:
        super().__init__("http://proxy", {Case("a", 3): RIGHT})
        self.answers = list(answers)

    async def answer(self, request: httpx.Request) -> httpx.Response:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            await asyncio.sleep(60)
        assert answer
        return answer

    def ask(self, leaves: float | None = None) -> tuple[str, str]:
        async def one() -> tuple[str, str]:
            async with httpx.AsyncClient(transport=httpx.MockTransport(self.answer)) as http:
                return await self._ask(http, Ask(Case("a", 3), stream=False, fresh=False, leaves=leaves))

        return asyncio.run(one())


def test_who_is_refused_asks_again_and_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "AGAIN", 0)
    scripted = Scripted(httpx.Response(503, json=ERROR), httpx.Response(503, json=ERROR), whole(list(RIGHT)))
    assert scripted.ask()[0] == SERVED
    assert scripted.counts[REFUSED] == 1


@pytest.mark.parametrize("answer", [httpx.ReadError(""), httpx.RemoteProtocolError("peer closed connection")])
def test_a_broken_connection_is_a_lost_request(answer: Exception) -> None:
    what, why = Scripted(answer).ask()
    assert what == LOST and type(answer).__name__ in why


def test_a_client_leaves_and_one_that_stays_is_lost_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "LIMIT", 0.05)
    assert Scripted(None).ask(leaves=0.01) == (LEFT, "")
    assert Scripted(None).ask()[0] == LOST
    what, why = Scripted(httpx.Response(503, json=ERROR)).ask()
    assert what == LOST and "connection refused" in why


FACTS = {
    "requests": 1000, **soak.in_facts(Counter({SERVED: 949, WRONG: 0, LEFT: 51, REFUSED: 17})),
    "leaked_blocks": 0, "leaked_sends": 0, "placeholders": 0, "restarts": 1, "trouble": "", "seconds": 312.4,
    "requests_per_second": 3.2, "memory_mb": {"prefill": [1700, 1650], "decode": [1720, 1731], "proxy": [60, 61]},
    "sockets": {"prefill": [6, 6], "decode": [5, 5], "proxy": [2, 1]}, "examples": [],
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, True),
        ({"leaked_sends": 3, "placeholders": 3}, True),
        ({"wrong_texts": 1}, False),
        ({"lost": 1}, False),
        ({"leaked_blocks": 2}, False),
        ({"restarts": 0}, False),
        ({"trouble": "decode did not start"}, False),
        ({"sockets": {"decode": [5, 6]}}, False),
    ],
)
def test_what_is_clean(changed: dict[str, Any], expected: bool) -> None:
    assert soak.is_clean({**FACTS, **changed}) is expected


def test_the_table() -> None:
    lines = soak.render({**FACTS, "clean": True}).splitlines()
    assert lines[0] == "requests                   1000  312 s, 3.2 a second; P started again 1×"
    assert "refused and asked again      17" in lines
    assert "prefill memory             1700 MB before, 1650 after (a new process)" in lines
    assert "proxy connections             2 before, 1 after" in lines
    assert lines[-1] == "clean"


def test_the_table_of_what_went_wrong() -> None:
    wrong = {"lost": 1, "leaked_sends": 2, "placeholders": 1, "examples": ["lost: 7 tokens: …"], "clean": False}
    text = soak.render({**FACTS, **wrong})
    assert "leaked sends                  2  1 of them placeholders" in text
    assert text.endswith("lost: 7 tokens: …\nnot clean")


def test_that_the_lab_did_not_heal_is_said_beside_five_examples() -> None:
    examples = [f"lost: {number}" for number in range(clients.EXAMPLES)]
    text = soak.render({**FACTS, "trouble": "decode did not start", "examples": examples, "clean": False})
    assert text.endswith("\n".join(["heal: decode did not start", *examples, "not clean"]))
