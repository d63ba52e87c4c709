# Written by notebooks/paired.py from the notebook of the same name: edit that one.
# ruff: noqa

# %% [markdown]
# # 05 · The last token
#
# **The question of this chapter:** all of the prompt's KV has come. Why does D compute one token of it again, and what may
# other requests have of these blocks from now on?

# %%
import pdlab
from pdlab import views

lab = pdlab.up(run="05_last_token")
prompt = list(range(1000, 1143))

# %% [markdown]
# ## Predict

# %%
views.predict(
    "The KV of all 143 prompt tokens is in D's memory. How many tokens does D's first step compute?",
    ["0: it samples at once", "1: the last prompt token", "1: the first answer token", "143: to be sure"],
    answer="1: the last prompt token",
    because="To sample, D needs the logits after the last prompt token. KV has no logits: only a forward pass has.",
)

# %% [markdown]
# ## Run
#
# Held when all is written, so that we can compare before D goes on.

# %%
with lab.hold("before_answer") as hold:
    journey = lab.submit(prompt, max_tokens=1, fresh=True)
    hold.wait()
    arrived = lab.compare(journey)
journey.wait()
assert arrived.equal
arrived

# %% [markdown]
# ## Look: 143, 142, 143
#
# `num_computed_tokens` of the request, on both sides:

# %%
counts = {side: [count for _, count in over_time] for side, over_time in journey.computed_tokens.items()}
assert counts["P"] == [0, 143]
assert counts["D"][:4] == [0, 143, 142, 143]
counts

# %%
views.status_view(journey)

# %% [markdown]
# 143 when it was parked. 142 when it was promoted: the scheduler takes one back. 143 when it was scheduled, with one token to
# compute. That one is the *last prompt token*.

# %%
promoted, resumed = journey.step(20).facts, journey.step(21).facts
assert (promoted["num_computed_tokens_before"], promoted["num_computed_tokens_after"]) == (143, 142)
assert resumed["num_scheduled_tokens"] == 1
assert journey.prefill.prompt_tokens_computed == 143 and journey.decode.prompt_tokens_computed == 1
"P computed 143 prompt tokens, D computed 1 of them again"

# %% [markdown]
# ### It writes what it computes
#
# That token's keys and values go into its slot, over those that P wrote. The same numbers? Nearly: D computes them in another
# batch shape.

# %%
changed = arrived.rewritten()
assert changed and all(change.block == journey.decode.block_ids[-1] for change in changed)
assert all(0 < change.bytes <= arrived.block_len // 32 for change in changed)  # at most one token's part of a block
print(f"only in the last block, and at most {arrived.block_len // 32:,} bytes of it: one token of 32")
print("in most layers:", len(changed) > 15)

# %% [markdown]
# This is why pdlab compares texts in float32: in bfloat16 a difference of this size can flip a tie between two tokens.
#
# ## What enters the prefix cache, and when
#
# **Predict:** of D's five blocks, how many can another request be given after this one? And when: when the bytes come, or
# later?

# %%
for when, rows in (("when the KV was there", "blocks_before"), ("after promotion", "blocks")):
    print(f"{when:<24} {''.join('█' if hashed else '·' for _id, _references, hashed in promoted[rows])}")

# %%
assert [row[2] for row in promoted["blocks_before"]] == [0] * 5
assert [row[2] for row in promoted["blocks"]] == [1, 1, 1, 1, 0]
assert journey.step(19).time < journey.step(20).time
"four full blocks get their hashes, one scheduler step after it heard of them; the partial one not before it is full"

# %% [markdown]
# A prompt of 128 tokens fills its four blocks exactly. Is the last one cached, although its last token is taken back?

# %%
exact = lab.send(list(range(1000, 1128)), max_tokens=1, fresh=True)
after = exact.step(20).facts
assert after["num_computed_tokens_after"] == 127
assert [row[2] for row in after["blocks"]] == [1, 1, 1, 1]
"yes: hashes are given first, with 128; then one is taken back"

# %% [markdown]
# ## Whose first token?

# %%
(of_p,), (of_d,) = journey.of("token.first", "P scheduler"), journey.of("token.first", "D scheduler")
assert of_p.time < of_d.time
assert len(journey.token_ids) == 1
alone = lab.decode.complete(prompt, max_tokens=1)
assert journey.token_ids == alone.token_ids
"P had a first token long before D; the client got D's"

# %% [markdown]
# ## What P keeps, and how long
#
# P's request was finished before a byte was written. Its blocks stayed:

# %%
finished = journey.of("request.finished", "P scheduler")[0]
written = journey.of("transfer.written")[0]
freed = journey.of("blocks.freed", "P scheduler")[0]
assert finished.facts["delay_free_blocks"]
assert finished.time < written.time < freed.time
assert freed.facts["free_after"] - freed.facts["free_before"] == 5
print("P finished → P wrote → P freed", freed.facts["free_after"] - freed.facts["free_before"], "blocks")

# %% [markdown]
# Had D never asked, they would have stayed for `VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT`: 480 s upstream, 15 here.
#
# ## Break it: a prompt of one token

# %%
one = lab.send([1000], max_tokens=2, fresh=True)
facts = one.step(20).facts
assert (facts["num_computed_tokens_before"], facts["num_computed_tokens_after"]) == (1, 0)
assert one.prefill.prompt_tokens_computed == one.decode.prompt_tokens_computed == 1
f"a whole block of every layer moved, {one.bytes_moved:,} bytes, for a token that D then computed itself"

# %% [markdown]
# ## In an interview
#
# > *Why N−1?* Sampling needs the logits of the last prompt token. They are not in the KV, so D runs one token through the
# > model: `num_computed_tokens` is set to N−1, the scheduler gives out one token, and its KV slot is written again.
# >
# > *What enters D's prefix cache?* Full blocks only: the pulled ones at promotion, later ones as decoding fills them. Hashes are
# > metadata, nothing is copied. Until promotion no block has one, so that nobody is given a block whose bytes are on their way.
# >
# > *When are P's blocks freed?* When its worker reports them sent, not when its request ends; or when D has not come for them
# > within `VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT`.
#
# | step | where |
# |---|---|
# | 20 promotion | `Scheduler._update_waiting_for_remote_kv`, `KVCacheManager.cache_blocks` |
# | 21 resume | `Scheduler.schedule` |
# | 17 P frees | `Scheduler._update_from_kv_xfer_finished` |

# %%
lab.reset()
