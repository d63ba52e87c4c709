# Written by notebooks/paired.py from the notebook of the same name: edit that one.
# ruff: noqa

# %% [markdown]
# # 06 · When it breaks
#
# **The question of this chapter:** when a part fails, who notices, what does the client get, and who gives the blocks back?
#
# The engines here are stock vLLM: what they do is what yours do. `lab.fault(name)` produces a fault on them, twice where it can:
# with the two halves sent by hand, as the proxy of vLLM's examples sends them (**stock**), and through pdlab's proxy
# (**pdlab**). Each step of it is asserted; then the lab is healed, and the next request must be right (**after**).
#
# Much of what follows is waiting. P waits for D's pull for `VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT`: 480 s by default. The lab
# of this chapter has 5 s, and is a lab of its own, beside that of the other chapters: another 5.5 GB of memory. If that is too
# much for this machine, end the other one first: `python3 -m pdlab down`.

# %%
import pdlab
from pdlab import faults, views

lab = pdlab.up(run="06_when_it_breaks", name="faults", abort_timeout=5)
for role, usage in lab.usage().items():
    print(f"{role:<8}", usage)

# %% [markdown]
# Nothing is used: no request holds a block. That is what every fault below has to come back to. The panel shows it live,
# with the means to bring it about. (In a recorded run it shows what was.)

# %%
views.health_view(lab)

# %% [markdown]
# ## Predict

# %%
views.predict(
    "The one token that P computes happens to be end-of-sequence. Both halves were sent as the proxy of vLLM's examples sends them. What does the client get?",
    [
        "the empty answer, at once",
        "the right answer: P's token is thrown away anyway",
        "an error, at once",
        "nothing for 480 s, then 500",
    ],
    answer="nothing for 480 s, then 500",
    because="P sends KV only if its request was ended by its length. A stop ends it otherwise: P frees the blocks, and tells nobody.",
)

# %% [markdown]
# ## Run
#
# The prompt is one whose first token we know; it is made a stop token.

# %%
outcome = lab.fault("eos_on_prefill")
outcome

# %%
assert outcome.facts["stock_seconds"] >= 5 > 3 > outcome.facts["pdlab_seconds"]
assert not outcome.healed.started

# %% [markdown]
# What pdlab's proxy does about it is in P's half: no stop settings (`stop_token_ids` is left out), and `ignore_eos` for EOS itself.
# The proxy of vLLM's examples does neither.

# %%
half = outcome.journey.of("half.sent", "proxy")[0].facts
assert half["role"] == "prefill" and half["ignore_eos"] and "stop_token_ids" not in half["fields"]
half["role"], half["max_tokens"], half["ignore_eos"]

# %% [markdown]
# ## P dies while D waits
#
# `kill -9`, between the plan of the transfer and the write; meanwhile D streams the answer of another request.

# %%
outcome = lab.fault("prefill_killed")
outcome

# %%
journey = outcome.journey
assert "WAITING_FOR_REMOTE_KVS" in [status for _, status in journey.decode.status]
assert not journey.of("transfer.written") and outcome.facts["pdlab_seconds"] < 3
assert not journey.of("blocks.freed", "D scheduler")  # D keeps them
views.sequence_view(journey)

# %% [markdown]
# Read the diagram from its end: which hop failed, and how far the request had come. D could not tell: to it, P is slow. Its
# socket to P has a timeout of `VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT` and another 60 seconds.
#
# Afterwards the lab was healed: P was started again, with an engine id of its own, and D, which would have kept the blocks
# of that request for another minute.
#
# ## The client leaves
#
# The commonest fault of all. Five moments; D's blocks are the interesting ones.

# %%
outcome = lab.fault("client_leaves")
outcome

# %%
assert not outcome.healed.started
list(outcome.facts["seconds_until_free"])

# %% [markdown]
# Why does D keep the blocks of a request that nobody waits for? Because P may be writing into them. If D gave them to
# another request, P would write into that one. And when D has its KV, a client that leaves can do harm to P still: see
# the placeholder, which comes back below.
#
# ## Wrong text, status 200
#
# What a transfer_id names is not checked by anybody. P gets one prompt, D another of the same length, under one id:

# %%
outcome = lab.fault("one_transfer_two_prompts")
outcome

# %% [markdown]
# This is the worst of them: no error, and the harm outlives the request. The wrong blocks are in D's prefix cache under the
# hashes of the right prompt, until they are evicted, or the cache is emptied.
#
# ## It cannot be written
#
# D's blocks lie in falling order, so that hardly two can be written in one piece. A prompt of 74 blocks then needs some 2,200
# pieces, and Mooncake's TCP transport takes 2,048 in a batch.

# %%
outcome = lab.fault("write_fails")
outcome

# %%
assert outcome.facts["pieces"] > 2048 and outcome.facts["arrived"] > 0
outcome.facts["reason"]

# %% [markdown]
# A write that failed is not over: much of what the transport had taken arrives after all, in blocks that D has freed. A request
# that was given one of them meanwhile would read the wrong KV. D cannot know: it was told that nothing came.
#
# ## Stray pulls
#
# Pulls for requests that P never gets, twenty of them, one after the other; and then a request that is ready.

# %%
outcome = lab.fault("stalled_senders")
outcome

# %%
assert outcome.facts["pdlab_seconds"] > 2.5
assert lab.prefill.usage().placeholders > 0
lab.prefill.usage().placeholders > 0

# %% [markdown]
# P's worker has twenty tasks that serve pulls, and a pull that waits for its request keeps one. The placeholders that such
# pulls make in `reqs_need_send` are never removed: only entries with a request id expire.
#
# ## Break it yourself
#
# There are more. Choose one, say what will happen, and run it: `lab.fault("incomplete_parameters")` kills D's engine with one
# missing field; `lab.fault("swapped_roles")` kills both; `lab.fault("other_models")` starts two Ds that are no pair of P's. They take
# half a minute each.
#
# Whatever you do to this lab, `lab.heal()` brings it back: it starts again what died, lets go what is held, and waits for
# blocks that are kept.

# %%
lab.heal()

# %% [markdown]
# ## All of them
#
# What came of every fault when they were last run, all on one machine (`python3 -m pdlab faults` runs them on yours). The
# table is written by the checks.

# %%
table = faults.Table()
assert len(table) == len(faults.FAULTS)
table

# %% [markdown]
# ## In an interview
#
# > *What happens if P's first token is EOS?* P's request is finished by a stop, not by its length. The connector then sends
# > nothing, and P frees the blocks. D's pull waits in one of P's sender tasks, which gives up after 480 s and tells D; D's
# > client gets 500 then. The proxy avoids it: `ignore_eos`, and no stop settings, in P's half.
# >
# > *P dies while D waits. Who notices?* Nobody is left to tell D: its own socket gives up after 480 + 60 s. The proxy can: by P's
# > connection, or its bootstrap server.
# >
# > *The client leaves while D waits. When are D's blocks free?* When P has answered, or D's pull has failed: before that P may
# > still write into them.
# >
# > *Two prompts under one transfer_id?* Nothing but the number of blocks is compared. Wrong text with status 200, and a poisoned
# > prefix cache.
#
# | what | where |
# |---|---|
# | a stop sends nothing | `MooncakeConnectorScheduler.request_finished` |
# | D's failed pull | `MooncakeConnectorWorker._handle_failed_recv`, `Scheduler._handle_invalid_blocks` |
# | expiry on P | `MooncakeConnectorWorker.fetch_finished_sending_reqs` |
# | twenty sender tasks | `MooncakeConnectorWorker._sender_worker` |
# | blocks kept for a write | `Scheduler._free_request`, `delay_free_blocks` |

# %%
lab.down()
