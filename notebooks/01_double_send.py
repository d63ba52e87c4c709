# Written by notebooks/paired.py from the notebook of the same name: edit that one.
# ruff: noqa

# %% [markdown]
# # 01 · Double send
#
# **The question of this chapter:** what exactly does the proxy send, to whom, and what does it wait for?
#
# Slides draw an arrow from the client to P and another from P to D, as if P handed the request on. With vLLM's `MooncakeConnector` it does not. Look.

# %%
import pdlab
from pdlab import views

lab = pdlab.up(run="01_double_send")
prompt = list(range(1000, 1143))  # 143 token ids: a prompt without any words to distract

# %% [markdown]
# ## Predict

# %%
views.predict(
    "You send one request to the proxy. How many HTTP requests leave it, and when?",
    [
        "one, to P, which calls D",
        "two, one after the other: D's when P has answered",
        "two at once",
        "two at once, and D's again when P is done",
    ],
    answer="two at once",
    because="Both leave in the same moment. D knows by itself when its KV is there: it asks P for it. (Other connectors differ.)",
)

# %% [markdown]
# ## Run
#
# One request, and its journey: all that happened to it in five places.

# %%
journey = lab.send(prompt, max_tokens=6, fresh=True)
journey

# %% [markdown]
# ## Look
#
# Step by step: ◀ ▶, the arrow keys, or the numbers in the diagram. For this chapter, the first steps count.

# %%
steps = views.stepper(journey)
diagram = views.sequence_view(journey)
steps.follow(diagram)
steps

# %%
diagram

# %% [markdown]
# What the two halves say, less the prompt, which is the same in both:

# %%
halves = {half.facts["role"]: half.facts for half in journey.of("half.sent")}
for role, half in halves.items():
    print(role)
    for name in ("max_tokens", "stream", "ignore_eos"):
        print(f"   {name:<22} {half[name]}")
    for name, value in half["kv_transfer_params"].items():
        print(f"   {name:<22} {value}")

# %%
p, d = halves["prefill"], halves["decode"]
assert p["kv_transfer_params"]["do_remote_decode"] and not p["kv_transfer_params"]["do_remote_prefill"]
assert d["kv_transfer_params"]["do_remote_prefill"] and not d["kv_transfer_params"]["do_remote_decode"]
assert p["kv_transfer_params"]["transfer_id"] == d["kv_transfer_params"]["transfer_id"]
assert (p["max_tokens"], d["max_tokens"]) == (1, 6)
"the same transfer_id; opposite flags; P is to make one token"

# %% [markdown]
# Read the flags from the engine's point of view. `do_remote_decode`, to P: *somebody else decodes this, so keep its KV for
# them.* `do_remote_prefill`, to D: *somebody else prefills this, so get its KV from them*, and there it says from whom.
#
# P must make one token: an engine has no other way to say "prefill only". `ignore_eos` is pdlab's own addition: if that one
# token were an end-of-sequence token, P's request would end by a *stop*, and stock vLLM sends KV only of requests that
# ended by their *length* (chapter 06).
#
# ### Nobody waits for P's answer

# %%
noted = [event for event in journey.events if event.name in ("half.sent", "half.answered")]
order = [f"{event.facts['role']} {event.name.removeprefix('half.')}" for event in noted]
assert order[:2] == ["prefill sent", "decode sent"]
order[:2]

# %% [markdown]
# Both left before anything was answered. And P's answer? It has one token, made of the very same prompt; and it is thrown
# away. The client's first token is D's.

# %%
(of_p,), (of_d,) = journey.of("token.first", "P scheduler"), journey.of("token.first", "D scheduler")
assert of_p.facts["status"] == "FINISHED_LENGTH_CAPPED"
assert of_p.time < of_d.time
print(
    f"P made {of_p.facts['num_output_tokens']} token, before D had its first; the client has {len(journey.token_ids)}, all of D's"
)

# %% [markdown]
# ## Break it
#
# Hold P's half in the proxy, so that P does not even know of the request. **Predict:** how far does D come?

# %%
with lab.hold("before_prefill_send") as hold:
    late = lab.submit(prompt, max_tokens=6, fresh=True)
    hold.wait()
    late.until(9)
    late.until(13)
    assert not late.prefill.moments
    print("P's scheduler: knows nothing")
    print("D:", late.decode.moments[-1].status, "with", len(late.decode.blocks), "blocks")
late.wait()
assert late.token_ids == journey.token_ids
late.token_ids == journey.token_ids

# %% [markdown]
# As far as it can: D allocated its blocks, parked the request and even sent its pull to P, where it waited for a request
# that was not there yet. Then P's half came, and the answer is the same. Nothing depends on who is first.
#
# And a client that meddles, with flags of its own? Two such combinations would kill a stock engine (chapter 06). The proxy
# drops them:

# %%
mine = lab.send(prompt, max_tokens=6, fresh=True, kv_transfer_params={"do_remote_decode": True})
assert mine.token_ids == journey.token_ids
assert {half.facts["kv_transfer_params"]["transfer_id"] for half in mine.of("half.sent")} == {mine.transfer_id}
[half.facts["kv_transfer_params"]["do_remote_decode"] for half in mine.of("half.sent")]

# %% [markdown]
# ### What the client sees
#
# The body of an answer is D's, as it comes. If a half fails, the other one is ended, and the client hears which hop it was:
# the header `X-Failed-Hop` says it. Here D refuses its half:

# %%
from pdlab.errors import RequestError

try:
    lab.send(prompt, max_tokens=6, fresh=True, logprobs=1000)
except RequestError as error:
    assert error.status == 400 and error.hop.startswith("decode instance")
    print("status", error.status, "from the", error.hop.split(" http")[0])
    print(error.message)
else:
    raise AssertionError("D took it")

# %% [markdown]
# ## The proxy's own code
#
# `pdlab/lab/proxy.py` is about two hundred lines, and written to be read. `Proxy.double_send` is the whole of this
# chapter: read a body, choose P and D, make a `transfer_id`, send twice, wait for D's first chunk.

# %%
views.source_view(journey, step=1)

# %% [markdown]
# ## In an interview
#
# > *What does the proxy do in vLLM's P/D with the MooncakeConnector?* It sends every request twice, at once: to P with `do_remote_decode` and
# > `max_tokens=1`, to D with `do_remote_prefill` and P's engine id and bootstrap address, both with one fresh
# > `transfer_id`. It streams D's answer and never waits for P's: D finds out by itself when its KV is there. KV never goes
# > through the proxy.
# >
# > *Why does P generate a token?* An engine cannot be asked for none. It is thrown away.
# >
# > *And with other connectors?* With the `NixlConnector`, which pulls, the proxy asks P first and waits: P's answer carries its
# > block ids and address, the proxy puts them into D's half, and D reads. (Chapter 08.)
#
# | step | where |
# |---|---|
# | 1 the proxy sends both halves | `pdlab.lab.proxy:Proxy.double_send`, `pdlab.lab.bodies` |
# | 2 each engine takes its half | `Scheduler.add_request` |
# | 5 P is finished | `MooncakeConnectorScheduler.request_finished` |

# %%
lab.reset()  # as you found it: for the next reader, or the next run
