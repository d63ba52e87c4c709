"""What decides each claim: functions on a `Bench`, which return the evidence, in a sentence, or raise `Refuted`."""

import re
from typing import Any

from pdlab.claims.bench import PROMPT, Bench
from pdlab.errors import Refuted, RequestError, must
from pdlab.source.anchor import Anchor
from pdlab.source.anchors import ANCHORS, CONNECTOR

# 1: the double send ---------------------------------------------------------------------------------------------------


def same_prompt_to_both(bench: Bench) -> str:
    p, d = bench.plain.of("request.added")
    for field in ("num_prompt_tokens", "block_hashes"):
        must(p.facts[field] == d.facts[field], f"{field}: {p.facts[field]} on one side, {d.facts[field]} on the other")
    tokens, whole = bench.plain.prompt_tokens, bench.plain.prompt_tokens // bench.block_size * bench.block_size
    known = bench.known_afterwards()
    must(known == {"prefill": whole, "decode": whole}, f"of this prompt they have in their prefix caches: {known}")
    return f"P and D took {tokens} prompt tokens each; afterwards each has {whole} of this prompt's in its prefix cache"


def prefill_half(bench: Bench) -> str:
    journey = bench.plain
    sent = half(journey, "half.sent", "prefill").facts
    must(sent["kv_transfer_params"]["do_remote_decode"] and sent["max_tokens"] == 1, f"P's half is {sent}")
    finished = journey.step(5).facts
    must(finished["kv_transfer_params"] is None, "P's answer has kv_transfer_params")
    other, answered = half(journey, "half.sent", "decode"), half(journey, "half.answered", "prefill")
    must(other.time < answered.time, "D's half was sent after P's answer")
    early = answered.time - other.time
    return f"do_remote_decode=True, max_tokens=1; D's half left {early * 1e3:.0f} ms before P's answer came"


def decode_half(bench: Bench) -> str:
    journey = bench.plain
    must(half(journey, "half.sent", "decode").facts["kv_transfer_params"]["do_remote_prefill"], "the flag is not set")
    told = journey.of("connector.told", "D scheduler")[0].facts
    before, after = told["flags_before"]["do_remote_prefill"], told["flags_after"]["do_remote_prefill"]
    must((before, after) == (True, False), f"do_remote_prefill went {before} → {after}")
    chunks, first, journey = bench.streamed()
    finished = journey.of("request.finished", "D scheduler")[0].time
    must(chunks > 1 and first < finished, f"{chunks} chunks, the first {first - finished:.3f} s after D had finished")
    early = (finished - first) * 1e3
    sent = f"of {chunks} chunks the first came {early:.0f} ms before D had finished"
    return f"do_remote_prefill=True, False once its blocks are allocated; {sent}"


# 2: the transfer_id ---------------------------------------------------------------------------------------------------


def one_transfer_id(bench: Bench) -> str:
    journey = bench.plain
    ids = {event.facts["kv_transfer_params"]["transfer_id"] for event in journey.of("request.added")}
    must(len(ids) == 1, f"P and D have {ids}")
    must(re.fullmatch(r"xfer-[0-9a-f-]{36}", ids.pop()), "it is no xfer-UUID")
    p, d = journey.prefill.request_id, journey.decode.request_id
    must(p != d and journey.request_id in str(p) and journey.request_id in str(d), f"request ids {p} and {d}")
    return f"one transfer_id; request ids …{str(p)[-11:]} on P, …{str(d)[-11:]} on D"


def either_may_come_first(bench: Bench) -> str:
    d_first = bench.d_first
    matched, recorded = d_first.step(13).facts, d_first.step(4).facts
    must(not matched["known"] and recorded["before"] is not None, "P made the entry although D came first")
    must(recorded["before"]["p_req_id"] == "" and not recorded["before"]["ready"], f"D's entry is {recorded['before']}")
    p_first = bench.p_first
    must(p_first.step(13).facts["known"] and p_first.step(4).facts["before"] is None, "D made it although P came first")
    must(d_first.token_ids == p_first.token_ids, "the order made another answer")
    return "D first: a placeholder without request id, filled in by P; P first: found ready; the same answer"


def two_prompts_under_one_id(bench: Bench) -> str:
    answer, of_p, of_d = bench.two_prompts()
    must(answer == of_p, "D's answer is not the one to P's prompt")
    must(of_p != of_d, "the two prompts have the same answer: choose others")
    return "D was given another prompt of that length than P: it answered P's, with status 200"


# 3: parked on D -------------------------------------------------------------------------------------------------------


def parked(bench: Bench) -> str:
    journey, other = bench.held
    moment = next(m for m in journey.decode.moments if m.status == "WAITING_FOR_REMOTE_KVS")
    must(moment.queue == "kv_holding_waiting", f"it is in {moment.queue}")
    must(moment.scheduled_tokens == 0 and moment.computed_tokens == journey.prompt_tokens, f"{moment}")
    after = next(m for m in journey.decode.moments if m.status == "RUNNING")
    must(after.tokens_of_others_before > 0, "no other request was served meanwhile")
    return (
        f"in {moment.queue}, 0 tokens scheduled in {after.steps_before} steps, "
        f"{after.tokens_of_others_before} tokens of another request in them ({other!r})"
    )


def zeroing(bench: Bench) -> str:
    journey = bench.plain
    skipped = journey.step(8).facts["skip_zeroing_group_ids"]
    must(skipped == [0], f"skip_zeroing_group_ids={skipped}")
    zeroed = [event.facts["new_block_ids_to_zero"] for event in journey.of("scheduled")]
    must(not any(zeroed), f"blocks were zeroed: {zeroed}")
    return "asked to skip group 0, but new_block_ids_to_zero is None in every step of either engine: nothing is zeroed"


def reserved_blocks(bench: Bench) -> str:
    plain = bench.plain.step(8).facts["reserved_blocks"]
    must(plain == 0, f"reserved_blocks={plain} on a pure decode instance")
    refused, allowed = bench.load_beside_prefill()
    must(refused["reserved_blocks"] > 0 and not refused["allocated"], f"the load was not refused: {refused}")
    must(allowed["allocated"], "the load never got its blocks")
    first, last = (f"{facts['reserved_blocks']} of {facts['free_before']}" for facts in (refused, allowed))
    return (
        f"0 on a pure D; beside a chunked prefill {first} free blocks were reserved, and the load waited until {last}"
    )


# 4: the pull ----------------------------------------------------------------------------------------------------------


def pull_message(bench: Bench) -> str:
    journey = bench.plain
    received = journey.of("pull.received")[0].facts
    fields = received["fields"]
    bases = [region["base_addr"] for region in bench.lab.decode.registered_kv["regions"]]
    must(fields["kv_caches_base_addr"] == bases, "the base addresses are not D's")
    (transfer, groups), *others = fields["req_blocks"].values()
    must(not others and transfer == journey.transfer_id, f"req_blocks has {fields['req_blocks']}")
    must(groups == [journey.decode.block_ids], f"block ids {groups}, not {journey.decode.block_ids}")
    lengths = sorted(set(fields["block_lens"]))
    return f"{received['bytes']:,} bytes: {len(bases)} base addresses, block_lens {lengths}, block ids in req_blocks"


def no_handshake(bench: Bench) -> str:
    met = [
        journey for journey in bench.lab.trace() if journey.of("engine.asked") and journey.complete
    ]  # with it D and P have met
    for journey in (*met, bench.plain):
        counts = {name: len(journey.of(name)) for name in ("pull.encoded", "pull.received", "answer.sent")}
        must(set(counts.values()) == {1}, f"messages: {counts}")
        must(len(journey.of("engine.asked")) <= 1, f"queries: {len(journey.of('engine.asked'))}")
    once = "the first request of the pair too, and a GET /query" if met else "the first request is in no trace any more"
    return f"ZMQ: 1 message to P, 1 answer ({once})"


def bytes_in_place(bench: Bench) -> str:
    before, after = bench.compared
    must(not before.equal, "the blocks were equal before the write")
    must(after.equal, f"{len(after.unequal)} blocks differ: {after.unequal[:3]}")
    differ = f"{len(before.unequal)} of {len(before.pairs)} blocks differ"
    return f"before the write {differ}, after it none: {after.bytes:,} bytes"


def one_token_computed(bench: Bench) -> str:
    scheduled = [m.scheduled_tokens for m in bench.plain.decode.moments if m.scheduled_tokens or m.queue]
    first = next(count for count in scheduled if count)
    must(first == 1, f"D scheduled {first} tokens first")
    return f"D scheduled 0 tokens until the KV was there, then {first}; P scheduled {bench.plain.prompt_tokens}"


def dp_suffix(bench: Bench) -> str:
    must(not re.search(r"_dp\d+$", bench.lab.prefill.engine_id), f"engine id {bench.lab.prefill.engine_id}")
    ids = bench.engine_ids_with_dp2()
    must([key[-4:] for key in ids] == ["_dp0", "_dp1"], f"with data parallelism 2: {ids}")
    must(len({key[:-4] for key in ids}) == 1, f"not one id with two suffixes: {ids}")
    return "none with data parallelism 1; with 2, /query names …_dp0 and …_dp1"


# 5 and on: after the write --------------------------------------------------------------------------------------------


def prefix_cache(bench: Bench) -> str:
    facts, reported = bench.plain.step(20).facts, bench.plain.step(19)
    before, after = ("".join(str(row[2]) for row in facts[key]) for key in ("blocks_before", "blocks"))
    full = bench.plain.prompt_tokens // bench.block_size
    must(before == "0" * len(before), f"hashed before: {before}")
    must(after == "1" * full + "0" * (len(after) - full), f"hashed after: {after}")
    must(reported.time < bench.plain.step(20).time, "promoted before the scheduler heard of it")
    return f"hashed {before} when the KV is there, {after} after promotion: {full} full blocks"


def taken_back_by_one(bench: Bench) -> str:
    facts, n = bench.plain.step(20).facts, bench.plain.prompt_tokens
    pair = facts["num_computed_tokens_before"], facts["num_computed_tokens_after"]
    must(pair == (n, n - 1), f"num_computed_tokens {pair}")
    must(bench.plain.step(21).facts["num_scheduled_tokens"] == 1, "not one token was scheduled")
    changed = bench.rewritten
    must(changed, "D's last slot has the bytes that P wrote, in every layer")
    return f"num_computed_tokens {n} → {n - 1}, 1 scheduled; D overwrote its slot: other bytes in {len(changed)} layers"


def background_send(bench: Bench) -> str:
    journey, served = bench.held_with_p_serving
    thread = journey.step(15).thread
    must(thread.startswith("vllm-mooncake-sender"), f"written by thread {thread}")
    must(served, "P served nothing while the write was held")
    return f"written by thread {thread}; while it was held, P answered another prompt"


def measured(bench: Bench) -> str:
    seconds = bench.plain.seconds
    names = ("P computes the prompt", "P writes", "D hears of it", "D computes the last prompt token")
    return ", ".join(f"{name} {seconds[name] * 1e3:.0f} ms" for name in names)


def late_release(bench: Bench) -> str:
    journey = bench.plain
    finished, freed = journey.of("request.finished", "P scheduler")[0], journey.of("blocks.freed", "P scheduler")[0]
    must(finished.facts["delay_free_blocks"], "delay_free_blocks is not set")
    written = journey.of("transfer.written")[0]
    must(finished.time < written.time < freed.time, "the blocks were freed before they were written")
    return f"P finished, wrote, and freed {(freed.time - finished.time) * 1e3:.0f} ms after it had finished"


def a_failure(bench: Bench) -> str:
    try:
        bench.ask_unknown_engine()
    except RequestError as error:
        must(error.status == 500, f"status {error.status}")
    else:
        raise Refuted("D answered")
    must(bench.lab.decode.complete("Still there?", max_tokens=1).text, "D does not answer any more")
    return "an unknown remote_engine_id: status 500, and D answers the next request"


def line_numbers(bench: Bench) -> str:
    place = ANCHORS["claim.9"].resolve()
    lines = (place.first_line, place.last_line)
    must(lines != (2028, 2039), f"start_load_kv is at {lines}")
    return f"start_load_kv is at lines {lines[0]}-{lines[1]} of {place.file.rsplit('/', 1)[-1]}"


def where_the_classes_are(bench: Bench) -> str:
    names = ("MooncakeConnectorScheduler", "MooncakeConnectorWorker")
    places = [Anchor(f"{CONNECTOR}:{name}").resolve() for name in names]
    scheduler = Anchor("vllm.v1.core.sched.scheduler:Scheduler").resolve()
    must(all(place.file != scheduler.file for place in places), "they are in scheduler.py")
    return ", ".join(f"{name} at line {place.first_line}" for name, place in zip(names, places, strict=True))


def without_rdma(bench: Bench) -> str:
    protocol = bench.protocol
    must(protocol == "tcp", f"this lab runs with {protocol}: it shows nothing of the claim")
    must(bench.plain.bytes_moved, "nothing was moved")
    return f"mooncake_protocol={protocol}: {bench.plain.bytes_moved:,} bytes moved for {len(PROMPT)} tokens"


def half(journey: Any, name: str, role: str) -> Any:
    for event in journey.of(name, "proxy"):
        if event.facts["role"] == role:
            return event
    raise Refuted(f"the proxy noted no {name} of the {role} half")
