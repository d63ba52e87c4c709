"""What a prefill and a decode instance must agree on before the first request.

Stock vLLM does not check: with other weights, or more layers, on one side it answers 200 with wrong text; with roles
swapped an engine dies.
"""

from typing import Any

from pdlab.errors import MismatchError
from pdlab.lab.settings import KV_ROLES

# Fact of pdlab.inside.identity, in words, and what comes of a difference.
MUST_AGREE = (
    ("vllm_version", "vLLM's version differs", "the messages between them may differ"),
    ("weights_digest", "the weights differ", "decode would go on from another model's KV: 200, and wrong text"),
    ("revision", "the model's revision differs", "decode would go on from another model's KV: 200, and wrong text"),
    ("layers", "the number of layers differs", "layers without KV would be read: 200, and wrong text"),
    ("dtype", "the dtype differs", "every load would fail"),
    ("kv_cache_dtype", "the KV cache's dtype differs", "every load would fail"),
    ("block_size", "the block size (tokens) differs", "every load would fail"),
    ("tokenizer_digest", "the tokenizer differs", "the same prompt would be other token ids"),
    ("max_model_len", "max_model_len (tokens) differs", "one would refuse what the other takes"),
    ("kv_connector", "the connector differs", "they would not speak the same protocol"),
)


def mismatches(prefill: dict[str, Any], decode: dict[str, Any]) -> list[str]:
    """What keeps the two apart, a sentence each; empty: they are a pair. Arguments: facts of the two instances."""
    found = []
    for role, facts in (("prefill", prefill), ("decode", decode)):
        if facts["kv_role"] not in (KV_ROLES[role], "kv_both"):
            has = f"the {role} instance has kv_role {facts['kv_role']!r}, not {KV_ROLES[role]!r}"
            found.append(f"{has}: the first request would kill it")
    for fact, words, consequence in MUST_AGREE:
        unknown = fact.endswith("_digest") and None in (prefill[fact], decode[fact])
        if prefill[fact] != decode[fact] and not unknown:
            found.append(f"{words}: prefill {prefill[fact]}, decode {decode[fact]}: {consequence}")
    # Without files to digest, names are what is left to compare.
    if None in (prefill["weights_digest"], decode["weights_digest"]) and prefill["model"] != decode["model"]:
        found.append(f"the models differ: prefill {prefill['model']}, decode {decode['model']}")
    return found


def check_pair(prefill: dict[str, Any], decode: dict[str, Any]) -> None:
    """Raises:
    MismatchError: the two must not be paired; says each difference and what would come of it.
    """
    found = mismatches(prefill, decode)
    if found:
        raise MismatchError(f"prefill and decode do not match: {'; '.join(found)}", "start both with the same settings")
