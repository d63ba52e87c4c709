"""The bytes behind a block, on both sides, read from engines that run."""

import random

import httpx
import pytest

from pdlab.errors import PdlabError
from pdlab.lab.comparison import Comparison
from pdlab.lab.lab import Lab
from pdlab.trace.journey import Journey

# Of no other test: D's free blocks keep old bytes, and those of the same prompt would be equal before the write.
PROMPT = random.Random("a prompt of its own").sample(range(1000, 20000), 143)
Found = tuple[Journey, Comparison, Comparison, dict[str, list[list[str]]]]


@pytest.fixture(scope="module")
def found(lab: Lab) -> Found:
    """One request, compared before the write and after it, with the digests of both sides."""
    for number in range(2):
        lab.prefill.complete(f"{number}: {'something else to read, ' * 20}", max_tokens=2)
    with lab.hold("before_answer") as last, lab.hold("before_write") as first:
        journey = lab.submit(PROMPT, 1, fresh=True)
        first.wait()
        before = lab.compare(journey)
        first.release()
        last.wait()
        after = lab.compare(journey)
        digests = {
            "P": lab.prefill.kv_digests(journey.prefill.block_ids),
            "D": lab.decode.kv_digests(journey.decode.block_ids),
        }
    return journey.wait(), before, after, digests


def test_every_byte_of_every_pulled_block_is_equal(found: Found) -> None:
    journey, _, after, _ = found
    assert after.equal
    assert len(after.pairs) == 30 * 5
    assert after.bytes == journey.bytes_moved == 7_372_800
    assert {pair.destination_block for pair in after.pairs} == set(journey.decode.block_ids)


def test_nothing_was_there_before_the_write(found: Found) -> None:
    _, before, _, _ = found
    assert len(before.unequal) == 30 * 5


def test_another_block_or_another_layer_is_not_equal(found: Found) -> None:
    *_, digests = found
    for layer in range(30):
        for block in range(5):
            for other in range(5):
                assert (digests["P"][layer][block] == digests["D"][layer][other]) == (block == other)
            assert digests["P"][layer][block] != digests["D"][(layer + 1) % 30][block]


def test_d_rewrites_at_most_the_last_slot(lab: Lab, found: Found) -> None:
    journey, _, after, _ = found
    rewritten = after.rewritten()
    assert len(rewritten) > 20  # of 30 layers: in some the bytes come out the same
    for change in rewritten:
        assert change.block == journey.decode.block_ids[-1]
        assert 0 < change.bytes <= 49152 // 32  # a token's part of a block
    last = {pair.destination_block for pair in after.pairs} - {journey.decode.block_ids[-1]}
    now = lab.decode.kv_digests(sorted(last))
    kept = dict(zip(journey.decode.block_ids, range(5), strict=True))
    *_, digests = found
    for layer in range(30):
        assert [digests["D"][layer][kept[block]] for block in sorted(last)] == now[layer]


def test_a_block_is_where_the_arithmetic_says(lab: Lab, found: Found) -> None:
    journey, *_ = found
    block = lab.decode.kv(3, journey.decode.block_ids[0])
    region = lab.decode.registered_kv["regions"][3]
    assert block.base_address == region["base_addr"]
    assert block.address == region["base_addr"] + block.block * region["block_len"]
    assert len(block.data) == region["block_len"] == 49152
    assert block.shape == (3, 32, 128)
    assert block.digest == lab.decode.kv_digests([block.block], [3])[0][0]


def test_reading_needs_the_token(lab: Lab) -> None:
    body = {"layer": 0, "block": 0}
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        assert httpx.post(f"{lab.decode.url}/pdlab/kv", json=body, headers=headers).status_code == 401


@pytest.mark.parametrize(("layer", "block"), [(30, 0), (-1, 0), (0, 364), (0, -1)])
def test_what_is_not_there_is_refused_and_the_engine_lives(lab: Lab, layer: int, block: int) -> None:
    with pytest.raises(PdlabError):
        lab.decode.kv(layer, block)
    assert lab.decode.complete("Still there?", 1).text


def test_comparing_too_late_is_refused(lab: Lab, found: Found) -> None:
    journey, *_ = found
    with pytest.raises(PdlabError, match="frees the blocks"):
        lab.compare(journey)
