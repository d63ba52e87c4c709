"""`python3 -m pdlab soak`: many requests of all kinds, clients that leave, a P that is killed; and what was lost by it.

Every answer is compared with what D alone says of the same prompt. A request may be refused while P is away, if the
error says why: its client asks again. It must not hang, end in silence, or get the text of another; and once all is
over, no block and no connection may be left behind.
"""

import asyncio
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx

from pdlab.bench.clients import LEFT, LOST, REFUSED, SERVED, WRONG, Clients, choose_cases, plan
from pdlab.errors import PdlabError
from pdlab.lab.http import why
from pdlab.lab.record import SERVERS

if TYPE_CHECKING:
    from pdlab.lab.lab import Lab
    from pdlab.lab.usage import Usage

WARM_UPS = 16  # requests
# D waits this long, beyond VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT, for a P that is silent: 60 s, and time to notice.
SETTLE = 75.0
IDLE = 15.0  # seconds for connections that nobody uses to be closed: vLLM and uvicorn do after 5


class Killing(threading.Thread):
    """Kills P with SIGKILL and heals the lab, while requests go on. `trouble`: how that failed, if it did."""

    def __init__(self, lab: "Lab") -> None:
        super().__init__(name="pdlab-killing", daemon=True)
        self.lab = lab
        self.trouble: Exception | None = None

    async def after(self, half: asyncio.Event) -> None:
        """Wait for `half`, do it, and return when it is done. Raises its trouble if P did not come back."""
        await half.wait()
        self.start()
        while self.is_alive():
            await asyncio.sleep(0.2)
        if self.trouble and not self.lab.prefill.healthy:  # all that are left would be refused for minutes, each
            raise self.trouble

    def run(self) -> None:
        try:
            if process := self.lab.prefill.process:
                process.kill()
            self.lab.heal()
        except Exception as error:
            self.trouble = error

    def end(self) -> None:
        """Return when P is back, or has failed to come: a lab that was up before must not be left without it."""
        if self.is_alive():
            print("waiting until P has started again", file=sys.stderr, flush=True)
            self.join()


# What the lab holds ---------------------------------------------------------------------------------------------------


def settle(lab: "Lab", patience: float) -> dict[str, "Usage"]:
    """What the engines hold, once that is nothing; or when `patience` seconds have passed."""
    deadline = time.monotonic() + patience
    while True:
        usage = lab.usage()
        held = sum(each.used_blocks + each.kept + each.sends - each.placeholders for each in usage.values())
        if not held or time.monotonic() > deadline:
            return usage
        time.sleep(0.5)


def memory_mb(lab: "Lab") -> dict[str, int]:
    """Resident MB of each server, all its processes together."""
    rows = lab.processes()
    return {server: sum(row.rss for row in rows if row.server == server) >> 20 for server in SERVERS}


def fewest_sockets(lab: "Lab", enough: dict[str, int] | None = None) -> dict[str, int]:
    """The fewest open TCP connections that each server has within IDLE seconds; at once where they are `enough`."""
    fewest, deadline = sockets(lab), time.monotonic() + IDLE
    while time.monotonic() < deadline and not (enough and all(fewest[key] <= enough[key] for key in enough)):
        time.sleep(1)
        with suppress(httpx.HTTPError):  # the proxy drops what the engines have closed only when it is used
            httpx.get(f"{lab.proxy.url}/health", timeout=5, trust_env=False)
        fewest = {server: min(count, fewest[server]) for server, count in sockets(lab).items()}
    return fewest


def sockets(lab: "Lab") -> dict[str, int]:
    """TCP connections of each server's processes: established, or closed by the other side and not yet by this."""
    import psutil  # where recorded runs play, there need be none

    open_states, counts = (psutil.CONN_ESTABLISHED, psutil.CONN_CLOSE_WAIT), dict.fromkeys(SERVERS, 0)
    for row in lab.processes():
        with suppress(psutil.Error):  # ended while we looked
            found = psutil.Process(row.pid).net_connections("tcp")
            counts[row.server] += sum(each.status in open_states for each in found)
    return counts


# The whole of it ------------------------------------------------------------------------------------------------------


def soak(lab: "Lab", requests: int = 1000, seed: int = 0) -> dict[str, Any]:
    """Send `requests` requests through the proxy; midway P is killed and started again.

    Returns:
        served (right or wrong), left and lost: together, all of them. refused_and_asked_again: requests that an error
        turned away at least once; they end as the others. leaked_blocks, leaked_sends: what P and D still hold when
        they had time enough to let go; placeholders are among those sends. restarts: of P; trouble: how healing the
        lab failed, "" if it did not. seconds, requests_per_second: from the first to the last, P's restart included.
        memory_mb, sockets: of each server, [before, after]. clean: no wrong text, nothing lost, no block and no
        connection left, though P was started again, and without trouble. examples: of what was wrong.

    Raises:
        PdlabError: P did not come back, an engine does not answer, or the lab was started elsewhere.
    """
    if lab.settings is None:
        raise PdlabError("these instances were started elsewhere", "a soak works in a lab that pdlab.up() started")
    rng = random.Random(seed)
    cases = choose_cases(rng)
    rights = {case: lab.decode.complete(case.sent, case.max_tokens).token_ids for case in cases}
    warm_ups = [replace(ask, leaves=None) for ask in plan(cases, WARM_UPS, rng)]
    asyncio.run(Clients(lab.proxy.url, rights).send(warm_ups))
    sockets_before, memory_before, first_p = fewest_sockets(lab), memory_mb(lab), lab.prefill.process

    clients, killing, began = Clients(lab.proxy.url, rights), Killing(lab), time.monotonic()
    try:
        asyncio.run(clients.send(plan(cases, requests, rng), killing.after))
    finally:  # Ctrl-C too
        killing.end()
    seconds = time.monotonic() - began

    left_over = settle(lab, lab.settings.abort_timeout + SETTLE).values()
    sockets_after, memory_after = fewest_sockets(lab, sockets_before), memory_mb(lab)
    facts = {
        "requests": requests,
        **in_facts(clients.counts),
        "leaked_blocks": sum(usage.used_blocks for usage in left_over),
        "leaked_sends": sum(usage.sends for usage in left_over),  # P's are all since its restart: it began with none
        "placeholders": sum(usage.placeholders for usage in left_over),
        "restarts": int(lab.prefill.process != first_p),
        "trouble": why(killing.trouble) if killing.trouble else "",
        "seconds": round(seconds, 1),
        "requests_per_second": round(requests / seconds, 2),
        "memory_mb": {server: [memory_before[server], memory_after[server]] for server in SERVERS},
        "sockets": {server: [sockets_before[server], sockets_after[server]] for server in SERVERS},
        "examples": clients.examples,
    }
    return {**facts, "clean": is_clean(facts)}


def in_facts(counts: Counter[str]) -> dict[str, int]:
    """What became of the requests, under the names of `soak`."""
    return {
        "served": counts[SERVED] + counts[WRONG],
        "left": counts[LEFT],
        "refused_and_asked_again": counts[REFUSED],
        "wrong_texts": counts[WRONG],
        "lost": counts[LOST],
    }


def is_clean(facts: dict[str, Any]) -> bool:
    """See `soak`."""
    nothing = not any(facts[name] for name in ("wrong_texts", "lost", "leaked_blocks", "trouble"))
    return nothing and bool(facts["restarts"]) and all(after <= before for before, after in facts["sockets"].values())


def render(facts: dict[str, Any]) -> str:
    """A small table, and the verdict."""
    wrong = [f"heal: {facts['trouble']}"] if facts["trouble"] else []
    return "\n".join([*_rows(facts), *wrong, *facts["examples"], "clean" if facts["clean"] else "not clean"])


def _rows(facts: dict[str, Any]) -> Iterable[str]:
    pace = f"{facts['seconds']:.0f} s, {facts['requests_per_second']:.1f} a second"
    yield f"{'requests':<24} {facts['requests']:>6}  {pace}; P started again {facts['restarts']}×"
    for name in ("served", "left", "refused_and_asked_again", "wrong_texts", "lost", "leaked_blocks", "leaked_sends"):
        note = f"  {facts['placeholders']} of them placeholders" if name == "leaked_sends" and facts[name] else ""
        yield f"{name.replace('_', ' '):<24} {facts[name]:>6}{note}"
    for server, (before, after) in facts["memory_mb"].items():
        note = " (a new process)" if server == "prefill" and facts["restarts"] else ""
        yield f"{server + ' memory':<24} {before:>6} MB before, {after} after{note}"
    for server, (before, after) in facts["sockets"].items():
        yield f"{server + ' connections':<24} {before:>6} before, {after} after"
