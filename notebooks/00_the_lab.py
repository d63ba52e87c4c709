# Written by notebooks/paired.py from the notebook of the same name: edit that one.
# ruff: noqa

# %% [markdown]
# # 00 · The lab
#
# **The question of this chapter:** what has to run before a single prompt can be prefilled in one place and decoded in another?
#
# You bring up three servers: a *prefill instance* (P), a *decode instance* (D) and a *proxy*. P and D are vLLM's stock OpenAI API servers with its stock `MooncakeConnector`; nothing here is a simulation. On a machine with GPUs they use them; on any other they run on the CPU, with the same connector and real KV bytes over TCP.
#
# Each chapter goes the same way: a question, a prediction of yours, a run, a look at what happened, something broken on purpose, and what you would say in an interview. Run the cells from top to bottom. A cell that states something checks it with `assert`, against the engines that are running.

# %% [markdown]
# ## Bring it up
#
# Some tens of seconds on a laptop's CPU the first time: most of it is Python importing vLLM, in four processes. If a lab is already up, this attaches to it. The lab belongs to no notebook: interrupt or restart the kernel, and it is still there.

# %%
import pdlab

lab = pdlab.up(run="00_the_lab")

# %%
lab

# %% [markdown]
# *Up* means more than an open port: each engine has answered a completion, P's bootstrap server names P's own engine id, and P and D were compared (weights, layers, dtype, block size, tokenizer and so on). Stock vLLM compares no more than the layout, at the first pull; chapter 06 shows what comes of that.

# %% [markdown]
# ## Look at what runs
#
# **Predict:** how many operating-system processes is this lab? Three servers, so three?

# %% tags=["nbval-ignore-output"]
lab.processes()

# %% [markdown]
# Each server has a *nanny* above it, a small process that ends everything beneath it when it is time, however it became time. An engine is at least two processes: the **API server** (HTTP, tokenizer) and **EngineCore** (scheduler; here also the worker with the model, since one process can do both for one device). Python's resource tracker comes with `multiprocessing`. EngineCore listens at many ports: torch's process groups, and, on the prefill side, the bootstrap server and the socket at which D will ask for KV.
#
# On a CPU, P and D get one core each, so that neither computes at the other's expense.

# %%
from collections import Counter

parts = Counter((row.server, row.what) for row in lab.processes())
for engine in ("prefill", "decode"):
    assert parts[engine, "nanny"] == parts[engine, "API server"] == parts[engine, "EngineCore"] == 1
assert parts["proxy", "nanny"] == parts["proxy", "proxy"] == 1
sorted({what for _, what in parts} - {"worker"})

# %% [markdown]
# The command line is what you would type in production, apart from what keeps it small and quick to start (little KV space, eager mode). Where there is no accelerator it needs one thing more, pdlab's plugin: `MooncakeConnectorWorker` asks torch for the current accelerator, and without one torch raises. On a CPU the dtype is `float32`: the last prompt token is computed on D in another batch shape than a single engine would use, and in `bfloat16` that alone can flip a tie between two tokens. In `float32` the answers can be compared token for token.

# %% tags=["nbval-ignore-output"]
print(lab.prefill.command)

# %%
for instance in (lab.prefill, lab.decode):
    print(f"{instance.role:<8} kv_role={instance.facts['kv_role']:<12} connector={instance.facts['kv_connector']}")

# %% [markdown]
# ### The KV memory
#
# At start each worker allocates its KV cache and registers it with Mooncake's Transfer Engine, one *region* per layer, so that another process may write into it. A *block* is room for the keys and values of `block_size` tokens. A block id stands for the same place in the region of every layer.

# %% tags=["nbval-ignore-output"]
layout = lab.decode.registered_kv
print(f"{len(layout['regions'])} regions, {layout['num_blocks']} blocks of {layout['block_size']} tokens each")
for region in layout["regions"][:3]:
    print(f"{region['layer']:<36} base address 0x{region['base_addr']:x}   block_len {region['block_len']:,} bytes")
print("...")

# %%
regions = lab.decode.registered_kv["regions"]
assert len(regions) == lab.decode.facts["layers"]
assert len({region["base_addr"] for region in regions}) == len(regions)
assert [r["block_len"] for r in regions] == [r["block_len"] for r in lab.prefill.registered_kv["regions"]]
"one region per layer, all at different addresses, blocks of equal length on both sides"

# %% [markdown]
# ### Who can find whom
#
# P has a *bootstrap server*. D asks it once for P's address, when the first request has named P's engine id and this server. In advance D knows nothing of P, and D itself is registered nowhere.

# %%
lab.prefill.bootstrap_query()

# %%
assert lab.prefill.bootstrap_query()["0"]["engine_id"] == lab.prefill.engine_id
assert lab.prefill.engine_id != lab.decode.engine_id

# %% [markdown]
# ## Send a prompt
#
# **Predict:** the prompt below has N tokens. How many of them will P compute, how many D?

# %%
numbers = ", ".join(str(n) for n in range(1, 20))
prompt = f"Count with me, one number after the other: {numbers},"


def counted_as_transferred():
    return lab.decode.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")


before = counted_as_transferred()
journey = lab.send(prompt, max_tokens=12, fresh=True)  # fresh: no prefix cache knows it
journey

# %% [markdown]
# And the same prompt to one engine alone: to D, whose prefix cache is kept out of it likewise (by a `cache_salt` of its own). This answer owes nothing to P.

# %%
alone = lab.decode.complete(prompt, max_tokens=12)
assert alone.token_ids == journey.token_ids
alone.token_ids == journey.token_ids

# %% [markdown]
# Now the prediction. What came back is the request's *journey*: everything that happened to it in the proxy and in both engines, seen by probes at the places of vLLM where it happened. So these numbers are the schedulers' own.

# %%
N = journey.prompt_tokens
on_p, on_d = journey.prefill.prompt_tokens_computed, journey.decode.prompt_tokens_computed
assert (on_p, on_d) == (N, 1)
print(f"prompt {N} tokens: P computed {on_p}, D computed {on_d}")

# %% [markdown]
# P computed the whole prompt, and D one token of it again: the last. D needs the *logits* after the last prompt token to choose the first answer token, and logits are not part of the KV that was sent.
#
# Beware: D's own metric for this does not show it. It counts all N prompt tokens as transferred.

# %%
assert counted_as_transferred() - before == N

# %% [markdown]
# And what was moved?

# %% tags=["nbval-ignore-output"]
moved = journey.summary()["transfer"]
moved

# %%
assert moved["bytes"] == moved["regions"] * moved["blocks"] * moved["block_bytes"]
assert moved["blocks"] == -(-N // lab.decode.registered_kv["block_size"])  # rounded up
assert moved["regions"] == len(regions)
"whole blocks, the same number in every region"

# %% [markdown]
# And the whole way, as a map: 23 steps by five actors. P's (3 to 6) and D's (7 to 12) run side by side; at 13 they meet. The first is in pdlab's proxy, each other one a place in vLLM's source. The chapters go through them one by one. (A block is *hashed* when it is in the prefix cache; a *descriptor* is one piece of a transfer: from where, to where, how many bytes.)

# %%
assert not journey.missing
print(journey.outline())

# %% [markdown]
# ## Break it
#
# What if you ask for two answers to one prompt? In one engine that is one prefill and two decodes. Here a `transfer_id` names the KV of one prompt, pulled once: a second sequence would find nothing to pull. (What stock vLLM makes of that, without a proxy that looks, is a case of chapter 06.) The proxy refuses it, before P has done any work.

# %%
computed_by_p = lab.prefill.metric("vllm:prompt_tokens_total")

# %% tags=["raises-exception"]
lab.send(prompt, n=2)

# %%
assert lab.prefill.metric("vllm:prompt_tokens_total") == computed_by_p
lab.send(prompt, max_tokens=12).token_ids == journey.token_ids  # nothing is broken

# %% [markdown]
# ## The bench
#
# All views of your request, on one cursor: the sequence of its steps, the source of each with the values that a probe saw there, the block tables of both sides, status and tokens, the memory. Click a step, a block or a layer, or use the arrow keys. The chapters take what they need from it.

# %%
from pdlab import views

bench = views.bench(journey)
bench

# %% [markdown]
# ## In an interview
#
# > *What runs in a disaggregated vLLM deployment with the MooncakeConnector?* Two kinds of engine instances and a proxy. The prefill instance is a `kv_producer`, the decode instance a `kv_consumer`; each is a full engine with its own scheduler, KV cache and block pool. At start each worker registers its KV memory with the Transfer Engine, and the prefill worker registers its address at a bootstrap server, where decode workers look it up. The proxy sends every request to both at once. The prefill instance computes the whole prompt, writes the blocks straight into the decode instance's memory, and the decode instance computes just the last prompt token again, to get the logits.
#
# **Where to read it** in the installed vLLM:
#
# | what | symbol |
# |---|---|
# | the roles | `vllm.config.KVTransferConfig` |
# | memory registration | `MooncakeConnectorWorker.register_kv_caches` |
# | the bootstrap server | `MooncakeBootstrapServer` (`register_worker`, `query`) |
# | the account of the steps used above | `Scheduler.schedule` |
# | the transfer used above | `MooncakeConnectorWorker._build_transfer_params`, `_send_blocks` |
# | the proxy | `pdlab/lab/proxy.py`, read in chapter 01 |
#
# ## The chapters
#
# | chapter | its question |
# |---|---|
# | **00 the lab** | what has to run? (you are here) |
# | 01 double send | what exactly does the proxy send, to whom, and what does it wait for? |
# | 02 transfer id | how do P and D know that they speak of the same request? |
# | 03 waiting for remote KVs | what is a request that waits for its KV, to the scheduler? |
# | 04 RDMA write | who writes which bytes to which address? |
# | 05 last token | why is one token computed twice, and what enters the prefix cache when? |
# | 06 when it breaks | when a part fails, who notices, and what does the client get? |
# | 07 what it costs | when is it worth it? |
# | 08 other designs | what do other connectors and engines do differently? |
# | 09 interview | thirty questions, answered from live state |
#
# Chapters 07 to 09 are not written yet. The lab stays up for the next one; `lab.down()` or `python3 -m pdlab down` ends it.

# %%
assert lab.status()["up"]
