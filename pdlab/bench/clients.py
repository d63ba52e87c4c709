"""Clients of a soak: what they ask of the proxy, some of them leaving, and what an answer is to them."""

import asyncio
import json
import random
import sys
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from pdlab.lab.answer import new_request_id

LENGTHS = (1, 2, 7, 15, 16, 17, 31, 32, 33, 64, 65, 100, 143, 257, 400)  # tokens; around the ends of blocks
PREFIX, TAILS = 96, (1, 16, 40, 150, 500)  # tokens: prompts that begin alike, and what each has of its own
TEXTS = ("1, 2, 3, 4, 5,", "The capital of France is", "Once upon a time", "Grüße aus Köln: ein kurzer Satz. " * 8)
MOST_TOKENS = 16  # of an answer

TOGETHER = 8  # requests
LEAVE, LEAVE_WITHIN = 0.05, 1.5  # part of the clients, and seconds after which they have left
LIMIT, AGAIN = 180.0, 1.0  # seconds that a client waits in all, and before it asks again
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

    async def send(self, asks: list[Ask], midway: Callable[[asyncio.Event], Awaitable[None]] | None = None) -> None:
        """Return when all have ended, and `midway`, told when half of them have. Raises what that ended with."""
        queue, half = iter(asks), asyncio.Event()
        # The proxy closes a connection that was idle for 5 s: ours expire earlier, or one would be used as it closes.
        limits, timeout = httpx.Limits(keepalive_expiry=2), httpx.Timeout(None, connect=5)
        telling = asyncio.create_task(self._tell(len(asks))) if midway else None
        async with httpx.AsyncClient(trust_env=False, limits=limits, timeout=timeout) as http:
            clients = [self._client(http, queue, half, len(asks) // 2) for _ in range(TOGETHER)]
            await asyncio.gather(*clients, *([midway(half)] if midway else []))
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
