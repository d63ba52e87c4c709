# Written by notebooks/paired.py from the notebook of the same name: edit that one.
# ruff: noqa

# %% [markdown]
# # 03 · Waiting for remote KVs
#
# **The question of this chapter:** between the moment D takes a request and the moment its KV is there, what is that request
# to D's scheduler?
#
# On this machine that takes a few hundred milliseconds: too short to look around. So we stop it.

# %%
import pdlab
from pdlab import views

lab = pdlab.up(run="03_waiting_for_remote_kvs")
prompt = list(range(1000, 1143))
alone = lab.decode.complete(prompt, max_tokens=6)  # the right answer, by D alone

# %% [markdown]
# ## Predict

# %%
views.predict(
    "A request waits for its KV. Which of these is true on D?",
    [
        "it is in the running queue, with 0 tokens",
        "it is in no queue",
        "it owns its blocks, but is not running",
        "it owns no blocks yet",
    ],
    answer="it owns its blocks, but is not running",
    because="P can only write into blocks that are D's to give. So they are allocated first; the request is parked with them.",
)

# %% [markdown]
# ## Run, and hold it
#
# `before_write`: P has planned the transfer and written nothing.

# %%
hold = lab.hold("before_write")
journey = lab.submit(prompt, max_tokens=6, fresh=True)
hold.wait()
journey

# %% [markdown]
# ## Look
#
# The request stands still; both engines run. (You have a minute before the hold lets it go by itself.) The panel shows where
# requests of this lab can be held, and who is held now. Its buttons do what `lab.hold` and `release` do.

# %%
views.gate_panel(lab)

# %%
moment = journey.decode.moments[-1]
print("status               ", moment.status)
print("queue                ", moment.queue)
print("tokens scheduled     ", moment.scheduled_tokens)
print("num_computed_tokens  ", moment.computed_tokens)
print(
    "blocks               ",
    len(journey.decode.blocks),
    "of which hashed:",
    sum(b.hashed for b in journey.decode.blocks),
)

# %%
assert moment.status == "WAITING_FOR_REMOTE_KVS", "the minute is over: go on from the cell with lab.hold"
assert moment.queue == "kv_holding_waiting"
assert moment.scheduled_tokens == 0
assert len(journey.decode.blocks) == 5 and not any(block.hashed for block in journey.decode.blocks)
assert all(block.ref_count == 1 for block in journey.decode.blocks)

# %% [markdown]
# `kv_holding_waiting` is the second of the scheduler's waiting queues, for requests that hold blocks already; it is looked at
# before `waiting`.
#
# Two things surprise here. **`num_computed_tokens` is 143 already**, though not a byte has come: the scheduler sets it when
# it parks the request, and nobody reads it until the KV is there. And the blocks have **no hashes**: a block with a hash is
# in the prefix cache, and any other request might be given it, with whatever is in it now.

# %%
assert moment.computed_tokens == 143
views.blocks_view(journey)

# %% [markdown]
# Is D idle meanwhile? Ask it something else:

# %%
other = lab.decode.complete("Another request, for D alone", max_tokens=8)
assert len(other.token_ids) == 8
assert journey.decode.moments[-1].status == "WAITING_FOR_REMOTE_KVS", "the minute is over: go on from the cell with lab.hold"
"D answered another request; ours still waits"

# %% [markdown]
# Now let it go. The block tables above fill up by themselves: views of a request that is under way grow with it.

# %%
hold.release()
journey.wait()
resumed = next(m for m in journey.decode.moments if m.status == "RUNNING")
assert journey.token_ids == alone.token_ids
assert resumed.tokens_of_others_before >= 8
print([status for _, status in journey.decode.status])

# %% [markdown]
# While it was parked the scheduler went on with its steps, with nothing for it in any of them, and gave tokens to the other request.
# That is all a waiting request costs: its blocks, and a scheduler that keeps asking whether the KV is there.

# %%
views.status_view(journey)

# %% [markdown]
# ### Many at once
#
# Six requests, sent together. On the timeline each waits for its own KV, and D decodes those that have it. Zoom with `+` and `−` or Ctrl and the wheel, drag to move; the button writes a file for Perfetto.

# %%
import time

began = time.monotonic()
together = [lab.submit(list(range(1000 + n, 1100 + 10 * n)), max_tokens=8, fresh=True) for n in range(6)]
for one in together:
    one.wait()
views.timeline_view(lab.trace(since=began))

# %% [markdown]
# ## Zeroing, and when it matters
#
# vLLM zeroes new blocks of some caches. For a load it must not: the write could come before the zeros. D asked to leave
# them out:

# %%
allocation = journey.step(8).facts
print("skip_zeroing_group_ids:", allocation["skip_zeroing_group_ids"])
print(
    "blocks to zero, in any step:",
    [e.facts["new_block_ids_to_zero"] for e in journey.of("scheduled") if e.facts["new_block_ids_to_zero"]],
)

# %% [markdown]
# It asked, and there was nothing to ask for: only caches of Mamba layers, or of mixed precision, are zeroed at all
# (`KVCacheConfig.needs_kv_cache_zeroing`). For a plain model the skip does nothing.
#
# ## reserved_blocks, and when it matters
#
# A parked request holds its blocks and cannot be preempted. If D also has *prefills of its own* in flight, two of them
# could each wait for blocks that the other holds. So a load is let in only if enough blocks stay free for what is under
# way: `reserved_blocks`. On a D that only decodes it is 0:

# %%
allocation["reserved_blocks"]

# %% [markdown]
# To see it matter, we bring up another pair: a D with 24 blocks that prefills in small chunks. It gets a prompt of 600
# tokens of its own, and then a load. (Some tens of seconds.)

# %%
import threading

few = "--num-gpu-blocks-override 24 --max-num-batched-tokens 128 --long-prefill-token-threshold 64"
small = pdlab.up(name="small", decode_args=few.split(), max_model_len=704)

# %%
local = threading.Thread(target=small.decode.complete, args=(list(range(3000, 3600)), 1))
with small.hold("before_decode_send") as hold:
    load = small.submit(list(range(1000, 1160)), max_tokens=2, fresh=True)
    hold.wait()
    local.start()
    while local.is_alive() and not small.decode.metric("vllm:num_requests_running"):
        time.sleep(0.01)  # until D has begun with its own prompt
load.wait()
local.join()

tries = [e.facts for e in load.of("blocks.allocated", "D scheduler") if e.facts["delay_cache_blocks"]]
assert tries[0]["reserved_blocks"] > 0 and not tries[0]["allocated"]
assert tries[-1]["allocated"]
events = [load.of("blocks.allocated", "D scheduler"), load.of("pull.encoded"), load.of("blocks.freed", "P scheduler")]
tried, pulled, freed = [of_one_kind[0].time for of_one_kind in events]
assert tried < pulled < freed
print("first try: reserved blocks > 0:", tries[0]["reserved_blocks"] > 0, "  allocated:", tries[0]["allocated"])
print("last try:  allocated:", tries[-1]["allocated"])

# %%
small.down()

# %% [markdown]
# While it is refused the load stays `WAITING`; the pull is sent only when it has its blocks, and P's blocks stay pinned until
# then.
#
# ## In an interview
#
# > *What is WAITING_FOR_REMOTE_KVS?* The status of a request on D whose blocks are allocated and whose KV is on its way. It is
# > not in `running` but in `kv_holding_waiting`, is scheduled 0 tokens, and others run past it. Its blocks have no hashes yet,
# > so nobody else can be given them. `num_computed_tokens` says N already.
# >
# > *What are reserved_blocks?* Blocks that prefills under way still need; a load must leave them. 0 on a pure decode instance.
#
# | step | where |
# |---|---|
# | 8 allocation | `Scheduler.schedule`, `KVCacheManager.allocate_slots` |
# | 9 parked | `Scheduler.schedule`: `RequestStatus.WAITING_FOR_REMOTE_KVS` |
# | zeroing | `KVCacheConfig.needs_kv_cache_zeroing` |
# | reserved blocks | `Scheduler._inflight_prefill_reserved_blocks` |

# %%
lab.reset()
