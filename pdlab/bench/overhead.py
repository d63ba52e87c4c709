"""`python3 -m pdlab bench overhead`: what tracing costs a request, as a ratio measured in one run on one machine.

The same two engines answer, traced and not, in turns: their probes and gates are taken out and put in again in
between. (Two labs would not do: of two equal ones started one after the other, here the first is slower by a tenth and
more.) The proxy, which notes some five events a request, is traced throughout.
"""

import json
import os
import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pdlab
from pdlab.errors import PdlabError, RequestError
from pdlab.lab import record as records
from pdlab.lab.answer import new_request_id, post
from pdlab.lab.http import client
from pdlab.lab.instance import Instance
from pdlab.lab.lab import Lab

PROMPT_TOKENS, TOKENS, TOGETHER = 143, 32, 4
WARM_UPS = 2


def measure(pairs: int, model: str | None = None) -> dict[str, Any]:
    """Send `pairs` requests, and a quarter as many bursts, traced and untraced in turns.

    Returns:
        ttft_ratio: time to the first token, traced by untraced; throughput_ratio: tokens a second, untraced by traced;
        1.02 is 2 % dearer. Both are medians over the pairs; ttft_ratios, throughput_ratios: each pair's.
        traced, untraced: medians of ttft_s and tokens_per_s. pairs.
    """
    name = f"bench-{os.getpid()}"
    try:
        with pdlab.up(model, name=name, trace=True) as lab:
            for _ in range(WARM_UPS):
                first_token(lab)
            firsts = [in_turn(lab, first_token, i) for i in range(pairs)]
            rates = [in_turn(lab, throughput, i) for i in range(max(1, pairs // 4))]
    finally:
        shutil.rmtree(records.folder(name), ignore_errors=True)
    dearer = [pair["traced"] / pair["untraced"] for pair in firsts]
    slower = [pair["untraced"] / pair["traced"] for pair in rates]
    return {
        "ttft_ratio": statistics.median(dearer),
        "throughput_ratio": statistics.median(slower),
        **{name: medians(name, firsts, rates) for name in ("traced", "untraced")},
        "pairs": pairs,
        "ttft_ratios": dearer,
        "throughput_ratios": slower,
    }


def in_turn(lab: Lab, measured: Callable[[Lab], float], turn: int) -> dict[str, float]:
    """One of each; what comes first alternates."""
    found = {}
    for name in ("traced", "untraced") if turn % 2 == 0 else ("untraced", "traced"):
        for instance in (lab.prefill, lab.decode):
            switch(instance, on=name == "traced")
        found[name] = measured(lab)
    return found


def switch(instance: Instance, on: bool) -> None:
    """Take an engine's probes and gates out, or put them in. PdlabError if it has none."""
    headers = {"Authorization": f"Bearer {instance.token}"}
    answer = client().post(f"{instance.url}/pdlab/trace", json={"on": on}, headers=headers, timeout=60)
    if answer.status_code != 200 or answer.json()["workers"] != [True]:
        raise PdlabError(
            f"the {instance.role} instance has no probes in its worker's process", "its scheduler runs apart"
        )


def medians(name: str, firsts: list[dict[str, float]], rates: list[dict[str, float]]) -> dict[str, float]:
    return {
        "ttft_s": statistics.median(pair[name] for pair in firsts),
        "tokens_per_s": statistics.median(pair[name] for pair in rates),
    }


def first_token(lab: Lab) -> float:
    """Seconds until the first token of a prompt that no prefix cache knows is here. RequestError if none comes."""
    body = {
        "prompt": list(range(1000, 1000 + PROMPT_TOKENS)), "max_tokens": 2, "temperature": 0, "stream": True,
        "cache_salt": new_request_id(),
    }  # fmt: skip
    began = time.perf_counter()
    with client().stream("POST", f"{lab.proxy.url}/v1/completions", content=json.dumps(body)) as answer:
        if answer.status_code != 200:  # an error would be quicker than any token
            said = answer.read().decode(errors="replace").strip()[:300]
            raise RequestError(answer.status_code, f"the proxy answered {answer.status_code}: {said}")
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
        post(lab.proxy.url, "/v1/completions", salted, {}, who="the proxy")

    began = time.perf_counter()
    with ThreadPoolExecutor(TOGETHER) as pool:
        list(pool.map(one, range(TOGETHER)))
    return TOGETHER * TOKENS / (time.perf_counter() - began)


def render(facts: dict[str, Any]) -> str:
    """The ratios in words."""
    rows = [f"{facts['pairs']} pairs in turns, {PROMPT_TOKENS} prompt tokens"]
    for name, each in ((name, facts[name]) for name in ("traced", "untraced")):
        first, rate = each["ttft_s"] * 1e3, each["tokens_per_s"]
        rows.append(f"{name:<9} {first:7.0f} ms to the first token, {rate:6.1f} tokens/s with {TOGETHER} at once")
    for what, key in (
        ("time to first token, traced by untraced", "ttft"),
        ("tokens/s, untraced by traced", "throughput"),
    ):
        rows.append(f"{what:<40} {facts[f'{key}_ratio']:.3f}")
    return "\n".join(rows)
