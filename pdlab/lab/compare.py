"""What a prefill and a decode instance must agree on before the first request.

Stock vLLM checks little of it: at each pull P compares the names and indices of layers, their groups, and how long a
block is; never what the bytes mean. So with other weights, another dtype of the same width, or more layers on D it
answers 200 with wrong text; with more layers on P, or blocks of other lengths, every load fails; with roles swapped an
engine dies.
"""

from collections.abc import Callable
from typing import Any

from pdlab.errors import MismatchError
from pdlab.lab.settings import KV_ROLES

Facts = dict[str, Any]  # as pdlab.inside.identity has them, of one instance

FAILS = "every load would fail"
UNSURE = "a load may fail, or the text be wrong"
# Bytes of a number in the KV cache; a cache_dtype that is not here keeps more than numbers in its blocks.
WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_inc": 1}


def _of_layers(prefill: Facts, decode: Facts) -> str:
    """P looks for each of its layers on D, and not the other way round."""
    return FAILS if prefill["layers"] > decode["layers"] else "layers without KV would be read: 200, and wrong text"


def _of_layout(prefill: Facts, decode: Facts) -> str:
    """P compares how many bytes a block has; two bytes of float16 are as many as two of bfloat16."""
    (p, p_tokens), (d, d_tokens) = ((_kv_dtype(facts), facts["block_size"]) for facts in (prefill, decode))
    if p == d:
        return FAILS if p_tokens != d_tokens else UNSURE
    if p not in WIDTHS or d not in WIDTHS:
        return UNSURE
    same = WIDTHS[p] * p_tokens == WIDTHS[d] * d_tokens
    return "KV of another dtype would be read: 200, and wrong text" if same else FAILS


def _kv_dtype(facts: Facts) -> str:
    return str(facts["dtype"] if facts["kv_cache_dtype"] == "auto" else facts["kv_cache_dtype"])


# Fact, in words, and what comes of a difference.
MUST_AGREE: tuple[tuple[str, str, str | Callable[[Facts, Facts], str]], ...] = (
    ("vllm_version", "vLLM's version differs", "the messages between them may differ"),
    ("weights_digest", "the weights differ", "decode would go on from another model's KV: 200, and wrong text"),
    ("revision", "the model's revision differs", "decode would go on from another model's KV: 200, and wrong text"),
    ("layers", "the number of layers differs", _of_layers),
    ("dtype", "the dtype differs", _of_layout),
    ("kv_cache_dtype", "the KV cache's dtype differs", _of_layout),
    ("block_size", "the block size (tokens) differs", _of_layout),
    ("tokenizer_digest", "the tokenizer differs", "the same prompt would be other token ids"),
    ("max_model_len", "max_model_len (tokens) differs", "one would refuse what the other takes"),
    ("kv_connector", "the connector differs", "they would not speak the same protocol"),
)


def mismatches(prefill: Facts, decode: Facts) -> list[str]:
    """What keeps the two apart, a sentence each; empty: they are a pair. Arguments: facts of the two instances."""
    found = []
    for role, facts in (("prefill", prefill), ("decode", decode)):
        if facts["kv_role"] not in (KV_ROLES[role], "kv_both"):
            has = f"the {role} instance has kv_role {facts['kv_role']!r}, not {KV_ROLES[role]!r}"
            found.append(f"{has}: the first request would kill it")
    for fact, words, consequence in MUST_AGREE:
        unknown = fact.endswith("_digest") and None in (prefill[fact], decode[fact])
        if prefill[fact] != decode[fact] and not unknown:
            comes = consequence if isinstance(consequence, str) else consequence(prefill, decode)
            found.append(f"{words}: prefill {prefill[fact]}, decode {decode[fact]}: {comes}")
    # Without files to digest, names are what is left to compare.
    if None in (prefill["weights_digest"], decode["weights_digest"]) and prefill["model"] != decode["model"]:
        found.append(f"the models differ: prefill {prefill['model']}, decode {decode['model']}")
    return found


def check_pair(prefill: Facts, decode: Facts) -> None:
    """Raises:
    MismatchError: the two must not be paired; says each difference and what would come of it.
    """
    found = mismatches(prefill, decode)
    if found:
        raise MismatchError(f"prefill and decode do not match: {'; '.join(found)}", "start both with the same settings")
