"""`python3 -m pdlab soak`: many requests of all kinds, clients that leave, a P that is killed; and what was lost by it.

Every answer is compared with what D alone says of the same prompt. A request may be refused while P is away, if the
error says why: its client asks again. It must not hang, end in silence, or get the text of another; and once all is
over, no block and no connection may be left behind.
"""

import asyncio
import json
import random
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import httpx

from pdlab.errors import PdlabError
from pdlab.lab.answer import new_request_id
from pdlab.lab.record import SERVERS

if TYPE_CHECKING:
    from pdlab.lab.lab import Lab
    from pdlab.lab.usage import Usage

LENGTHS = (1, 2, 7, 15, 16, 17, 31, 32, 33, 64, 65, 100, 143, 257, 400)  # tokens; around the ends of blocks
PREFIX, TAILS = 96, (1, 16, 40, 150, 500)  # tokens: prompts that begin alike, and what each has of its own
TEXTS = ("1, 2, 3, 4, 5,", "The capital of France is", "Once upon a time", "Grüße aus Köln: ein kurzer Satz. " * 8)
MOST_TOKENS = 16  # of an answer

TOGETHER, WARM_UPS = 8, 16  # requests
LEAVE, LEAVE_WITHIN = 0.05, 1.5  # part of the clients, and seconds after which they have left
LIMIT, AGAIN = 180.0, 1.0  # seconds that a client waits in all, and before it asks again
# D waits this long, beyond VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT, for a P that is silent: 60 s, and time to notice.
SETTLE = 75.0
IDLE = 15.0  # seconds for connections that nobody uses to be closed: vLLM and uvicorn do after 5
EXAMPLES = 5

SERVED, WRONG, REFUSED, LOST, LEFT = "served", "wrong", "refused", "lost", "left"


@dataclass(frozen=True)
class Case:
    """A prompt (text, or token ids) and how many tokens to generate: what has one right answer."""

    prompt: str | tuple[int, ...]
    max_tokens: int

    @property
    def sent(self) -> str | list[int]:
        return self.prompt if isinstance(self.prompt, str) else list(self.prompt)


@dataclass(frozen=True)
class Ask:
    """What a client sends, and after how many seconds it leaves (None: it stays)."""

    case: Case
    stream: bool
    fresh: bool
    leaves: float | None = None

    def body(self) -> dict[str, Any]:
        """Of a greedy completion; a fresh one is known to no prefix cache."""
        fields = {"prompt": self.case.sent, "max_tokens": self.case.max_tokens, "stream": self.stream}
        salt = {"cache_salt": uuid.uuid4().hex} if self.fresh else {}
        return {**fields, "temperature": 0, "return_token_ids": True, **salt}

    def __str__(self) -> str:
        unit = "characters" if isinstance(self.case.prompt, str) else "tokens"
        how = f"{'streamed' if self.stream else 'whole'}, {'fresh' if self.fresh else 'cached'}"
        return f"{len(self.case.prompt)} {unit}, max_tokens {self.case.max_tokens}, {how}"


Rights = dict[Case, tuple[int, ...]]


def choose_cases(rng: random.Random) -> list[Case]:
    """Each prompt with two numbers of tokens; all numbers occur."""
    lists = [draw(rng, length) for length in LENGTHS]
    prefix = draw(rng, PREFIX)
    alike = [prefix + draw(rng, length) for length in TAILS]
    prompts: list[str | tuple[int, ...]] = [*lists, *alike, *TEXTS]
    numbers = [(1 + i % MOST_TOKENS, rng.randint(1, MOST_TOKENS)) for i in range(len(prompts))]
    return [Case(prompt, number) for prompt, two in zip(prompts, numbers, strict=True) for number in two]


def draw(rng: random.Random, length: int) -> tuple[int, ...]:
    """Token ids that every vocabulary has, and that are no special tokens of the small model's."""
    return tuple(rng.randrange(1000, 20000) for _ in range(length))


def plan(cases: list[Case], requests: int, rng: random.Random) -> list[Ask]:
    """What the clients will ask; of 20 one leaves, at a moment drawn at random."""
    leaving = set(rng.sample(range(requests), max(1, round(requests * LEAVE))))
    moments = [rng.uniform(0, LEAVE_WITHIN) if i in leaving else None for i in range(requests)]
    return [Ask(rng.choice(cases), rng.random() < 0.5, rng.random() < 0.5, moment) for moment in moments]


# What an answer is to a client ----------------------------------------------------------------------------------------


def judge(answer: httpx.Response, right: tuple[int, ...]) -> tuple[str, str]:
    """SERVED, WRONG, REFUSED (by an error that names a reason) or LOST, and why; of a whole answer, or a stream's."""
    streamed = answer.headers.get("content-type", "").startswith("text/event-stream")
    try:
        pieces = [json.loads(text) for text in (events(answer.text) if streamed else [answer.text])]
    except ValueError:
        return LOST, f"status {answer.status_code}, and no JSON: {answer.text[:100]!r}"
    if message := next(filter(None, map(error_in, pieces)), ""):
        return REFUSED, message
    choices = [choice for piece in pieces if isinstance(piece, dict) for choice in piece.get("choices") or ()]
    if answer.status_code != 200 or not any(choice.get("finish_reason") for choice in choices):
        return LOST, f"status {answer.status_code}, and neither an end nor an error: {answer.text[-100:]!r}"
    tokens = tuple(token for choice in choices for token in choice.get("token_ids") or ())
    if tokens == right:
        return SERVED, ""
    return (WRONG, f"{list(tokens)} is not {list(right)}") if tokens else (LOST, "status 200, and no tokens")


def events(stream: str) -> Iterator[str]:
    """The JSON of each server-sent event, up to [DONE]."""
    for line in stream.split("\n"):  # not splitlines(): a text may hold other ends of lines, such as U+2028
        if line.startswith("data: ") and line.rstrip() != "data: [DONE]":
            yield line.removeprefix("data: ")


def error_in(piece: Any) -> str:
    """The message of an error as OpenAI's API has it; "" if this is none."""
    error = piece.get("error") if isinstance(piece, dict) else None
    return str(error.get("message") or "").strip() if isinstance(error, dict) else ""


class Clients:
    """A few clients that ask at once, each its next when it has its last; and what they got."""

    def __init__(self, url: str, rights: Rights) -> None:
        self.url, self.rights = url, rights
        self.counts: Counter[str] = Counter()  # REFUSED: requests that were, once or more; they count again as ended
        self.examples: list[str] = []
        self.done = 0

    async def send(self, asks: list[Ask], midway: "Killing | None" = None) -> None:
        """Return when all have ended. Raises what `midway`, begun after half of them, ended with."""
        queue, half = iter(asks), asyncio.Event()
        # The proxy closes a connection that was idle for 5 s: ours expire earlier, or one would be used as it closes.
        limits, timeout = httpx.Limits(keepalive_expiry=2), httpx.Timeout(None, connect=5)
        telling = asyncio.create_task(self._tell(len(asks))) if midway else None
        async with httpx.AsyncClient(trust_env=False, limits=limits, timeout=timeout) as http:
            clients = [self._client(http, queue, half, len(asks) // 2) for _ in range(TOGETHER)]
            await asyncio.gather(*clients, *([midway.after(half)] if midway else []))
        if telling:
            telling.cancel()

    async def _client(self, http: httpx.AsyncClient, queue: Iterator[Ask], half: asyncio.Event, middle: int) -> None:
        for ask in queue:
            what, why = await self._ask(http, ask)
            self.counts[what] += 1
            if what in (WRONG, LOST):
                self.note(f"{what}: {ask}: {why}")
            self.done += 1
            if self.done >= middle:
                half.set()

    async def _ask(self, http: httpx.AsyncClient, ask: Ask) -> tuple[str, str]:
        """SERVED, WRONG, LEFT or LOST, and why."""
        refusal = request_id = ""
        try:
            async with asyncio.timeout(LIMIT if ask.leaves is None else ask.leaves):
                while True:
                    request_id = new_request_id()
                    answer = await http.post(
                        f"{self.url}/v1/completions", json=ask.body(), headers={"X-Request-Id": request_id}
                    )
                    what, why = judge(answer, self.rights[ask.case])
                    if what != REFUSED:
                        return what, f"{why} ({request_id})"
                    self.counts[REFUSED] += not refusal
                    refusal = why
                    await asyncio.sleep(AGAIN)
        except TimeoutError:  # ends the call too, and with it the connection
            last = f"; refused before: {refusal}" if refusal else ""
            return (LOST, f"no answer in {LIMIT:g} s ({request_id}){last}") if ask.leaves is None else (LEFT, "")
        except httpx.HTTPError as error:
            return LOST, f"the connection broke: {type(error).__name__} ({request_id})"

    def note(self, example: str) -> None:
        """Keep the first few examples of what was wrong."""
        if len(self.examples) < EXAMPLES:
            self.examples.append(example)

    async def _tell(self, total: int) -> None:
        began = time.monotonic()
        while True:
            await asyncio.sleep(10)
            line = f"{self.done} of {total} requests, {self.counts[REFUSED]} refused so far"
            print(f"  {time.monotonic() - began:5.0f} s  {line}", file=sys.stderr, flush=True)


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
        they had time enough to let go; placeholders are among those sends. restarts: of P. seconds,
        requests_per_second: from the first to the last, P's restart included. memory_mb, sockets: of each server,
        [before, after]. clean: no wrong text, nothing lost, no block and no connection left. examples: of what was
        wrong.

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
        asyncio.run(clients.send(plan(cases, requests, rng), killing))
    finally:  # Ctrl-C too
        killing.end()
    seconds = time.monotonic() - began

    if killing.trouble:
        clients.note(f"heal: {killing.trouble}")
    left_over = settle(lab, lab.settings.abort_timeout + SETTLE).values()
    sockets_after, memory_after = fewest_sockets(lab, sockets_before), memory_mb(lab)
    facts = {
        "requests": requests,
        **in_facts(clients.counts),
        "leaked_blocks": sum(usage.used_blocks for usage in left_over),
        "leaked_sends": sum(usage.sends for usage in left_over),  # P's are all since its restart: it began with none
        "placeholders": sum(usage.placeholders for usage in left_over),
        "restarts": int(lab.prefill.process != first_p),
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
    nothing = not any(facts[name] for name in ("wrong_texts", "lost", "leaked_blocks"))
    return nothing and all(after <= before for before, after in facts["sockets"].values())


def render(facts: dict[str, Any]) -> str:
    """A small table, and the verdict."""
    return "\n".join([*_rows(facts), *facts["examples"], "clean" if facts["clean"] else "not clean"])


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
