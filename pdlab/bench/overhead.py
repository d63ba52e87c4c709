"""`python3 -m pdlab bench overhead`: what tracing costs a request, as a ratio measured in one run on one machine.

Two labs run side by side, one traced and one not; they take turns, so that whatever else the machine does meets both.
"""

import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pdlab
from pdlab.lab.answer import new_request_id
from pdlab.lab.http import client
from pdlab.lab.lab import Lab

PROMPT_TOKENS, TOKENS, TOGETHER = 143, 32, 4
WARM_UPS = 2


def measure(pairs: int, model: str | None = None) -> dict[str, Any]:
    """Send `pairs` requests, and as many bursts, through each lab in turn.

    Returns:
        ttft_ratio: time to the first token, traced by untraced; throughput_ratio: tokens a second, untraced by traced.
        Both are medians over the pairs; 1.02 is 2 % dearer. traced, untraced: the medians themselves, of ttft_s and
        tokens_per_s. pairs.
    """
    labs: dict[str, Lab] = {}
    try:
        for name, trace in (("traced", True), ("untraced", False)):
            labs[name] = pdlab.up(model, name=f"bench-{name}", trace=trace)
        for lab in labs.values():
            for _ in range(WARM_UPS):
                first_token(lab)
        firsts = [in_turn(labs, first_token, i) for i in range(pairs)]
        rates = [in_turn(labs, throughput, i) for i in range(pairs)]
    finally:
        for lab in labs.values():
            lab.down()
    return {
        "ttft_ratio": statistics.median(pair["traced"] / pair["untraced"] for pair in firsts),
        "throughput_ratio": statistics.median(pair["untraced"] / pair["traced"] for pair in rates),
        **{name: medians(name, firsts, rates) for name in labs},
        "pairs": pairs,
    }


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
    rows = [
        f"{name:<9} {each['ttft_s'] * 1e3:7.0f} ms to the first token, {each['tokens_per_s']:6.1f} tokens/s"
        for name, each in ((name, facts[name]) for name in ("traced", "untraced"))
    ]
    return "\n".join(
        [
            f"{facts['pairs']} interleaved pairs, {PROMPT_TOKENS} prompt tokens; throughput with {TOGETHER} at once",
            *rows,
            f"time to first token, traced by untraced: {facts['ttft_ratio']:.3f}",
            f"tokens a second, untraced by traced:     {facts['throughput_ratio']:.3f}",
        ]
    )
