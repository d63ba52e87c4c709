# Written by notebooks/paired.py from the notebook of the same name: edit that one.
# ruff: noqa

# %% [markdown]
# # 02 · The transfer id
#
# **The question of this chapter:** P and D are two servers that never spoke of this request. How do they know that they
# speak of the same one?

# %%
import pdlab
from pdlab import views

lab = pdlab.up(run="02_transfer_id")
prompt = list(range(1000, 1143))
journey = lab.send(prompt, max_tokens=6, fresh=True)
journey

# %% [markdown]
# ## Predict

# %%
views.predict(
    "The proxy gives both halves the same X-Request-Id. Why is that not enough to match them?",
    [
        "it is enough",
        "each engine adds a suffix of its own",
        "HTTP headers do not reach the scheduler",
        "the header is not sent to P",
    ],
    answer="each engine adds a suffix of its own",
    because="Each engine appends eight random hex digits to every request id, so that ids are unique within it.",
)

# %% [markdown]
# ## Look: two request ids, one transfer_id

# %%
p, d = journey.prefill.request_id, journey.decode.request_id
assert journey.request_id in p and journey.request_id in d
assert p != d and p[:-8] == d[:-8]
assert {event.facts["kv_transfer_params"]["transfer_id"] for event in journey.of("request.added")} == {
    journey.transfer_id
}
"the same up to the last eight characters"

# %% [markdown]
# So something must travel that no engine touches: `kv_transfer_params["transfer_id"]`. The engines never look into it. Any
# string will do.
#
# ## How D finds P
#
# D has from the proxy P's *engine id* and the address of P's *bootstrap server*. That one knows at which ZMQ address each
# of P's workers listens; D asks once for an engine and remembers.

# %%
lab.prefill.bootstrap_query()

# %%
second = lab.send(prompt, max_tokens=1, fresh=True)
assert not second.of("engine.asked") and second.of("engine.known")
"the next request asks nobody: D knows P's address"


# %% [markdown]
# ## How P finds the request
#
# P's worker has a table, `reqs_need_send`, by `transfer_id`. **Predict:** who makes the entry, P's own scheduler when it
# schedules the request, or the pull that comes from D?
#
# Let D be first. Hold P's half in the proxy until D's pull has arrived:

# %%
def show(entry):
    return (
        "nothing" if entry is None else f"request {'known' if entry['p_req_id'] else 'unknown'}, ready={entry['ready']}"
    )


with lab.hold("before_prefill_send") as hold:
    d_first = lab.submit(prompt, max_tokens=6, fresh=True)
    hold.wait()
    d_first.until(13)
d_first.wait()
print("when the pull came, P had the transfer_id:", d_first.step(13).facts["known"])
print("when P was scheduled, the table had:      ", show(d_first.step(4).facts["before"]))
print("when P was finished, it had:              ", show(d_first.step(6).facts["after"]))

# %% [markdown]
# And now P first: hold D's half until P has computed everything.

# %%
with lab.hold("before_decode_send") as hold:
    p_first = lab.submit(prompt, max_tokens=6, fresh=True)
    hold.wait()
    p_first.until(6)
p_first.wait()
print("when P was scheduled, the table had:      ", show(p_first.step(4).facts["before"]))
print(
    "when the pull came, P had the transfer_id:",
    p_first.step(13).facts["known"],
    "and was ready:",
    p_first.step(13).facts["ready"],
)

# %%
assert not d_first.step(13).facts["known"] and d_first.step(4).facts["before"]["p_req_id"] == ""
assert p_first.step(13).facts["ready"] and p_first.step(4).facts["before"] is None
assert d_first.token_ids == p_first.token_ids == journey.token_ids
"whoever comes first makes the entry; the other finds it"

# %% [markdown]
# A pull that comes first leaves a placeholder, without a request id and without blocks, and one of P's twenty sender tasks (each
# serves one pull message) waits at it. `ready` is an `asyncio.Event`: P's own scheduler sets it through the worker, one scheduler
# step after the request is finished, when the block ids are known.

# %%
views.sequence_view(d_first)

# %% [markdown]
# ## The pull message and its fields
#
# One message, D to P, over ZMQ: msgpack of a `MooncakeXferMetadata`. As P decoded it off the wire. Those to know are
# `remote_hostname` and `remote_port` (D's Transfer Engine, to write to), `kv_caches_base_addr` (one address a layer), `block_lens`
# (bytes from block to block), `kv_block_lens` (bytes of a block that hold KV) and `req_blocks`; the others describe D's layout, for
# P to compare.

# %%
message = journey.of("pull.received")[0].facts
for name, value in message["fields"].items():
    print(
        f"{name:<28} {type(value).__name__}{f' of {len(value)}' if hasattr(value, '__len__') and not isinstance(value, str) else ''}"
    )

# %%
fields = message["fields"]
assert message["bytes"] < 3000
assert fields["kv_caches_base_addr"] == [region["base_addr"] for region in lab.decode.registered_kv["regions"]]
assert list(fields["req_blocks"].values()) == [[journey.transfer_id, [journey.decode.block_ids]]]
"D's base addresses, and for each request: its transfer_id, and the blocks to fill"

# %% [markdown]
# `req_blocks` is by D's request ids: so P can name them in its answer. The transfer_id beside them is what P matches by. D
# sends all its addresses with each pull; P needs no memory of D.
#
# ## Break it: two prompts under one id
#
# What if the two halves have different prompts? No client can do that through the proxy, but two halves can be sent by
# hand. Both prompts are 143 tokens long and end with the same token.

# %%
import threading
import uuid

other = [*range(2000, 2142), prompt[-1]]
right, wrong = (lab.decode.complete(text, max_tokens=6).token_ids for text in (prompt, other))
transfer = f"xfer-{uuid.uuid4()}"
to_p = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
to_d = {"do_remote_decode": False, "do_remote_prefill": True, "transfer_id": transfer}
to_d |= {"remote_engine_id": lab.prefill.engine_id, "remote_bootstrap_addr": lab.prefill.bootstrap}

half = threading.Thread(target=lab.prefill.complete, args=(prompt, 1), kwargs={"kv_transfer_params": to_p})
half.start()
answer = lab.decode.complete(other, max_tokens=6, kv_transfer_params=to_d)
half.join()

# %% [markdown]
# **Predict:** an error, the answer to D's prompt, or the answer to P's?

# %%
assert answer.token_ids == right != wrong
"D was asked one thing, and answered the other, with status 200"

# %% [markdown]
# Nothing but the number of blocks is compared: that a transfer_id stands for one prompt, nobody checks. P's keys and values were
# written into D's blocks, and D went on from there. (D's half had a `cache_salt` of its own, as `complete` always has: else these blocks would now be in D's prefix
# cache under the wrong prompt's hashes, and answer plain requests too. Chapter 06.)
#
# ## In an interview
#
# > *How do P and D match a request?* By the `transfer_id`, which the proxy puts into both halves' `kv_transfer_params`; the
# > engines' own request ids differ in a random suffix. P's worker keeps `reqs_need_send` by transfer_id; whoever comes
# > first, its own scheduler or D's pull, makes the entry, and an event in it says when the blocks may be sent.
# >
# > *Is there a handshake?* Not between the connectors. D asks P's bootstrap server by HTTP for the ZMQ address, once an
# > engine; then a pull is one message, for all requests that D's scheduler gave out in that step, answered as each gets ready.
# > (Mooncake's Transfer Engines get to know each other by themselves, at the first write.)
#
# | step | where |
# |---|---|
# | 4, 6 the entry, and ready | `MooncakeConnectorWorker.record_send_reqs` |
# | 11 asking for the address | `MooncakeConnectorWorker.handle_new_engine_id` |
# | 12 the pull message | `MooncakeConnectorWorker.receive_kv_from_single_worker`, `MooncakeXferMetadata` |
# | 13 the match | `MooncakeConnectorWorker.send_kv_to_decode` |

# %%
lab.reset()
