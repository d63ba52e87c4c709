"""The experiments that the checks look at: each done once, on the lab, or on a special one that ends with it."""

import threading
import time
from functools import cached_property
from typing import Any

import pdlab
from pdlab.errors import PdlabError, must
from pdlab.lab.answer import new_request_id
from pdlab.lab.comparison import Comparison, Rewritten
from pdlab.lab.halves import Asked, body_of, decode_params, new_transfer_id, prefill_half
from pdlab.lab.http import client
from pdlab.lab.instance import Instance
from pdlab.lab.lab import Lab
from pdlab.lab.profile import ABORT_TIMEOUT
from pdlab.trace.journey import Journey

PROMPT = list(range(1000, 1143))  # 143 token ids: with blocks of 32, four full ones and 15 tokens of a fifth
OTHER = [*range(2000, 2142), PROMPT[-1]]  # as long, and with the same last token, which D computes itself
TOKENS = 6
HITS = "vllm:prefix_cache_hits_total"  # tokens
FEW_BLOCKS = (  # of vLLM's own: 24 blocks, and prompts in chunks
    *("--num-gpu-blocks-override", "24", "--max-num-batched-tokens", "128"),
    *("--long-prefill-token-threshold", "64"),
)


class Bench:
    """One lab and what was done on it."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab

    @property
    def block_size(self) -> int:
        return int(self.lab.decode.registered_kv["block_size"])

    @property
    def protocol(self) -> str:
        return self.lab.settings.protocol if self.lab.settings else "unknown"

    @cached_property
    def plain(self) -> Journey:
        """One request, nothing held."""
        journey = self.lab.send(PROMPT, TOKENS, fresh=True)
        if journey.missing:
            raise PdlabError(
                f"the journey lacks {', '.join(journey.missing)}", "is the lab traced, and nothing else busy?"
            )
        return journey

    def known_afterwards(self) -> dict[str, int]:
        """How many tokens of PROMPT each engine has in its prefix cache, once it came through the proxy, by role."""
        salt = new_request_id()  # no other request has it, and so not these blocks
        self.lab.send(PROMPT, 1, cache_salt=salt)
        return {engine.role: self._hits(engine, salt) for engine in self.lab.engines}

    def _hits(self, engine: Instance, salt: str) -> int:
        before = engine.metric(HITS)
        engine.complete(PROMPT, 1, cache_salt=salt)
        return int(engine.metric(HITS) - before)

    @cached_property
    def d_first(self) -> Journey:
        return self._with_late("before_prefill_send", after=12)

    @cached_property
    def p_first(self) -> Journey:
        return self._with_late("before_decode_send", after=6)

    def _with_late(self, point: str, after: int) -> Journey:
        """One half waits in the proxy until the other has come to step `after`."""
        with self.lab.hold(point) as hold:
            journey = self.lab.submit(PROMPT, TOKENS, fresh=True)
            hold.wait()
            journey.until(after)
        return journey.wait()

    @cached_property
    def held(self) -> tuple[Journey, str]:
        """Held before the write, while D answers another request: (its journey, that answer)."""
        return self._held("before_write", self.lab.decode)

    @cached_property
    def held_with_p_serving(self) -> tuple[Journey, str]:
        """Held before the answer, in the pool thread, while P answers another request."""
        return self._held("before_answer", self.lab.prefill)

    def _held(self, point: str, instance: Instance) -> tuple[Journey, str]:
        with self.lab.hold(point) as hold:
            journey = self.lab.submit(PROMPT, TOKENS, fresh=True)
            hold.wait()
            served = instance.complete(f"Another request, for the {instance.role} instance alone", max_tokens=3).text
        return journey.wait(), served

    @cached_property
    def compared(self) -> tuple[Comparison, Comparison]:
        """The blocks of one request on both sides, before the write and after it."""
        with self.lab.hold("before_answer") as last, self.lab.hold("before_write") as first:
            journey = self.lab.submit(PROMPT, 1, fresh=True)
            first.wait()
            before = self.lab.compare(journey)
            first.release()
            last.wait()
            after = self.lab.compare(journey)
        journey.wait()
        return before, after

    @property
    def rewritten(self) -> list[Rewritten]:
        return self.compared[1].rewritten()

    def streamed(self) -> tuple[int, float, Journey]:
        """A streamed answer: how many chunks, when the first came (monotonic, seconds), and the journey."""
        times, request_id = [], new_request_id()
        body = {"prompt": PROMPT, "max_tokens": 12, "stream": True, "ignore_eos": True, "cache_salt": request_id}
        headers, url = {"X-Request-Id": request_id}, f"{self.lab.proxy.url}/v1/completions"
        with client().stream("POST", url, json=body, headers=headers) as answer:
            times = [time.monotonic() for line in answer.iter_lines() if line.startswith("data: {")]
        return len(times), times[0], self._in_trace(request_id, times[0] - 60)

    def _in_trace(self, request_id: str, since: float) -> Journey:
        """The journey of that request, once it is complete."""
        deadline = time.monotonic() + 20
        while True:
            found = [journey for journey in self.lab.trace(since) if journey.request_id == request_id]
            if found and found[0].complete:
                return found[0]
            must(time.monotonic() < deadline, f"the trace does not have all of {request_id}")
            time.sleep(0.05)

    def two_prompts(self) -> tuple[Any, Any, Any]:
        """P prefills PROMPT and D is given OTHER, under one transfer_id.

        Returns:
            The token ids of D's answer, of the right answer to PROMPT, and of that to OTHER.
        """
        right, other = (self.lab.decode.complete(prompt, TOKENS).token_ids for prompt in (PROMPT, OTHER))
        transfer = new_transfer_id()
        # fresh, as ever: D's prefix cache must not keep the wrong blocks.
        p = Asked(self.lab.prefill.url, prefill_half(body_of(PROMPT, TOKENS, ignore_eos=True), transfer))
        answer = self.lab.decode.complete(OTHER, TOKENS, kv_transfer_params=decode_params(self.lab, transfer))
        p.result()
        return answer.token_ids, right, other

    def ask_unknown_engine(self) -> None:
        """D's half alone, naming an engine that the bootstrap server does not know. Raises RequestError."""
        params = {**decode_params(self.lab, new_transfer_id()), "remote_engine_id": "nobody"}
        self.lab.decode.complete(PROMPT, 1, kv_transfer_params=params)

    # Special engines ----------------------------------------------------------------------------------------------

    def load_beside_prefill(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """On a D with few blocks and a chunked prefill of its own, a load comes in.

        Returns:
            Facts of the first and of the last `KVCacheManager.allocate_slots` for the load.
        """
        with self._special("claims-reserved", decode_args=FEW_BLOCKS, max_model_len=704) as lab:
            tries = [e.facts for e in load_beside_prefill(lab).of("blocks.allocated", "D scheduler")]
        tries = [facts for facts in tries if facts["delay_cache_blocks"]]
        return tries[0], tries[-1]

    def engine_ids_with_dp2(self) -> list[str]:
        """The engine ids of a prefill instance with data parallelism 2, as its bootstrap server names them."""
        with self._special("claims-dp", prefill_args=("--data-parallel-size", "2")) as lab:
            return sorted(entry["engine_id"] for entry in lab.prefill.bootstrap_query().values())

    def _special(self, name: str, **choices: Any) -> Lab:
        settings = self.lab.settings
        model = settings.model if settings else None
        return pdlab.up(model, name=name, abort_timeout=ABORT_TIMEOUT, **choices)


def load_beside_prefill(lab: Lab) -> Journey:
    """A request whose load comes to a D, of FEW_BLOCKS, in the midst of a chunked prefill of D's own."""
    local = threading.Thread(target=lab.decode.complete, args=(list(range(3000, 3600)), 1))
    with lab.hold("before_decode_send") as hold:
        journey = lab.submit(list(range(1000, 1160)), TOKENS, fresh=True)
        hold.wait()
        journey.until(6)
        local.start()
        deadline = time.monotonic() + 30
        while not lab.decode.metric("vllm:num_requests_running"):
            must(time.monotonic() < deadline, "D does not begin with its own prompt")
            time.sleep(0.005)
    journey.wait()
    local.join()
    return journey
