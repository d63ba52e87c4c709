"""Asking an engine or the proxy for a completion."""

import uuid
from typing import Any

import httpx

from pdlab.errors import RequestError
from pdlab.lab.http import client
from pdlab.trace.answer import Answer


def new_request_id() -> str:
    """An X-Request-Id of our own."""
    return f"pdlab-{uuid.uuid4().hex[:12]}"


def complete(
    url: str,
    prompt: str | list[int],
    max_tokens: int,
    fields: dict[str, Any],
    who: str,
    fresh: bool = False,
    request_id: str | None = None,
) -> Answer:
    """POST `/v1/completions` to an engine or the proxy; greedy unless `fields` says otherwise.

    Args:
        who: what `url` is, for an error.
        fresh: whether to keep prefix caches out of it, by a `cache_salt` that nobody has used.
        request_id: its X-Request-Id; None: a new one.

    Raises:
        RequestError: it refused, failed or does not answer (status 0).
    """
    if fresh:
        fields = {"cache_salt": uuid.uuid4().hex, **fields}
    request_id = request_id or new_request_id()
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
