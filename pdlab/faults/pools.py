"""Faults of pools: blocks that lie apart, or that are too few."""

import time
from concurrent.futures import ThreadPoolExecutor

from pdlab.claims.bench import load_beside_prefill
from pdlab.errors import Refuted, must
from pdlab.faults.hands import Hands
from pdlab.faults.outcome import Seen
from pdlab.lab.comparison import Comparison
from pdlab.lab.halves import Got
from pdlab.lab.instance import Instance
from pdlab.lab.lab import Lab
from pdlab.trace.journey import Journey

PREEMPTIONS = "vllm:num_preemptions_total"
PIECES = 2048  # that Mooncake's TCP transport takes in one batch


def write_fails(h: Hands) -> Seen:
    """P's write has more pieces than Mooncake's TCP transport takes."""
    regions, size = len(h.d.registered_kv["regions"]), int(h.d.registered_kv["block_size"])
    blocks = PIECES // regions + 6  # some of them may follow others
    got, journey, before = into_falling_blocks(h, [1000 + n % 3000 for n in range(blocks * size)])
    must(got.status == 500 and "decode" in got.hop and "D's worker says" in got.reason, f"through the proxy: {got}")
    h.until(lambda: journey.of("pull.failed"), "D's worker says why")
    reason, written = journey.of("pull.failed")[0].facts["reason"], journey.of("transfer.written")[0].facts["result"]
    must(written != 0, f"the write returned {written}")
    freed = h.until_free(h.p, h.d, patience=h.longer(10))
    must(len(journey.of("pull.received")) == 2 and not journey.of("send.expired"), "P freed its blocks without a pull")
    until_served(h)
    came = arrived(h, before)
    must(came > 0, "nothing of it was written")
    return Seen(
        f"the transport takes {PIECES:,} pieces in a batch; of more it refuses the rest, and the write returns "
        f"{written}; D fails at once, and sends an empty pull, with which P frees its blocks. Much of what the "
        "transport took arrives all the same, in blocks that D has freed; while it does, the next write may be refused "
        "too (MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER=16384 raises the limit)",
        "500 that names D, with the reason that its worker gives",
        {"pieces": len(journey.writes), "arrived": came, "reason": reason, "freed_seconds": freed},
        journey,
    )


def into_falling_blocks(h: Hands, prompt: list[int]) -> tuple[Got, Journey, Comparison]:
    """Send a prompt until D takes its blocks for it in falling order, so that few of them are one piece.

    A request gives its blocks back last first, so that D's free list turns round as it is used up; where other requests
    have left too many runs in it, it is shuffled. P computes the prompt once, alone, since that takes longer than D
    waits; then it has it in its prefix cache. D's is emptied.

    Returns:
        What the client of that one got, its journey, and both sides' blocks before the write.
    """
    h.p.complete(prompt, 1, fresh=False)
    size = int(h.d.registered_kv["block_size"])
    rounds = 2 * (h.d.usage().blocks // (len(prompt) // size) + 1)  # in which all blocks are used twice
    for count in range(4 * rounds):
        if count and count % rounds == 0:
            shuffle(h.d, size)
        with h.lab.hold("before_write") as hold:
            journey = h.lab.submit(prompt, 1)
            hold.wait()
            before = h.lab.compare(journey) if len(journey.writes) > PIECES else None
        got, _ = h.ended(journey, time.monotonic())
        if before and got.status != 200:  # of a few more pieces some are gone before the last ones come
            return got, journey, before
        must(got.status == 200, f"{len(journey.writes)} pieces: {got}")
        h.until(h.d.reset_prefix_cache, "D's blocks are free")
    raise Refuted("D's blocks never lay in falling order")


def shuffle(d: Instance, size: int) -> None:
    """Have requests of several lengths take D's blocks and give them back, in another order than they took them."""
    lengths = [
        (size * blocks - 4, tokens) for _ in range(12) for blocks, tokens in ((2, 1), (7, 4), (3, 2), (1, 3), (5, 1))
    ]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda asked: d.complete([7000] * asked[0], asked[1], ignore_eos=True), lengths))


def until_served(h: Hands) -> None:
    """Return once a request has the right answer; until then it has none at all."""

    def served() -> bool:
        got, _ = h.send()
        must(got.token_ids == (h.right if got.status == 200 else ()), f"through the proxy: {got}")
        return got.status == 200

    h.until(served, "the next request is served", 20)


def arrived(h: Hands, before: Comparison) -> int:
    """How many blocks that were other before the write D has now as P has them."""
    first = before.pairs[0].layer
    blocks = [(pair.source_block, pair.destination_block) for pair in before.pairs if pair.layer == first]
    p, d = h.p.kv_digests([source for source, _ in blocks]), h.d.kv_digests([target for _, target in blocks])
    now = [mine == its for rows in zip(p, d, strict=True) for mine, its in zip(*rows, strict=True)]
    return sum(equal and not pair.equal for equal, pair in zip(now, before.pairs, strict=True))


def preemption(h: Hands) -> Seen:
    """P and D have too few blocks for what they are asked at once."""
    with h.small() as lab:
        before = {engine.role: engine.metric(PREEMPTIONS) for engine in lab.engines}
        long = [list(range(1000 + n, 1352 + n)) for n in range(4)]
        growing = [list(range(2000 + n, 2095 + n)) for n in range(7)]
        asked = [*ask_all(lab, long, 2), *ask_all(lab, growing, 20)]
        counted = {engine.role: engine.metric(PREEMPTIONS) - before[engine.role] for engine in lab.engines}
    must(counted["prefill"] == 0 and counted["decode"] > 0, f"preempted: {counted}")
    for got, right in asked:
        must(got.status == 200 and got.token_ids == right, f"through the proxy: {got}, right: {right}")
    return Seen(
        "P takes a prompt in only where all of it fits (scheduler_reserve_full_isl), and preempts none: the "
        "others wait. D preempts requests that decode, and then computes their tokens itself: KV is pulled only once",
        f"nothing to do: all {len(asked)} answers are right",
        {"preemptions": counted},
    )


def queue_full(h: Hands) -> Seen:
    """D has blocks free, but they are reserved for a prompt that it computes in chunks."""
    with h.small() as lab:
        journey = load_beside_prefill(lab)
        right = lab.decode.complete(list(range(1000, 1160)), len(journey.token_ids)).token_ids
    tries = [e.facts for e in journey.of("blocks.allocated", "D scheduler") if e.facts["delay_cache_blocks"]]
    must(tries[0]["reserved_blocks"] > 0 and not tries[0]["allocated"], f"the first try: {tries[0]}")
    must(tries[-1]["allocated"] and journey.token_ids == right, f"the last try: {tries[-1]}")
    return Seen(
        "the load is refused and tried again in every step until there is room; P's blocks are pinned meanwhile, for "
        "its timeout at most",
        "nothing to do: the client waits, and its answer is right",
        {"tries": len(tries), "reserved_blocks": tries[0]["reserved_blocks"]},
        journey,
    )


def chunked_prefill(h: Hands) -> Seen:
    """P computes the prompt in chunks."""
    with h.small() as lab:
        size = int(lab.decode.registered_kv["block_size"])
        prompts = [list(range(1000, 1000 + n)) for n in (1, size - 1, size, size + 1, 200)]
        for prompt in prompts:
            right = lab.decode.complete(prompt, 4).token_ids
            journey = lab.send(prompt, 4, fresh=True)
            must(journey.token_ids == right, f"{len(prompt)} tokens: {journey.token_ids}, right: {right}")
    chunks = [e.facts["num_scheduled_tokens"] for e in journey.of("scheduled", "P scheduler")]
    must(sum(count > 0 for count in chunks) > 1, f"chunks: {chunks}")
    return Seen(
        "nothing is sent before the last chunk is computed; D waits that much longer",
        f"nothing to do: prompts of {', '.join(str(len(prompt)) for prompt in prompts)} tokens are answered rightly",
        {"chunks": [count for count in chunks if count]},
        journey,
    )


def ask_all(lab: Lab, prompts: list[list[int]], tokens: int) -> list[tuple[Got, tuple[int, ...]]]:
    """All at once through the proxy; with each what D alone says, asked one after the other."""
    rights = [lab.decode.complete(prompt, tokens, ignore_eos=True).token_ids for prompt in prompts]
    hands = Hands(lab)
    with ThreadPoolExecutor(len(prompts)) as pool:
        gots = list(pool.map(lambda prompt: hands.send(prompt, tokens, ignore_eos=True)[0], prompts))
    return list(zip(gots, rights, strict=True))
