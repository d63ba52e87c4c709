"""Faults of processes: an engine dies, comes back as another, or is killed by what it is asked."""

import time
from collections.abc import Iterator
from typing import Any

from pdlab.claims.bench import PROMPT, TOKENS
from pdlab.errors import must
from pdlab.faults.hands import SOON, Client, Hands, quietly
from pdlab.faults.outcome import Seen
from pdlab.lab.halves import Asked, Got, ask, body_of, new_transfer_id, prefill_half

STREAM = 9.0  # seconds of decoding, in which P is killed


def prefill_killed(h: Hands) -> Seen:
    """P is killed while D waits for the KV of one request, and streams the answer of another."""
    count = tokens_in(h, STREAM)
    right = h.d.complete(PROMPT, count, ignore_eos=True).token_ids
    chunks = Client(h.lab.proxy.url, body_of(PROMPT, count, stream=True, ignore_eos=True)).chunks()
    tokens = [token for _ in range(3) for token in tokens_of(first_of(chunks))]
    transfer, body = new_transfer_id(), body_of(PROMPT, TOKENS)
    with h.lab.hold("before_write") as hold:
        journey = h.lab.submit(PROMPT, TOKENS, fresh=True)
        Asked(h.p.url, prefill_half(body, transfer))
        stock = Asked(h.d.url, h.decode_half(body, transfer), h.longer(3))
        hold.wait(2)
        must(h.d.usage().running == 1, "D was done with the stream before P was killed")
        got, _ = h.ended(journey, h.kill(h.p))
    h.until_gone(h.p)
    must(got.status == 502 and "prefill" in got.hop and got.seconds < SOON, f"through the proxy: {got}")
    tokens += [token for chunk in chunks for token in tokens_of(chunk)]
    must(tuple(tokens) == right, f"the stream had {tokens}, right: {right}")
    nothing = stock.result()
    must(nothing.status == 0, f"D's half got {nothing}")
    h.until(lambda: h.d.usage().kept, "D has heard that the client left")
    kept = h.d.usage()
    return Seen(
        f"the stream goes on to its end. The half that waits is told nothing: {h.longer(2)} s later its client still "
        "waits (D's socket waits 60 s longer than P's timeout); when the client leaves, D keeps the blocks",
        "502 that names P within 3 s: while D says nothing and waits for KV, the proxy looks whether P is still there; "
        "the stream has all of its tokens, and they are right",
        {"pdlab_seconds": got.seconds, "stock_waited": nothing.seconds, "blocks_of_d": kept.used_blocks},
        journey,
    )


def first_of(chunks: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """The next event of a stream. Refuted if it has ended."""
    chunk = next(chunks, None)
    must(chunk, "the stream has ended")
    return chunk or {}


def tokens_of(chunk: dict[str, Any]) -> list[int]:
    """The token ids of one event of a stream."""
    return chunk["choices"][0].get("token_ids") or []


def tokens_in(h: Hands, seconds: float) -> int:
    """How many tokens D decodes in that time, alone; within its length."""
    began = time.monotonic()
    h.d.complete(PROMPT, 20, ignore_eos=True)
    pace = 20 / (time.monotonic() - began)
    return min(int(pace * seconds), h.settings.max_model_len - len(PROMPT) - 1)


def prefill_restarted(h: Hands) -> Seen:
    """P dies and comes back: with another engine id."""
    h.must_serve()  # D knows P now
    old = h.p.engine_id
    h.kill(h.p)
    h.until_gone(h.p)
    time.sleep(1.2)  # the proxy believes an engine id for a second
    dead, journey = h.send()
    must(dead.status == 503 and "bootstrap" in dead.hop and dead.seconds < SOON, f"while P is down: {dead}")
    half = h.decode_half(body_of(PROMPT, TOKENS), new_transfer_id(), remote_engine_id=old)
    stale = ask(h.d.url, half, h.longer(2))
    must(stale.status == 0, f"D's half with the old id got {stale}")
    h.until(lambda: h.d.usage().kept, "D has heard that the client left")
    healed = h.lab.heal(quietly)
    must(h.p.engine_id != old, "the engine id is the same")
    served, _ = h.must_serve()
    return Seen(
        "an engine id that D knows it does not ask for: with the old one its half waits for the dead P, 60 s longer "
        "than P's timeout",
        f"503 that names the bootstrap server while P is down. {repr(healed)[1:-1]}; "
        "the next request has the new id by itself",
        {"pdlab_seconds": dead.seconds, "after_seconds": served.seconds},
        journey,
    )


def decode_killed(h: Hands) -> Seen:
    """D is killed while P is about to write into its memory."""
    with h.lab.hold("before_write") as hold:
        journey = h.lab.submit(PROMPT, TOKENS, fresh=True)
        hold.wait()
        got, _ = h.ended(journey, h.kill(h.d))
    h.until_gone(h.d)
    must(got.status == 502 and "decode" in got.hop and got.seconds < SOON, f"through the proxy: {got}")
    h.until(lambda: journey.of("transfer.written"), "P writes")
    written = journey.of("transfer.written")[0].facts
    must(written["result"] != 0, f"the write returned {written['result']}")
    h.until_free(h.p, patience=h.longer(10))
    must(journey.of("send.expired"), "P freed the blocks before its timeout")
    return Seen(
        f"P's write fails with {written['result']}; the KV counts as not sent: P keeps the blocks for {h.timeout} s",
        "502 that names D at once; P's blocks come back by themselves",
        {"pdlab_seconds": got.seconds, "write_seconds": written["seconds"]},
        journey,
    )


def client_leaves(h: Hands) -> Seen:
    """The client leaves: while P computes, while D waits, after the write, while D decodes."""
    seconds = {}
    began = time.monotonic()
    client = Client(h.lab.proxy.url, body_of([1000 + n % 3000 for n in range(2000)], TOKENS))
    h.until(lambda: any(one.of("scheduled", "P scheduler") for one in h.lab.trace(began)), "P computes")
    client.leave()
    seconds["while P computes"] = h.until_free(h.p, h.d, patience=30)
    for point, moment in (("before_write", "while D waits"), ("before_answer", "after the write")):
        began = time.monotonic()
        with h.lab.hold(point) as hold:
            client = Client(h.lab.proxy.url, body_of(PROMPT, TOKENS))
            hold.wait()
            client.leave()
            h.until(lambda: h.d.usage().kept, "D has heard that the client left")
            kept = h.d.usage()
            must(kept.used_blocks == 5 and not kept.parked, f"D {kept}")
        seconds[moment] = h.until_free(h.p, h.d, patience=h.longer(10))
        h.until(lambda began=began: has(h, began, "pull.received", 2), "P has a second pull")
        must(has(h, began, "transfer.written", 1), "P did not write")
    client = Client(h.lab.proxy.url, body_of(PROMPT, 200, ignore_eos=True, stream=True))
    first_of(client.chunks())
    client.leave()
    seconds["while D streams"] = h.until_free(h.p, h.d)
    before = h.p.usage().placeholders
    client = Client(h.lab.proxy.url, body_of(PROMPT, 200, ignore_eos=True))
    h.until(lambda: h.d.usage().running, "D decodes")
    client.leave()
    seconds["while D decodes, and does not stream"] = h.until_free(h.p, h.d)
    h.until(lambda: h.p.usage().placeholders == before + 1, "P has a placeholder more")
    _, journey = h.must_serve()
    return Seen(
        "a D that waits for a write cannot take its blocks back: it keeps them, for nobody, until P has answered. Of "
        "an answer that is not streamed it sends a second pull, an empty one, for P to free its blocks: a write that "
        "is planned comes all the same; and if P has freed them, as when D decodes already, a placeholder stays in P",
        "the proxy closes both halves: P stops if it still computes, D frees at once if it decodes, else after the "
        f"write; at every one of {len(seconds)} moments all blocks come back",
        {"seconds_until_free": seconds},
        journey,
    )


def has(h: Hands, since: float, event: str, times: int) -> bool:
    """Whether the first request since then has that many of these events, or more."""
    return len(h.lab.trace(since)[0].of(event)) >= times


def swapped_roles(h: Hands) -> Seen:
    """P gets the half of D, and D the half of P."""
    body, transfer = body_of(PROMPT, TOKENS), new_transfer_id()
    p = ask(h.p.url, h.decode_half(body, transfer), SOON * 3)
    d = ask(h.d.url, prefill_half(body, transfer), SOON * 3)
    must(p.status != 200 and d.status != 200, f"P's half got {p}, D's {d}")
    causes = {h.until_dead(engine) for engine in h.lab.engines}
    must(causes == {"AssertionError"}, f"they died of {causes}")
    return Seen(
        f"both engines die of an AssertionError; P's client gets {_said(p)}, D's {_said(d)}",
        "the proxy sends each half to its side, and drops what the client says of it; heal() brings both back",
        {"p": p.reason, "d": d.reason},
    )


def incomplete_parameters(h: Hands) -> Seen:
    """D's half does not say where P's bootstrap server is."""
    half = h.decode_half(body_of(PROMPT, TOKENS), new_transfer_id(), remote_bootstrap_addr=None)
    got = ask(h.d.url, half, SOON)
    must(got.status == 0, f"D's half got {got}")
    cause = h.until_dead(h.d)
    must(cause == "KeyError", f"it died of {cause}")
    return Seen(
        "D logs that it will not transfer, and parks the request all the same, for ever; "
        "when its client leaves, D's engine dies of a KeyError",
        "the proxy fills in all four parameters itself; heal() brings D back",
        {"waited": got.seconds},
    )


def _said(got: Got) -> str:
    return f"{got.status}" if got.status else "a broken connection"
