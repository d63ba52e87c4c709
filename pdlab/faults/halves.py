"""Faults of a half: an engine refuses it, never gets it, ends it by a stop, or does not find the other engine."""

import time

from pdlab.claims.bench import OTHER, PROMPT, TOKENS
from pdlab.errors import PdlabError, must
from pdlab.faults.hands import SOON, Hands
from pdlab.faults.outcome import Seen
from pdlab.lab.halves import Asked, ask, body_of, new_transfer_id, prefill_half
from pdlab.lab.join import join

EMPTY_PORT = "http://127.0.0.1:1"  # nothing listens there


def eos_on_prefill(h: Hands) -> Seen:
    """P's only token ends its answer: it is a stop token, or EOS."""
    first = h.p.complete(PROMPT, 1).token_ids[0]
    p, d = h.halves(body_of(PROMPT, TOKENS, stop_token_ids=[first]))
    must((p.status, p.finish_reason) == (200, "stop"), f"P's half got {p}")
    must(d.status == 500 and h.timeout <= d.seconds < h.longer(10), f"D's half got {d}")
    got, journey = h.send(stop_token_ids=[first])
    must((got.status, got.finish_reason) == (200, "stop") and got.seconds < SOON, f"through the proxy: {got}")
    return Seen(
        f"P answers 200 'stop', frees its blocks and sends nothing; D waits all of the {h.timeout} s, then 500",
        "P's half has ignore_eos and no stop settings: it ends by its length, and the client has its 'stop' at once",
        {"stock_seconds": d.seconds, "pdlab_seconds": got.seconds},
        journey,
    )


def prefill_refuses(h: Hands) -> Seen:
    """P refuses its half."""
    p, d = h.halves(body_of(PROMPT, TOKENS, min_tokens=5))
    must(p.status == 400, f"P's half got {p}")
    must(d.status == 500 and h.timeout <= d.seconds < h.longer(10), f"D's half got {d}")
    h.must_serve(min_tokens=5)
    too_long = [1000 + n % 3000 for n in range(h.settings.max_model_len + 10)]
    got, journey = h.send(too_long)
    must(got.status == 400 and got.seconds < SOON, f"through the proxy, too long: {got}")
    return Seen(
        f"P answers 400 (min_tokens 5 beside max_tokens 1); nobody tells D, which waits {h.timeout} s, then 500",
        "what P would refuse is not in its half; where it does refuse (a prompt too long) its 400 comes at once",
        {"stock_seconds": d.seconds, "pdlab_seconds": got.seconds},
        journey,
    )


def decode_refuses(h: Hands) -> Seen:
    """D refuses its half after P has computed the prompt."""
    transfer, body = new_transfer_id(), body_of(PROMPT, TOKENS)
    p = ask(h.p.url, prefill_half(body, transfer))
    kept = h.p.usage()
    must(p.status == 200 and kept.kept == 1 and kept.used_blocks == 5, f"P's half got {p}, P {kept}")
    d = ask(h.d.url, h.decode_half({**body, "logprobs": 1000}, transfer))
    must(d.status == 400, f"D's half got {d}")
    h.until_free(h.p, h.d)
    with h.lab.hold("before_decode_send") as hold:
        journey = h.lab.submit(PROMPT, TOKENS, fresh=True, logprobs=1000)
        hold.wait()
        journey.until(6)
        began = time.monotonic()
    got, _ = h.ended(journey, began)
    must(got.status == 400 and "decode" in got.hop and got.seconds < SOON, f"through the proxy: {got}")
    h.until_free(h.p, h.d)
    return Seen(
        "D answers 400, and its scheduler takes the request in only to abort it: so its worker sends P an empty pull, "
        "P writes nothing and frees its blocks at once",
        "the same: the client has D's 400 at once, and P its blocks",
        {"stock_seconds": d.seconds, "pdlab_seconds": got.seconds},
        journey,
    )


def decode_never_comes(h: Hands) -> Seen:
    """D never comes for what P has computed."""
    p = ask(h.p.url, prefill_half(body_of(PROMPT, TOKENS), new_transfer_id()))
    must(p.status == 200, f"P's half got {p}")
    kept = h.p.usage()
    must(kept.kept == 1 and kept.used_blocks == 5, f"P {kept}")
    freed = h.until_free(h.p, patience=h.longer(10))
    must(freed > h.timeout - 2, f"P freed them after {freed:.1f} s")
    _, journey = h.must_serve()
    return Seen(
        f"P keeps the 5 blocks and frees them after {h.timeout} s (upstream's default: 480 s)",
        "the proxy sends both halves at once; if D's fails, P's is cancelled while it still computes",
        {"freed_seconds": freed},
        journey,
    )


def decode_comes_late(h: Hands) -> Seen:
    """D comes for the KV after P has given it up."""
    transfer, body = new_transfer_id(), body_of(PROMPT, TOKENS)
    before = h.p.usage().placeholders
    p = ask(h.p.url, prefill_half(body, transfer))
    must(p.status == 200, f"P's half got {p}")
    h.until_free(h.p, patience=h.longer(10))
    d = ask(h.d.url, h.decode_half(body, transfer), patience=h.longer(10))
    must(d.status == 500 and h.timeout <= d.seconds < h.longer(10), f"D's half got {d}")
    left = h.p.usage().placeholders - before
    must(left == 1, f"P has {left} more placeholders")
    _, journey = h.must_serve()
    return Seen(
        f"P takes the pull for one that came early, and makes a placeholder that nothing ever fills or removes; "
        f"D waits {h.timeout} s, then 500",
        "both halves leave together, so D comes first; the next request is served, the placeholder stays",
        {"stock_seconds": d.seconds, "placeholders_left": left},
        journey,
    )


def wrong_engine_id(h: Hands) -> Seen:
    """D is told an engine id that P's bootstrap server does not know."""
    p, d = h.halves(body_of(PROMPT, TOKENS), remote_engine_id="nobody")
    must(p.status == 200 and d.status == 500 and d.seconds < h.timeout, f"P's half got {p}, D's {d}")
    freed = h.until_free(h.p, h.d, patience=h.longer(10))
    must(freed > h.timeout - 2, f"P freed its blocks after {freed:.1f} s")
    got, journey = h.must_serve()
    return Seen(
        f"D fails at once with 500, 'Internal server error', and the reason is only in its log; "
        f"P keeps its blocks for {h.timeout} s",
        "the proxy asks the bootstrap server for the id, not older than a second",
        {"stock_seconds": d.seconds, "freed_seconds": freed, "pdlab_seconds": got.seconds},
        journey,
    )


def dead_bootstrap(h: Hands) -> Seen:
    """Nothing listens at the bootstrap address that D is told."""
    body = body_of(PROMPT, TOKENS)
    d = ask(
        h.d.url, h.decode_half(body, new_transfer_id(), remote_engine_id="nobody", remote_bootstrap_addr=EMPTY_PORT)
    )
    must(d.status == 500 and d.seconds < SOON, f"D's half got {d}")
    known = ask(h.d.url, h.decode_half(body, new_transfer_id(), remote_bootstrap_addr=EMPTY_PORT), h.longer(10))
    must(known.status == 500 and known.seconds >= h.timeout, f"D's half, with an engine that it knows, got {known}")
    h.must_serve()
    return Seen(
        "D asks three times and fails within a second, 500; an engine id that it knows already it does not ask for: "
        "a dead bootstrap server is not noticed then",
        "the proxy asks it, at most a second before a request, and says 503 where it does not (see prefill_restarted)",
        {"stock_seconds": d.seconds},
    )


def foreign_bootstrap(h: Hands) -> Seen:
    """Something else answers at the bootstrap address: here D's own API server."""
    body = body_of(PROMPT, TOKENS)
    d = ask(h.d.url, h.decode_half(body, new_transfer_id(), remote_engine_id="nobody", remote_bootstrap_addr=h.d.url))
    must(d.status == 500 and d.seconds < SOON, f"D's half got {d}")
    try:
        join(prefill=h.p.url, decode=h.d.url, bootstrap=h.d.url).down()
        refused = ""
    except PdlabError as error:
        refused = error.message
    must("bootstrap" in refused, f"join took it: {refused}")
    return Seen(
        "D gets 404 there and fails with 500",
        "up() and join() compare the engine id that it names with P's own, and refuse it before any request",
        {"stock_seconds": d.seconds},
    )


def one_transfer_two_prompts(h: Hands) -> Seen:
    """P and D are given two prompts of one length under one transfer_id."""
    right, other = h.right, h.right_of_other
    transfer = new_transfer_id()
    p = Asked(h.p.url, prefill_half(body_of(PROMPT, TOKENS, ignore_eos=True), transfer))
    unsalted = {key: value for key, value in body_of(OTHER, TOKENS).items() if key != "cache_salt"}
    d = ask(h.d.url, h.decode_half(unsalted, transfer))
    must(p.result().status == 200 and d.status == 200, f"D's half got {d}")
    must(d.token_ids == right != other, f"D answered {d.token_ids}; right: {other}, P's prompt: {right}")
    poisoned = h.d.complete(OTHER, TOKENS, fresh=False).token_ids
    must(poisoned != other, "the next one, which hits D's prefix cache, was right")
    h.lab.reset()
    healed = h.d.complete(OTHER, TOKENS, fresh=False).token_ids
    must(healed == other, f"after the reset D answers {healed}, not {other}")
    _, journey = h.must_serve()
    return Seen(
        "200, and D answers P's prompt: nobody compares the two. D's prefix cache has the wrong blocks under right "
        "hashes now: the next plain request with D's prompt is answered wrongly too",
        "every request has a transfer_id of its own, whatever the client sends; lab.reset() empties both prefix caches",
        {"stock_seconds": d.seconds},
        journey,
    )


def several_answers(h: Hands) -> Seen:
    """One transfer_id for more than one sequence: n > 1, or a list of prompts."""
    p, d = h.halves(body_of(PROMPT, TOKENS, n=2, temperature=1))
    must((p.status, d.status) == (200, 200), f"P's half got {p}, D's {d}")
    kept = h.p.usage()
    must(kept.kept == 1, f"P {kept}")
    for name, value in (("n", 2), ("prompt_logprobs", 1)):
        got, _ = h.send(None, TOKENS, **{name: value})
        must(got.status == 400 and got.seconds < SOON, f"{name} through the proxy: {got}")
    listed = ask(h.lab.proxy.url, body_of([PROMPT, OTHER], TOKENS))
    must(listed.status == 400 and listed.seconds < SOON, f"two prompts through the proxy: {listed}")
    _, journey = h.must_serve(logprobs=2)
    return Seen(
        "n=2: 200, but P's two sequences share one entry in reqs_need_send: the blocks of one of them are never freed, "
        "and do not expire either",
        "400 at once for n > 1, lists of prompts, log-probabilities of the prompt; those of the answer are served",
        {"blocks_of_p": kept.used_blocks},
        journey,
    )


def stalled_senders(h: Hands) -> Seen:
    """Twenty pulls for requests that P never gets, and then a request that P has ready."""
    before = h.p.usage().placeholders
    body = body_of(OTHER, 1)
    stray = []
    for count in range(1, 21):  # one after the other: pulls of one step of D go in one message
        stray.append(Asked(h.d.url, h.decode_half(body, new_transfer_id()), h.longer(20)))
        h.until(lambda count=count: h.p.usage().placeholders - before >= count, f"{count} pulls are at P")
    got, journey = h.send()
    must(got.status == 200 and got.token_ids == h.right, f"through the proxy: {got}")
    lost = [one.result() for one in stray]
    must(got.seconds > h.timeout / 2, f"it did not stall: {got.seconds:.1f} s")
    must(all(one.status == 500 for one in lost), f"the strays got {lost}")
    return Seen(
        f"each stray pull takes one of P's 20 sender tasks for {h.timeout} s; then D's half gets 500",
        "a request that is ready waits behind them until their timeout, and is served then, rightly; "
        "stray pulls come from requests that P refuses, and from clients that leave an answer that is not streamed",
        {"pdlab_seconds": got.seconds},
        journey,
    )


def client_parameters(h: Hands) -> Seen:
    """The client makes kv_transfer_params of its own."""
    own = {"do_remote_prefill": True, "do_remote_decode": True, "transfer_id": "mine", "remote_engine_id": 7}
    _, journey = h.must_serve(kv_transfer_params=own)
    return Seen(
        "an engine takes them as they are: see swapped_roles and incomplete_parameters",
        "the proxy drops them, and says so in its log",
        {},
        journey,
    )


def short_prompts(h: Hands) -> Seen:
    """Prompts of one token, and of one block, one token less and one more."""
    size = int(h.d.registered_kv["block_size"])
    lengths = (1, size - 1, size, size + 1)
    for n in lengths:
        right = h.d.complete(PROMPT[:n], TOKENS).token_ids
        got, journey = h.send(PROMPT[:n])
        must(got.status == 200 and got.token_ids == right, f"{n} tokens: {got}, right: {right}")
    return Seen(
        f"nothing special: {', '.join(map(str, lengths))} tokens are answered rightly",
        "the same; of a prompt of one token the one token is moved, and computed again",
        {},
        journey,
    )
