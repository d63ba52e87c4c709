"""Asking an engine or the proxy for a completion."""

import json
import reprlib
import uuid
from typing import Any

import httpx

from pdlab.checks import whole
from pdlab.errors import PdlabError, RequestError
from pdlab.lab.http import client
from pdlab.trace.answer import Answer


def new_request_id() -> str:
    """An X-Request-Id of our own."""
    return f"pdlab-{uuid.uuid4().hex[:12]}"


def check(prompt: Any, max_tokens: Any, fields: dict[str, Any], request_id: Any = None) -> int:
    """max_tokens, as Python's own number.

    Raises:
        PdlabError: what no engine is asked, or what JSON and a header cannot carry.
    """
    if not isinstance(prompt, str | list | tuple) or not prompt:
        raise PdlabError(f"the prompt is {reprlib.repr(prompt)}", "give text, or a list of token ids")
    max_tokens = whole("max_tokens", max_tokens, 1)
    if fields.get("stream"):
        raise PdlabError("an answer comes whole: stream=True is not for this call", "stream with an HTTP client")
    if not (request_id is None or (isinstance(request_id, str) and _fits_a_header(request_id))):
        raise PdlabError(f"the request_id is {reprlib.repr(request_id)}", "give letters, digits and signs of ASCII")
    try:
        json.dumps([prompt, fields], allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:  # a UnicodeEncodeError is a ValueError
        raise PdlabError(f"this request cannot be written as JSON ({error})", "give text, numbers, lists …") from None
    return max_tokens


def _fits_a_header(text: str) -> bool:
    """Whether it arrives as it was sent: spaces around a header's value are no part of it."""
    return text.isascii() and text.isprintable() and text == text.strip()


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
        PdlabError: it was not asked, as `check` says.
    """
    max_tokens = check(prompt, max_tokens, fields, request_id)
    if fresh:
        fields = {"cache_salt": uuid.uuid4().hex, **fields}
    request_id = request_id or new_request_id()
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True, **fields}
    answer = post(url, "/v1/completions", body, {"X-Request-Id": request_id}, who)
    fields = answer.json()
    choice = fields["choices"][0]
    return Answer(
        text=choice["text"],
        token_ids=tuple(choice.get("token_ids") or ()),
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
        hop = answer.headers.get("X-Failed-Hop", "")
        raise RequestError(answer.status_code, f"{who} answered {answer.status_code}: {_message(answer, hop)}", hop=hop)
    return answer


def _message(answer: httpx.Response, hop: str) -> str:
    try:
        message = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = answer.text.strip()[:300] or "nothing"
    # An engine that fails says "Internal server error", which may be any of them.
    return f"{hop}: {message}" if answer.status_code >= 500 and hop not in message else message
