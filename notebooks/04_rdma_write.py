# Written by notebooks/paired.py from the notebook of the same name: edit that one.
# ruff: noqa

# %% [markdown]
# # 04 · RDMA write
#
# **The question of this chapter:** who writes which bytes to which address?

# %%
import pdlab
from pdlab import views

lab = pdlab.up(run="04_rdma_write")
prompt = list(range(4000, 4143))  # asked for nowhere else: old bytes of it in a free block would look like new ones
for number in range(3):  # so that P and D hand out different blocks
    lab.prefill.complete(f"{number}: {'something else to read, ' * 20}", max_tokens=2)

# %% [markdown]
# ## Predict

# %%
views.predict(
    "Who moves the KV?",
    [
        "D reads it from P's memory",
        "P writes it into D's memory",
        "the proxy copies it",
        "P sends it, and D's worker copies it into its blocks",
    ],
    answer="P writes it into D's memory",
    because="D only says where. It learns that something has come from P's answer; no code of vLLM on D touches the bytes on their way.",
)

# %% [markdown]
# ## Regions
#
# At start each worker registers its KV memory: one *region* a layer. Block `b` of a layer is at `base + b × block_len`.

# %%
regions = {side: instance.registered_kv["regions"] for side, instance in (("P", lab.prefill), ("D", lab.decode))}
assert len(regions["P"]) == len(regions["D"]) == lab.decode.facts["layers"]
block_len = regions["D"][0]["block_len"]
assert {region["block_len"] for side in regions.values() for region in side} == {block_len}
print(f"{len(regions['D'])} regions on each side, {block_len:,} bytes a block")

# %% [markdown]
# Why so many bytes? A block of this model holds 32 tokens of 3 KV heads, each with 64 numbers of K and 64 of V, as float32:

# %%
assert block_len == 32 * 3 * (64 + 64) * 4
32 * 3 * (64 + 64) * 4

# %% [markdown]
# ## Run
#
# One request, held when all is written and D does not know it yet: this is the moment at which both sides can be compared.
# The same request is held once before the write, too.

# %%
with lab.hold("before_answer") as last, lab.hold("before_write") as first:
    journey = lab.submit(prompt, max_tokens=1, fresh=True)
    first.wait()
    before = lab.compare(journey)
    first.release()
    last.wait()
    after = lab.compare(journey)
    block = lab.decode.kv(layer=3, block=journey.decode.block_ids[0])
journey.wait()

# %%
before

# %%
after

# %%
assert not before.equal and after.equal
assert len(after.pairs) == 30 * 5 and after.bytes == journey.bytes_moved
f"{after.bytes:,} bytes, 5 blocks in each of 30 layers: all other before the write, all equal after it"

# %% [markdown]
# ## Look
#
# The block tables, and which of P's blocks went into which of D's:

# %%
views.bench(journey, compared=after)

# %%
assert journey.prefill.block_ids != journey.decode.block_ids
views.memory_view(journey)

# %% [markdown]
# ### The arithmetic by hand, then in the call
#
# D sent its base addresses with the pull; P knows its own. So for any layer and block P can work out both addresses:

# %%
layer, i = 7, 0  # which layer, and which of the request's blocks
source = regions["P"][layer]["base_addr"] + journey.prefill.block_ids[i] * block_len
destination = regions["D"][layer]["base_addr"] + journey.decode.block_ids[i] * block_len

write = next(write for write in journey.writes if write.layer == layer)
assert (source, destination) == (write.source_address, write.destination_address)
"both addresses are those that P gave to batch_transfer_sync_write"

# %%
from itertools import pairwise

assert all(write.as_computed for write in journey.writes)
assert block.address == block.base_address + block.block * block_len
steps = zip(pairwise(journey.prefill.block_ids), pairwise(journey.decode.block_ids), strict=True)
runs = 1 + sum(p[1] != p[0] + 1 or d[1] != d[0] + 1 for p, d in steps)
assert len(journey.writes) == 30 * runs
"a descriptor for each run of blocks that follow each other on both sides, in each layer"

# %% [markdown]
# Blocks that follow each other on *both* sides go in one descriptor. Where all five do, 30 layers are 30 descriptors, not
# 150. `journey.writes[0].arithmetic` spells one out.
#
# And what is *in* a block? Bytes. CPU attention packs keys and values in an order of its own, for its instructions, so we
# show them as they are and do not pretend to know which number is whose:

# %%
print(block.layout)

# %% [markdown]
# ### Break it: a fragmented D
#
# Five short requests on D that end one after the other leave its free list in pieces. **Predict:** more bytes, or more
# descriptors?

# %%
import threading

short = [
    threading.Thread(target=lab.decode.complete, args=([6000 + n] * 8, 12 + 2 * n), kwargs={"ignore_eos": True})
    for n in range(5)
]
for thread in short:
    thread.start()
for thread in short:
    thread.join()

pieces = lab.send(prompt, max_tokens=1, fresh=True)
assert len(pieces.writes) > 30
assert pieces.bytes_moved == journey.bytes_moved
print("bytes: as before.  descriptors: more than one a layer:", len(pieces.writes) > 30)

# %% [markdown]
# ### A prefix that D has already
#
# The same prompt twice, without a salt: the second time D has all but the end of it in its prefix cache. A hit is capped at
# N−1 tokens, and whole blocks: so at least the last block always travels.

# %%
lab.reset()
lab.send(prompt, max_tokens=1)
again = lab.send(prompt, max_tokens=1)
assert again.step(7).facts["num_computed_tokens"] == 128
assert len(again.writes[0].source_blocks) == 1
assert again.writes[0].source_block == again.prefill.block_ids[-1]  # of P's five the last
f"{again.step(7).facts['num_computed_tokens']} of {again.prompt_tokens} tokens were there: {len(again.writes[0].source_blocks)} block moved"

# %% [markdown]
# ## Who runs the copy, and what P does meanwhile

# %%
assert journey.step(15).thread.startswith("vllm-mooncake-sender")
with lab.hold("before_answer") as hold:  # the pool's thread stands still, as if the write were slow
    slow = lab.submit(prompt, max_tokens=1, fresh=True)
    hold.wait()
    meanwhile = lab.prefill.complete("Another request, for P alone", max_tokens=3)
slow.wait()
assert len(meanwhile.token_ids) == 3
print(
    "written by a thread of the pool", slow.step(15).thread.rsplit("_", 1)[0], "· meanwhile P answered another request"
)

# %% [markdown]
# The call runs in one of ten threads of a pool, so P's next forward pass does not wait for it. (Not quite nothing: each
# scheduler step of P still waits for a small coroutine of the sender loop.)
#
# ## What is RDMA about it?

# %%
assert lab.settings.protocol in ("tcp", "rdma")
print("mooncake_protocol here:", lab.settings.protocol)

# %% [markdown]
# On this machine the Transfer Engine carries out the write over TCP: a thread on D's side copies from a socket to the address.
# With `mooncake_protocol: rdma` the same call makes the network card write, past D's CPU; between GPUs, past its memory too.
# What you saw stays: regions, addresses, descriptors, who asks and who writes. What changes: registration pins memory for
# the card.
#
# ## In an interview
#
# > *Does D pull or does P push?* With the MooncakeConnector D sends a pull *message*, and the bytes are pushed: P writes them
# > straight into D's blocks. (The NixlConnector has both: by default D reads; there is a push variant.)
# >
# > *How does P know where?* D sends its base addresses and block ids; `base + block × block_len`, for each layer.
# >
# > *How many bytes?* layers × pulled blocks × block_len, whole blocks: 17 of the last one's 32 slots are garbage here.
#
# | step | where |
# |---|---|
# | 14 the plan | `MooncakeConnectorWorker._build_transfer_params`, `group_concurrent_contiguous` |
# | 15 the write | `MooncakeConnectorWorker._send_blocks` |
# | registration | `MooncakeConnectorWorker.register_kv_caches` |

# %%
lab.reset()
