"""Asking for a completion, and what comes back."""

import uuid
from dataclasses import dataclass
from typing import Any

import httpx

from pdlab.errors import RequestError
from pdlab.lab.http import client


@dataclass(frozen=True)
class Answer:
    """Attributes:
    text: what was generated; token_ids: the same as ids.
    prompt_tokens: N, as the engine counted them.
    finish_reason: "length" or "stop".
    request_id: the X-Request-Id; both engines make their internal ids from it, each with a suffix of its own.
    transfer_id: what links the two halves; None when one engine answered alone.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    finish_reason: str
    request_id: str
    transfer_id: str | None = None

    def __repr__(self) -> str:
        return f"<Answer to {self.prompt_tokens} prompt tokens: {self.text!r}>"


def complete(
    url: str, prompt: str | list[int], max_tokens: int, fields: dict[str, Any], who: str, fresh: bool = False
) -> Answer:
    """POST `/v1/completions` to an engine or the proxy; greedy unless `fields` says otherwise.

    Args:
        who: what `url` is, for an error.
        fresh: whether to keep prefix caches out of it, by a `cache_salt` that nobody has used.

    Raises:
        RequestError: it refused, failed or does not answer (status 0).
    """
    if fresh:
        fields = {"cache_salt": uuid.uuid4().hex, **fields}
    request_id = f"pdlab-{uuid.uuid4().hex[:12]}"
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True, **fields}
    answer = post(url, "/v1/completions", body, {"X-Request-Id": request_id}, who)
    fields = answer.json()
    choice = fields["choices"][0]
    return Answer(
        text=choice["text"],
        token_ids=tuple(choice["token_ids"] or ()),
        prompt_tokens=fields["usage"]["prompt_tokens"],
        finish_reason=choice["finish_reason"],
        request_id=request_id,
        transfer_id=answer.headers.get("X-Transfer-Id"),
    )


def post(url: str, path: str, body: dict[str, Any], headers: dict[str, str], who: str) -> httpx.Response:
    """POST JSON and return the answer of status 200; see `complete`."""
    try:
        answer = client().post(f"{url}{path}", json=body, headers=headers)
    except httpx.HTTPError as error:
        raise RequestError(0, f"{who} {url} does not answer ({error})", "see: python3 -m pdlab status") from None
    if answer.status_code != 200:
        raise RequestError(answer.status_code, f"{who} answered {answer.status_code}: {_message(answer)}")
    return answer


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text.strip()[:300] or "nothing"
