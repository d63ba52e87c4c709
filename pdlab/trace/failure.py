"""What failed a request, in one line: which hop, with which status, and why. The same on every run."""

import json
import re
from collections.abc import Sequence
from contextlib import suppress

from pdlab.trace.event import Event

SAYS = "D's worker says: "
LONGEST = 240  # characters of what a server said: vLLM's refusals may go on
# The hops, as the proxy names them without their addresses.
HOPS = {
    "prefill instance": "from the prefill instance",
    "decode instance": "from the decode instance",
    "bootstrap of prefill instance": "from the bootstrap server of the prefill instance",
    "bootstrap": "from the bootstrap server",
    "proxy": "from the proxy",
    "request": "for the request",
    "client": "from the client",
}
_URL = r"\w+://[^\s,;)'\"]*[^\s,;:.)'\"]"
_SERVER = re.compile(rf"\b(instance|server|bootstrap|proxy) {_URL}")
_VARYING = re.compile(
    rf"{_URL}"
    r"|\b\d+\.\d+\.\d+\.\d+(?::\d+)?|\b[\w.-]+:\d{4,5}\b"  # an address
    r"|\b(?:chat)?cmpl-[\w-]+|\bpdlab-[0-9a-f]+"  # a request id
    r"|\b(?:xfer-)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\w*|\b[0-9a-f]{32}\b|\b0x[0-9a-f]+"
)
_HOP = re.compile(rf"({'|'.join(HOPS)}): ")
_ANSWERED = re.compile(r"the ([a-z ]+) answered (\d{3}): ")
_STATUS = re.compile(r"status (\d{3}): ")
_MESSAGE = re.compile(r'"message": ?("(?:[^"\\]|\\.)*")')


def failure_of(error: Exception | None, events: Sequence[Event]) -> str | None:
    """The line; None: nothing that would fail the request.

    Args:
        error: what the client got; None where only a trace is known, or nothing has come yet.
    """
    if error is not None:
        message = getattr(error, "message", str(error)) or type(error).__name__
        line = _line(getattr(error, "status", None), getattr(error, "hop", ""), message)
    else:
        line = _of_the_halves(events) or _of_the_load(events) or ""
    reason = next((event.facts["reason"] for event in events if event.name == "pull.failed"), None)
    if line and reason and SAYS not in line:  # a proxy that is traced has said it
        line = f"{line}; {SAYS}{_plain(reason)}"
    return line or None


def _of_the_halves(events: Sequence[Event]) -> str | None:
    """What the proxy noted. Once D has answered, a failing P is no failure of the request."""
    halves = [event for event in events if event.actor == "proxy"]
    if any(event.name == "half.answered" and event.facts["role"] == "decode" for event in halves):
        return None
    for event in halves:
        if event.name == "half.failed":
            said = _message(event.facts.get("error", ""))
            return _line(event.facts["status"], f"{event.facts['role']} instance", said)
    if any(e.name == "half.closed" and e.facts["role"] == "decode" and e.facts.get("unanswered") for e in halves):
        return "ended before D had answered"  # P was lost, or the client left: the proxy notes no more of it
    return None


def _of_the_load(events: Sequence[Event]) -> str | None:
    """A half that was sent to D without a proxy. Where the policy is to recompute, D goes on."""
    failed = any(event.name == "load.failed" and event.facts["policy"] == "fail" for event in events)
    return "D did not get the KV" if failed else None


def _line(status: int | None, hop: str, message: str) -> str:
    """The status, the hop and the reason, each said once, whichever of them the message says too."""
    words = _plain(message)
    hop, known = _plain(hop), None
    if found := _ANSWERED.match(words):
        # All come through the proxy: that it answered does not tell who failed.
        hop = hop or found[1].removeprefix("proxy")
        known, words = int(found[2]), words[found.end() :]
    if found := _HOP.match(words):
        hop, words = found[1], words[found.end() :]
    if found := _STATUS.match(words):
        known, words = int(found[1]), words[found.end() :]
    begin = " ".join(filter(None, [str(status or known or ""), HOPS.get(hop, f"from {hop}") if hop else ""]))
    return f"{begin}: {words}" if begin and words else begin or words


def _message(text: str) -> str:
    """Without the JSON in which the proxy wraps what it says."""
    if found := _MESSAGE.search(text):
        with suppress(ValueError):
            return str(json.loads(found[1]))
    return text


def _plain(text: str) -> str:
    """Its first line if that is not too long, without addresses and ids. What follows it may be a hint."""
    line = text.strip().partition("\n")[0]
    words = _VARYING.sub("…", _SERVER.sub(r"\1", line))
    return words if len(words) <= LONGEST else f"{words[: LONGEST - 1]}…"
