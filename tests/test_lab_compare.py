"""What a prefill and a decode instance must agree on."""

from typing import Any

import pytest

from pdlab.errors import MismatchError
from pdlab.lab.compare import MUST_AGREE, check_pair, mismatches

FACTS: dict[str, Any] = {
    "vllm_version": "0.32.0", "model": "/path/to/model", "revision": None, "weights_digest": "a1", "layers": 30,
    "tokenizer_digest": "b2", "dtype": "float32", "kv_cache_dtype": "auto", "block_size": 32, "max_model_len": 4096,
    "tensor_parallel_size": 1, "kv_connector": "MooncakeConnector",
}  # fmt: skip
P, D = {**FACTS, "kv_role": "kv_producer"}, {**FACTS, "kv_role": "kv_consumer"}


def test_a_pair() -> None:
    assert mismatches(P, D) == []
    check_pair(P, D)


def test_instances_that_do_both_are_a_pair() -> None:
    both = {**FACTS, "kv_role": "kv_both"}
    assert mismatches(both, both) == mismatches(P, both) == mismatches(both, D) == []


def test_another_folder_or_tensor_parallel_size_is_no_mismatch() -> None:
    assert mismatches(P, {**D, "model": "/elsewhere", "tensor_parallel_size": 2}) == []


@pytest.mark.parametrize(
    ("fact", "value", "sentence"),
    [
        ("vllm_version", "0.33.0", "vLLM's version differs: prefill 0.32.0, decode 0.33.0: the messages"),
        ("weights_digest", "c3", "the weights differ: prefill a1, decode c3: decode would go on from another model's"),
        ("revision", "main", "the model's revision differs: prefill None, decode main: decode would go on"),
        ("layers", 32, "the number of layers differs: prefill 30, decode 32: layers without KV would be read"),
        ("dtype", "bfloat16", "the dtype differs: prefill float32, decode bfloat16: every load would fail"),
        ("kv_cache_dtype", "fp8", "the KV cache's dtype differs: prefill auto, decode fp8: every load would fail"),
        ("block_size", 64, "the block size (tokens) differs: prefill 32, decode 64: every load would fail"),
        ("tokenizer_digest", "d4", "the tokenizer differs: prefill b2, decode d4: the same prompt would be other"),
        ("max_model_len", 2048, "max_model_len (tokens) differs: prefill 4096, decode 2048: one would refuse"),
        ("kv_connector", "NixlConnector", "the connector differs: prefill MooncakeConnector, decode NixlConnector: "),
    ],
)
def test_each_difference_has_its_sentence(fact: str, value: object, sentence: str) -> None:
    (found,) = mismatches(P, {**D, fact: value})
    assert found.startswith(sentence)


def test_every_fact_has_a_case_above() -> None:
    (cases,) = (mark.args[1] for mark in test_each_difference_has_its_sentence.pytestmark)
    assert [case[0] for case in cases] == [fact for fact, _, _ in MUST_AGREE]


FAILS, WRONG, UNSURE = "every load would fail", "200, and wrong text", "a load may fail, or the text be wrong"


@pytest.mark.parametrize(
    ("prefill", "decode", "consequence"),
    [
        ({"layers": 30}, {"layers": 31}, WRONG),
        ({"layers": 31}, {"layers": 30}, FAILS),  # P misses one of its own on D
        ({"dtype": "float32"}, {"dtype": "bfloat16"}, FAILS),
        ({"dtype": "float16"}, {"dtype": "bfloat16"}, WRONG),
        ({"dtype": "bfloat16"}, {"dtype": "float16"}, WRONG),
        ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "auto"}, FAILS),
        ({"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8_e5m2"}, WRONG),
        ({"kv_cache_dtype": "fp8", "dtype": "float16"}, {"kv_cache_dtype": "fp8", "dtype": "bfloat16"}, UNSURE),
        ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8_per_token_head"}, UNSURE),
        ({"kv_cache_dtype": "nvfp4", "block_size": 32}, {"kv_cache_dtype": "nvfp4", "block_size": 64}, FAILS),
        ({"block_size": 64}, {"block_size": 32}, FAILS),
        ({"dtype": "float32", "block_size": 32}, {"dtype": "bfloat16", "block_size": 64}, WRONG),  # as many bytes
    ],
)
def test_what_comes_of_it_is_what_p_compares(prefill: dict[str, Any], decode: dict[str, Any], consequence: str) -> None:
    found = mismatches({**P, **prefill}, {**D, **decode})
    assert found and all(sentence.endswith(consequence) for sentence in found)


def test_the_sentences_that_are_kept_of_the_faults() -> None:
    assert mismatches(P, {**D, "dtype": "bfloat16"}) == [
        "the dtype differs: prefill float32, decode bfloat16: every load would fail"
    ]
    assert mismatches(P, {**D, "block_size": 64}) == [
        "the block size (tokens) differs: prefill 32, decode 64: every load would fail"
    ]
    assert mismatches(P, {**D, "weights_digest": "c3", "layers": 31}) == [
        "the weights differ: prefill a1, decode c3: decode would go on from another model's KV: 200, and wrong text",
        "the number of layers differs: prefill 30, decode 31: layers without KV would be read: 200, and wrong text",
    ]


@pytest.mark.parametrize(("prefill", "decode", "count"), [(D, P, 2), (P, P, 1), (D, D, 1)])
def test_roles(prefill: dict[str, Any], decode: dict[str, Any], count: int) -> None:
    found = mismatches(prefill, decode)
    assert len(found) == count
    assert all("the first request would kill it" in sentence for sentence in found)


def test_swapped_roles_in_words() -> None:
    assert mismatches(D, P) == [
        "the prefill instance has kv_role 'kv_consumer', not 'kv_producer': the first request would kill it",
        "the decode instance has kv_role 'kv_producer', not 'kv_consumer': the first request would kill it",
    ]


def test_an_instance_without_a_connector() -> None:
    found = mismatches(P, {**D, "kv_role": None, "kv_connector": None})
    assert found[0] == "the decode instance has kv_role None, not 'kv_consumer': the first request would kill it"
    assert len(found) == 2


def test_without_weights_to_compare_names_are() -> None:
    p, d = {**P, "weights_digest": None}, {**D, "weights_digest": None}
    assert mismatches(p, d) == []
    assert mismatches(p, {**d, "model": "other"}) == ["the models differ: prefill /path/to/model, decode other"]


def test_check_pair_says_all_of_it_and_what_to_do() -> None:
    with pytest.raises(MismatchError) as raised:
        check_pair(P, {**D, "layers": 32, "dtype": "bfloat16"})
    assert raised.value.message.startswith("prefill and decode do not match: the number of layers differs")
    assert "; the dtype differ" in raised.value.message
    assert raised.value.hint == "start both with the same settings"


def test_a_digest_that_one_side_lacks_is_no_difference() -> None:
    assert mismatches(P, {**D, "weights_digest": None, "tokenizer_digest": None}) == []
    assert "the models differ" in mismatches(P, {**D, "weights_digest": None, "model": "another"})[0]
