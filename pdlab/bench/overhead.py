"""`python3 -m pdlab bench overhead`: what tracing costs a request, as a ratio measured in one run on one machine.

Two labs run side by side, one traced and one not, and take turns, so that whatever else the machine does meets both.
Two labs that are equal need not be equally fast: here the one that was started first is slower by a tenth and more,
traced or not. So there are several rounds, each with new labs, and the one and the other are started first in turns.
"""

import json
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from typing import Any

import pdlab
from pdlab.lab.answer import new_request_id
from pdlab.lab.http import client
from pdlab.lab.lab import Lab

PROMPT_TOKENS, TOKENS, TOGETHER = 143, 32, 4
WARM_UPS = 2


def measure(rounds: int, pairs: int, model: str | None = None) -> dict[str, Any]:
    """Start both labs `rounds` times, and send `pairs` requests, and a quarter as many bursts, through each in turn.

    Returns:
        ttft_ratio: time to the first token, traced by untraced; throughput_ratio: tokens a second, untraced by traced.
        1.02 is 2 % dearer. Each is the geometric mean over the rounds of the medians over the pairs.
        ttft_ratios, throughput_ratios: of the rounds. traced, untraced: medians of ttft_s and tokens_per_s, over all.
        rounds, pairs.
    """
    firsts: list[list[dict[str, float]]] = []
    rates: list[list[dict[str, float]]] = []
    for number in range(rounds):
        with both_labs(traced_first=number % 2 == 0, model=model) as labs:
            firsts.append([in_turn(labs, first_token, i) for i in range(pairs)])
            rates.append([in_turn(labs, throughput, i) for i in range(max(1, pairs // 4))])
    dearer = [statistics.median(pair["traced"] / pair["untraced"] for pair in each) for each in firsts]
    slower = [statistics.median(pair["untraced"] / pair["traced"] for pair in each) for each in rates]
    return {
        "ttft_ratio": statistics.geometric_mean(dearer),
        "throughput_ratio": statistics.geometric_mean(slower),
        "ttft_ratios": dearer,
        "throughput_ratios": slower,
        **{name: medians(name, list(chain(*firsts)), list(chain(*rates))) for name in ("traced", "untraced")},
        "rounds": rounds,
        "pairs": pairs,
    }


@contextmanager
def both_labs(traced_first: bool, model: str | None) -> Iterator[dict[str, Lab]]:
    """A traced lab and one that is not, warmed up; they end with the block."""
    labs: dict[str, Lab] = {}
    try:
        for name in ("traced", "untraced") if traced_first else ("untraced", "traced"):
            labs[name] = pdlab.up(model, name=f"bench-{name}", trace=name == "traced")
        for lab in labs.values():
            for _ in range(WARM_UPS):
                first_token(lab)
        yield labs
    finally:
        for lab in labs.values():
            lab.down()


def in_turn(labs: dict[str, Lab], measured: Any, turn: int) -> dict[str, float]:
    """One of each; who goes first alternates."""
    names = list(labs) if turn % 2 == 0 else list(reversed(labs))
    return {name: measured(labs[name]) for name in names}


def medians(name: str, firsts: list[dict[str, float]], rates: list[dict[str, float]]) -> dict[str, float]:
    return {
        "ttft_s": statistics.median(pair[name] for pair in firsts),
        "tokens_per_s": statistics.median(pair[name] for pair in rates),
    }


def first_token(lab: Lab) -> float:
    """Seconds until the first token of a prompt that no prefix cache knows is here."""
    body = {
        "prompt": list(range(1000, 1000 + PROMPT_TOKENS)), "max_tokens": 2, "temperature": 0, "stream": True,
        "cache_salt": new_request_id(),
    }  # fmt: skip
    began = time.perf_counter()
    with client().stream("POST", f"{lab.proxy.url}/v1/completions", content=json.dumps(body)) as answer:
        chunks = answer.iter_raw()
        next(chunks)
        seconds = time.perf_counter() - began
        for _ in chunks:
            pass
    return seconds


def throughput(lab: Lab) -> float:
    """Tokens a second of a few requests at once, waiting for nothing but their answers."""
    body = {
        "prompt": list(range(1000, 1000 + PROMPT_TOKENS)),
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }

    def one(_: int) -> None:
        salted = {**body, "cache_salt": new_request_id()}
        client().post(f"{lab.proxy.url}/v1/completions", json=salted).raise_for_status()

    began = time.perf_counter()
    with ThreadPoolExecutor(TOGETHER) as pool:
        list(pool.map(one, range(TOGETHER)))
    return TOGETHER * TOKENS / (time.perf_counter() - began)


def render(facts: dict[str, Any]) -> str:
    """The ratios in words."""
    rows = [f"{facts['rounds']} rounds of {facts['pairs']} pairs in turns, {PROMPT_TOKENS} prompt tokens"]
    for name, each in ((name, facts[name]) for name in ("traced", "untraced")):
        first, rate = each["ttft_s"] * 1e3, each["tokens_per_s"]
        rows.append(f"{name:<9} {first:7.0f} ms to the first token, {rate:6.1f} tokens/s with {TOGETHER} at once")
    for what, key in (
        ("time to first token, traced by untraced", "ttft"),
        ("tokens/s, untraced by traced", "throughput"),
    ):
        rows.append(f"{what:<40} {facts[f'{key}_ratio']:.3f}  (rounds: {shown(facts[f'{key}_ratios'])})")
    return "\n".join(rows)


def shown(ratios: list[float]) -> str:
    return ", ".join(f"{ratio:.3f}" for ratio in ratios)
