"""The two halves of a request, sent by hand: as the proxy of vLLM's examples sends them, or as nobody should."""

import threading
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from pdlab.lab.answer import new_request_id

if TYPE_CHECKING:
    from pdlab.lab.lab import Lab

Body = dict[str, Any]


@dataclass(frozen=True)
class Got:
    """What a client got.

    Attributes:
        status: HTTP; 0: nothing.
        seconds: after which.
        text, token_ids: of the answer; "" and () of an error.
        reason: of an error, or why there is nothing; "" with an answer.
        finish_reason: of the answer.
        hop: what failed, where a proxy names it.
    """

    status: int
    seconds: float
    text: str = ""
    token_ids: tuple[int, ...] = ()
    reason: str = ""
    finish_reason: str = ""
    hop: str = ""


def new_transfer_id() -> str:
    return f"xfer-{uuid.uuid4()}"


def prefill_params(transfer_id: str) -> Body:
    """kv_transfer_params of P's half."""
    return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}


def decode_params(lab: "Lab", transfer_id: str) -> Body:
    """kv_transfer_params of D's half: pull from this lab's P."""
    where = {"remote_engine_id": lab.prefill.engine_id, "remote_bootstrap_addr": lab.prefill.bootstrap}
    return {"do_remote_decode": False, "do_remote_prefill": True, "transfer_id": transfer_id, **where}


def body_of(prompt: str | list[int] | list[list[int]], max_tokens: int, **fields: Any) -> Body:
    """A greedy completion, known to no prefix cache."""
    asked = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True}
    return {**asked, "cache_salt": uuid.uuid4().hex, **fields}


def prefill_half(body: Body, transfer_id: str) -> Body:
    """P's half as vLLM's example has it: one token, and all else as the client said."""
    return {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": prefill_params(transfer_id)}


def ask(url: str, body: Body, patience: float = 60, request_id: str | None = None) -> Got:
    """POST a completion. A client that gives up, after `patience` seconds, closes its connection.

    Never raises: what came instead of an answer is in `reason`.
    """
    began = time.monotonic()
    try:
        headers = {"X-Request-Id": request_id or new_request_id()}
        timeout = httpx.Timeout(patience, connect=5)
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=timeout, trust_env=False)
    except httpx.TimeoutException:
        return Got(0, time.monotonic() - began, reason=f"nothing in {patience:g} s")
    except httpx.HTTPError as error:
        return Got(0, time.monotonic() - began, reason=f"the connection broke ({type(error).__name__})")
    return got(answer, time.monotonic() - began)


def got(answer: httpx.Response, seconds: float) -> Got:
    """What an HTTP answer is to a client."""
    hop = answer.headers.get("X-Failed-Hop", "")
    try:
        fields = answer.json()
        if answer.status_code == 200:
            choice = fields["choices"][0]
            tokens = tuple(choice.get("token_ids") or ())
            return Got(200, seconds, choice["text"], tokens, finish_reason=choice["finish_reason"], hop=hop)
        reason = str(fields["error"]["message"])
    except (ValueError, KeyError, TypeError, IndexError):
        reason = answer.text[:200]
    return Got(answer.status_code, seconds, reason=" ".join(reason.split()), hop=hop)


class Asked(threading.Thread):
    """A request under way; `result()` waits for what it gets."""

    def __init__(self, url: str, body: Body, patience: float = 60, request_id: str | None = None) -> None:
        super().__init__(name="pdlab-half", daemon=True)
        self._arguments, self._got = (url, body, patience, request_id), Got(0, 0, reason="not asked yet")
        self.start()

    def run(self) -> None:
        self._got = ask(*self._arguments)

    def result(self) -> Got:
        self.join()
        return self._got
