"""A prefill instance as the proxy knows it: its bootstrap server says which engines it has, and when they are gone."""

import asyncio
import itertools
import re
import time
from collections.abc import Callable
from contextlib import suppress

import httpx

from pdlab.lab.failure import Failure, reason

LOOK = 0.8  # seconds between two looks whether P is still there, while D has said nothing
# Not the stage completed_waiting: there the KV has come, and D needs P no more.
STAGES = "waiting_to_start|in_progress"
FETCHING = re.compile(rf'^vllm:num_requests_kv_fetch_by_stage\{{.*stage="(?:{STAGES})".*\}} (\S+)$', re.MULTILINE)
QUICK = httpx.Timeout(2.0)  # for what waits behind no request


class Prefill:
    """A prefill instance and its bootstrap server, which knows the engine id of each of its DP ranks."""

    def __init__(self, url: str, bootstrap: str, engine_ids_live_s: float) -> None:
        self.url, self.bootstrap, self.live_s = url.rstrip("/"), bootstrap.rstrip("/"), engine_ids_live_s
        self.hop = f"bootstrap {self.bootstrap} of prefill instance {self.url}"
        self.engine_ids: dict[int, str] = {}
        self.read_at, self.reading, self.turn = -float("inf"), asyncio.Lock(), itertools.count()

    async def next_engine(self, client: httpx.AsyncClient) -> tuple[int | None, str]:
        """The DP rank whose turn it is (None where there is only one), and its engine id."""
        async with self.reading:
            # An instance that came back has new ids, and D would wait in vain for an engine of the old ones. To come
            # back takes it far longer than ids are believed here.
            if time.monotonic() - self.read_at > self.live_s:
                self.engine_ids, self.read_at = await self.query(client), time.monotonic()
        ranks = sorted(self.engine_ids)
        rank = ranks[next(self.turn) % len(ranks)]
        return rank if len(ranks) > 1 else None, self.engine_ids[rank]

    async def lost(self, client: httpx.AsyncClient, engine_id: str, decode: str, after: Callable[[], int]) -> None:
        """Raises Failure once P, with this engine id, is gone and a request waits for its KV on `decode`.

        D does not see that P has died: it waits for VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT and another 60 s. A D that has
        its KV needs P no more, and of an answer that is not streamed nothing is seen before its end. So D is asked how
        many of its requests wait for KV; KV comes in the order of the requests, or nearly: they are the last that left.

        Args:
            after: how many requests left for `decode` later than this one, and are not answered yet.
        """
        looks = 0
        while looks < 2:  # twice: what D says is as old as its last step
            await asyncio.sleep(LOOK)
            with suppress(httpx.HTTPError, ValueError, AttributeError):  # to be busy is not to be gone
                gone = await self.is_gone(client, engine_id)
                looks = looks + 1 if gone and await waiting_for_kv(client, decode) > after() else 0
        raise Failure.at(f"prefill instance {self.url}", 502, "it ended, or was started again, before D had its KV")

    async def is_gone(self, client: httpx.AsyncClient, engine_id: str) -> bool:
        """Whether nothing listens at its bootstrap server's port any more, or another engine does."""
        try:
            answer = (await client.get(f"{self.bootstrap}/query", timeout=QUICK)).raise_for_status()
        except httpx.NetworkError:
            return True
        return engine_id not in {entry.get("engine_id") for entry in answer.json().values()}

    async def query(self, client: httpx.AsyncClient) -> dict[int, str]:
        try:
            answer = (await client.get(f"{self.bootstrap}/query", timeout=QUICK)).raise_for_status()
            engine_ids = {int(rank): str(entry["engine_id"]) for rank, entry in answer.json().items()}
        except httpx.RequestError as error:
            raise Failure.at(self.hop, 503, reason(error)) from None
        except (httpx.HTTPStatusError, ValueError, AttributeError, KeyError, TypeError):
            raise Failure.at(self.hop, 503, "does not answer as a bootstrap server") from None
        if not engine_ids:
            raise Failure.at(self.hop, 503, "no engine has registered yet")
        return engine_ids


async def waiting_for_kv(client: httpx.AsyncClient, decode: str) -> float:
    """How many requests have, as D's metrics say, their KV on its way or not asked for yet."""
    answer = (await client.get(f"{decode}/metrics", timeout=QUICK)).raise_for_status()
    return sum(map(float, FETCHING.findall(answer.text)))
