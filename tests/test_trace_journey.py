"""The journey of one request: recorded ones, whole, and with any part of their events missing."""

import gzip
import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pdlab.errors import PdlabError, RequestError
from pdlab.trace.answer import Answer
from pdlab.trace.event import ACTORS, Event, read_line
from pdlab.trace.journey import Journey
from pdlab.trace.perfetto import as_chrome_trace
from pdlab.trace.reader import Reader
from pdlab.trace.stages import STAGES
from pdlab.trace.trace import Trace, read
from tests.traces import (
    AT_ONCE,
    BEFORE_HIT,
    BLOCK_LEN,
    EVERY,
    HELD,
    HIT,
    LAYERS,
    P_FIRST,
    TRACE,
    WHOLE,
    changed,
    header_line,
    journey_of,
    recorded_journey,
    recorded_trace,
    saved,
    the,
)

# What follows what, whatever the clock does; between the two sides only what a message carries.
ON_P = (1, 2, 3, 4, 5, 6, 14)
ON_D = (1, 2, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 19, 20, 21, 22, 23)
BACK_ON_P = (16, 17)
ANSWER = Answer(" as the other", (1, 2, 3), 143, "length", "pdlab-1", "xfer-1")
PROPERTIES = [name for name, value in vars(Journey).items() if isinstance(value, property)]
OF_THE_ANSWER = ("answer", "text", "token_ids", "finish_reason")


def times(journey: Journey, side: str) -> dict[int, float]:
    """When each step was; of those that both halves have, the one of this side."""
    other = {"P": ("D scheduler", "decode"), "D": ("P scheduler", "prefill")}[side]
    return {
        step.number: step.time
        for step in journey.steps
        if step.number > 2 or (step.actor != other[0] and step.facts.get("role") != other[1])
    }


def look(journey: Journey) -> None:
    """Look at all there is of a journey; only what the client got may be missing, and says so."""
    for name in PROPERTIES:
        if name in OF_THE_ANSWER and not journey.has_text:
            with pytest.raises(PdlabError, match="it has no answer yet"):
                getattr(journey, name)
        else:
            getattr(journey, name)
    for side in (journey.prefill, journey.decode):
        assert repr(side).startswith(f"<{side.name}: ")
        assert side.block_ids == [block.block_id for block in side.blocks]
    assert repr(journey).startswith("<Journey: ")
    assert str(journey).splitlines()[0] == repr(journey)
    assert len(journey.outline().splitlines()) >= len(journey.steps)
    assert [repr(step) for step in journey.steps] == [f"<step {s.number}, {s.actor}: {s.says}>" for s in journey.steps]
    assert all(write.as_computed and write.arithmetic for write in journey.writes)
    assert Journey.from_dict(json.loads(json.dumps(journey.as_dict()))).as_dict() == journey.as_dict()
    json.dumps([as_chrome_trace([journey]), journey.summary(), [step.as_dict() for step in journey.steps]])


class TestSteps:
    @pytest.mark.parametrize("index", EVERY)
    def test_all_23_have_happened(self, index: int) -> None:
        journey = recorded_journey(index)
        assert {step.number for step in journey.steps} == set(range(1, 24))
        assert journey.missing == []
        assert journey.complete

    @pytest.mark.parametrize("index", EVERY)
    def test_by_five_actors(self, index: int) -> None:
        journey = recorded_journey(index)
        assert {step.actor for step in journey.steps} == set(ACTORS)
        assert {event.actor for event in journey.events} == set(ACTORS)

    @pytest.mark.parametrize("index", EVERY)
    @pytest.mark.parametrize(("side", "chain"), [("P", ON_P), ("D", ON_D), ("P", BACK_ON_P)])
    def test_come_in_the_order_of_their_causes(self, side: str, chain: tuple[int, ...], index: int) -> None:
        when = times(recorded_journey(index), side)
        for before, after in pairwise(chain):
            assert when[before] < when[after], f"step {after} before step {before}"

    def test_are_listed_by_time(self) -> None:
        numbers = [[step.number for step in recorded_journey(index).steps] for index in (WHOLE, P_FIRST)]
        assert numbers[0] == [1, 1, 2, 2, 3, 7, 8, 9, 10, 11, 12, 13, 4, 5, 6, *range(14, 24)]
        assert numbers[1] == [1, 2, 3, 4, 5, 6, 1, 2, *range(7, 17), 18, 17, *range(19, 24)]
        for index in EVERY:
            when = [step.time for step in recorded_journey(index).steps]
            assert when == sorted(when)
            assert when[0] == 0

    def test_the_first_two_are_of_both_halves_and_no_other_is(self) -> None:
        for index in EVERY:
            numbers = [step.number for step in recorded_journey(index).steps]
            assert sorted(numbers) == [1, 1, 2, 2, *range(3, 24)]

    def test_by_number(self) -> None:
        journey = recorded_journey(WHOLE)
        assert [journey.step(number).number for number in range(1, 24)] == list(range(1, 24))
        for number in (0, 24):
            with pytest.raises(PdlabError, match=f"step {number} has not happened"):
                journey.step(number)

    def test_who_came_first(self) -> None:
        assert recorded_journey(WHOLE).step(13).says == "D came first, P is not ready yet"
        assert recorded_journey(P_FIRST).step(13).says == "P came first, P is ready"
        assert recorded_journey(WHOLE).step(4).says.endswith("not ready: D had made it")
        assert recorded_journey(P_FIRST).step(4).says.endswith("not ready")

    def test_the_address_is_asked_for_once(self) -> None:
        says = [recorded_journey(index).step(11).says for index in EVERY]
        assert says == ["GET /query: found", *["no query needed"] * 10]

    def test_say_what_the_mechanism_does(self) -> None:
        journey = recorded_journey(WHOLE)
        parked = "WAITING_FOR_REMOTE_KVS, 0 tokens scheduled, num_computed_tokens=143, in kv_holding_waiting"
        assert journey.step(9).says == parked
        assert journey.step(5).says == "FINISHED_LENGTH_CAPPED, 5 blocks, delay_free_blocks=True"
        assert journey.step(14).says == "30 regions, 5 blocks each"
        assert journey.step(15).says == "7,372,800 bytes, returned 0"
        assert journey.step(20).says == "4 of 5 blocks hashed, num_computed_tokens 143 → 142"
        assert journey.step(21).says == "1 token scheduled, RUNNING"

    def test_are_told_apart_by_their_values(self) -> None:
        # Step 4 and step 6 are the same call, without block ids and with them.
        journey = recorded_journey(WHOLE)
        entry = journey.of("send.recorded")[0]
        part = journey_of([event for event in journey.events if event is not entry], journey)
        assert [line.split(":")[0] for line in part.missing] == ["step 4"]
        assert part.step(6).time == journey.step(6).time

    def test_name_their_place_in_the_source(self) -> None:
        assert {step.anchor for step in recorded_journey(WHOLE).steps} == {f"step.{n}" for n in range(1, 24)}

    def test_as_a_dict(self) -> None:
        step = recorded_journey(WHOLE).step(21)
        fields = step.as_dict()
        assert (fields["number"], fields["actor"], fields["says"]) == (21, "D scheduler", "1 token scheduled, RUNNING")
        assert (fields["time"], fields["facts"], fields["anchor"]) == (step.time, step.facts, "step.21")


class TestSides:
    def test_blocks_of_p(self) -> None:
        side = recorded_journey(WHOLE).prefill
        assert [tuple(block) for block in side.blocks] == [
            (0, 1, 32, True, 1), (1, 2, 32, True, 1), (2, 3, 32, True, 1), (3, 4, 32, True, 1), (4, 5, 15, False, 1),
        ]  # fmt: skip

    def test_blocks_of_d_are_hashed_when_it_is_promoted_and_no_sooner(self) -> None:
        journey = recorded_journey(WHOLE)
        when = times(journey, "D")
        flags = [(time, [block.hashed for block in rows]) for time, rows in journey.decode.tables]
        assert flags[0] == (when[8], [False] * 5)
        assert flags[1] == (when[20], [True] * 4 + [False])
        assert [f for time, f in flags if time < when[20]] == [[False] * 5]
        assert [f for time, f in flags if time >= when[20]] == [[True] * 4 + [False]] * (len(flags) - 1)
        before = the("request.promoted", journey).facts["blocks_before"]
        assert [row[2] for row in before] == [0] * 5

    def test_blocks_that_d_had_are_hashed_from_the_start(self) -> None:
        journey = recorded_journey(HIT)
        assert [block.hashed for block in journey.decode.tables[0][1]] == [True] * 4 + [False]
        assert journey.step(7).facts["num_computed_tokens"] == 128

    @pytest.mark.parametrize("index", EVERY)
    def test_tokens_fill_the_blocks(self, index: int) -> None:
        journey = recorded_journey(index)
        tokens = journey.prompt_tokens
        assert tokens == (143 if index < 5 else 40 + index - AT_ONCE[0])
        for side in (journey.prefill, journey.decode):
            assert [block.tokens for block in side.blocks] == [32] * (tokens // 32) + [tokens % 32]
            assert [block.logical for block in side.blocks] == list(range(math.ceil(tokens / 32)))
            assert all(block.ref_count == 1 for block in side.blocks)

    @pytest.mark.parametrize("index", EVERY)
    def test_computed_tokens_go_one_back_on_d(self, index: int) -> None:
        journey = recorded_journey(index)
        n = journey.prompt_tokens
        assert [value for _, value in journey.computed_tokens["P"]] == [0, n]
        assert [value for _, value in journey.computed_tokens["D"]][:4] == [0, n, n - 1, n]

    def test_computed_tokens_by_step(self) -> None:
        journey = recorded_journey(WHOLE)
        when = times(journey, "D")
        changes = {value: time for time, value in journey.computed_tokens["D"][1:3]}
        assert when[9] <= changes[143] <= when[11]
        assert changes[142] == when[20]

    @pytest.mark.parametrize("index", EVERY)
    def test_status(self, index: int) -> None:
        status = recorded_journey(index).status
        assert [name for _, name in status["P"]] == ["WAITING", "RUNNING", "FINISHED_LENGTH_CAPPED"]
        assert [name for _, name in status["D"]] == [
            "WAITING", "WAITING_FOR_REMOTE_KVS", "WAITING", "RUNNING", "FINISHED_LENGTH_CAPPED",
        ]  # fmt: skip

    def test_moments(self) -> None:
        side = recorded_journey(WHOLE).decode
        parked = next(moment for moment in side.moments if moment.status == "WAITING_FOR_REMOTE_KVS")
        assert (parked.queue, parked.computed_tokens, parked.scheduled_tokens) == ("kv_holding_waiting", 143, 0)
        resumed = next(moment for moment in side.moments if moment.status == "RUNNING")
        assert (resumed.queue, resumed.computed_tokens, resumed.scheduled_tokens) == ("running", 143, 1)
        assert resumed.steps_before > 100  # empty steps, while it waited
        assert side.moments[-1].queue is None

    def test_what_went_wrong(self) -> None:
        journey = recorded_journey(WHOLE)
        [end] = journey.of("request.finished", "D scheduler")
        before = [event for event in journey.events if event.time < end.time]
        failed = {"num_computed_tokens_after": 64, "policy": "recompute"}
        for name, facts, moment in (
            ("load.failed", failed, ("RUNNING", "running", 64)),
            ("request.aborted", {"status_after": "FINISHED_ABORTED"}, ("FINISHED_ABORTED", None, 146)),
            ("request.preempted", {"blocks": []}, ("PREEMPTED", "waiting", 0)),
        ):
            last = journey_of([*before, replace(end, name=name, facts=facts)], journey).decode.moments[-1]
            assert (last.status, last.queue, last.computed_tokens) == moment


class TestNumbers:
    @pytest.mark.parametrize("index", EVERY)
    def test_bytes_moved(self, index: int) -> None:
        journey = recorded_journey(index)
        blocks = {WHOLE: 5, BEFORE_HIT: 5, HIT: 1, HELD: 5, P_FIRST: 5}.get(index, 2)
        assert {write.block_len for write in journey.writes} == {BLOCK_LEN}
        assert journey.bytes_moved == LAYERS * blocks * BLOCK_LEN == sum(write.length for write in journey.writes)

    def test_summary(self) -> None:
        journey = recorded_journey(WHOLE)
        summary = journey.summary()
        assert summary["transfer"].pop("seconds") == the("transfer.written", journey).facts["seconds"]
        assert summary == {
            "prompt_tokens": 143, "computed_on_prefill": 143, "computed_on_decode": 1,
            "transfer": {"regions": 30, "blocks": 5, "block_bytes": 49_152, "bytes": 7_372_800, "descriptors": 30},
        }  # fmt: skip

    @pytest.mark.parametrize("index", EVERY)
    def test_tokens_computed_on_either_side(self, index: int) -> None:
        journey = recorded_journey(index)
        # The second time, P too had four full blocks of the prompt.
        assert journey.prefill.prompt_tokens_computed == (15 if index == HIT else journey.prompt_tokens)
        assert journey.decode.prompt_tokens_computed == 1

    def test_no_bytes_are_moved_before_the_write_or_by_one_that_failed(self) -> None:
        journey = recorded_journey(WHOLE)
        written = the("transfer.written", journey)
        before = [event for event in journey.events if event.time < written.time]
        assert journey_of(before, journey).bytes_moved == 0
        failed = journey_of([*before, changed(written, result=-1)], journey)
        assert failed.bytes_moved == 0
        assert failed.step(15).says.endswith("returned -1")

    @pytest.mark.parametrize("index", EVERY)
    def test_seconds(self, index: int) -> None:
        journey = recorded_journey(index)
        assert list(journey.seconds) == list(STAGES)
        assert all(seconds > 0 for seconds in journey.seconds.values())

    def test_seconds_are_those_between_the_events(self) -> None:
        journey = recorded_journey(WHOLE)
        written, began = the("transfer.written", journey), the("transfer.started", journey)
        assert journey.seconds["P writes"] == written.time - began.time
        first, sent = journey.of("token.first", "D scheduler")[0], journey.of("half.sent")[0]
        assert journey.seconds["time to first token"] == first.time - sent.time
        stages = {stage: (first.name, last.name) for stage, first, last in journey.stages()}
        assert stages["D waits for the KV"] == ("metadata.built", "request.promoted")

    def test_seconds_end_after_they_began(self) -> None:
        journey = recorded_journey(WHOLE)
        early = replace(the("transfer.written", journey), time=journey.start)
        assert journey_of([*journey.events, early], journey).seconds["P writes"] == journey.seconds["P writes"]

    def test_seconds_do_not_depend_on_when_the_clock_began(self) -> None:
        journey = recorded_journey(WHOLE)
        early = journey_of([event.later(-1e6) for event in journey.events], journey)
        assert early.start < 0
        assert early.seconds == pytest.approx(journey.seconds, abs=1e-6)

    def test_a_stage_that_has_not_ended_is_left_out(self) -> None:
        journey = saved("held")
        assert set(STAGES) - set(journey.seconds) == {
            "D waits for the KV", "P writes", "D hears of it", "D computes the last prompt token",
            "time to first token", "D decodes", "P keeps the blocks after its answer",
        }  # fmt: skip


class TestHeld:
    def test_at_a_point(self) -> None:
        journey = saved("held")
        assert journey.held == "before_write"
        assert max(step.number for step in journey.steps) == 14
        assert "held at before_write" in repr(journey)
        assert not journey.done

    def test_no_longer(self) -> None:
        assert [recorded_journey(index).held for index in EVERY] == [None] * 11
        assert [len(recorded_journey(index).of("gate.held")) for index in EVERY] == [0, 0, 0, 1, 1, *[0] * 6]

    def test_at_two_points_at_once(self) -> None:
        """On D before the pull and on P before it is ready: by hand, both gates can be closed."""
        journey = saved("held")
        held = the("gate.held", journey)
        other = replace(changed(held, point="before_pull"), actor="D worker", time=held.time + 1)
        released = replace(other, name="gate.released", time=held.time + 2)
        assert journey_of([*journey.events, other], journey).held == "before_pull"
        assert journey_of([*journey.events, other, released], journey).held == "before_write"
        first = replace(held, name="gate.released", time=held.time + 2)
        assert journey_of([*journey.events, other, first], journey).held == "before_pull"


class TestMissingParts:
    @pytest.mark.parametrize("index", EVERY)
    def test_every_beginning_of_a_journey_is_one(self, index: int) -> None:
        journey = recorded_journey(index)
        came = []
        for length in range(len(journey.events) + 1):
            part = journey_of(journey.events[:length], journey)
            look(part)
            came.append(len({step.number for step in part.steps}))
        assert came == sorted(came)
        assert (came[0], came[-1]) == (0, 23)

    @pytest.mark.parametrize("index", EVERY)
    def test_every_end_of_a_journey_is_one(self, index: int) -> None:
        journey = recorded_journey(index)
        for length in range(len(journey.events) + 1):
            look(journey_of(journey.events[length:], journey))

    @pytest.mark.parametrize("actor", ACTORS)
    @pytest.mark.parametrize("index", [WHOLE, HIT, HELD, P_FIRST, AT_ONCE[1]])
    def test_without_an_actor(self, actor: str, index: int) -> None:
        journey = recorded_journey(index)
        part = journey_of([event for event in journey.events if event.actor != actor], journey)
        look(part)
        lost = {step.number for step in journey.steps if step.actor == actor}
        there = {step.number for step in part.steps}
        assert part.missing[0] == f"{actor}: no event"
        assert [line.split(":")[0] for line in part.missing[1:]] == [f"step {n}" for n in sorted(lost - there)]
        assert there == set(range(1, 24)) - (lost - {2})

    @pytest.mark.parametrize("actors", [("P scheduler", "P worker"), ("D scheduler", "D worker"), ("proxy",), ()])
    def test_of_one_half_only(self, actors: tuple[str, ...]) -> None:
        journey = recorded_journey(WHOLE)
        part = journey_of([event for event in journey.events if event.actor in actors], journey)
        look(part)
        assert [line for line in part.missing if line.endswith("no event")] == [
            f"{actor}: no event" for actor in ACTORS if actor not in actors
        ]
        assert part.prompt_tokens == (143 if len(actors) == 2 else 0)
        assert part.prefill.blocks == (journey.prefill.blocks if "P scheduler" in actors else [])
        assert part.decode.blocks == (journey.decode.blocks if "D scheduler" in actors else [])
        assert part.bytes_moved == (journey.bytes_moved if "P worker" in actors else 0)
        assert part.done == ("proxy" in actors)
        assert not part.complete

    def test_it_is_done_when_the_proxy_has_done_with_the_half_of_d(self) -> None:
        journey = recorded_journey(P_FIRST)
        closed = the("half.closed", journey)
        for length in range(len(journey.events) + 1):
            part = journey_of(journey.events[:length], journey)
            assert part.done == part.complete == (closed in part.events)
        without = journey_of([event for event in journey.events if event is not closed], journey)
        without.answered(ANSWER)
        assert without.done
        assert not without.complete

    def test_of_nothing_at_all(self) -> None:
        journey = Journey("pdlab-1")
        look(journey)
        assert repr(journey) == "<Journey: 0 of 23 steps, under way>"
        assert repr(journey.prefill) == "<P: no event, blocks []>"
        assert (journey.transfer_id, journey.request_id, journey.start) == (None, "pdlab-1", 0.0)
        assert len(journey.missing) == len(ACTORS) + 23

    def test_events_in_any_order_are_the_same_journey(self) -> None:
        journey = recorded_journey(WHOLE)
        assert journey_of(journey.events[::-1], journey).as_dict() == journey.as_dict()


class TestWhoseEvents:
    @pytest.mark.parametrize("index", EVERY)
    def test_are_joined_by_the_transfer_id(self, index: int) -> None:
        """Of the request ids each engine has its own, which only begins with the one of the proxy."""
        journey = recorded_journey(index)
        assert all(journey.transfer_id in event.transfers for event in journey.events)
        p, d = journey.prefill.request_id, journey.decode.request_id
        assert p is not None
        assert d is not None
        assert p != d
        assert p[:-8] == d[:-8] == f"cmpl-{journey.request_id}-0-"
        ids = {event.request_id for event in journey.events}
        assert ids == {None, journey.request_id, p, d}

    def test_are_of_no_other_journey(self) -> None:
        trace = recorded_trace()
        assert len({journey.transfer_id for journey in trace}) == len(trace) == 11
        for journey in trace:
            alone = [event for event in journey.events if event.transfers == (journey.transfer_id,)]
            shared = [event for event in journey.events if len(event.transfers) > 1]
            assert len(alone) + len(shared) == len(journey.events)
            assert {event.name for event in shared} <= {
                "pull.encoded", "pull.received", "transfer.planned", "transfer.started", "transfer.written",
                "answer.sent", "transfers.finished",
            }  # fmt: skip

    def test_several_requests_in_one_message_are_kept_apart(self) -> None:
        journeys = [recorded_journey(index) for index in AT_ONCE]
        assert [len(the("pull.encoded", journey).transfers) for journey in journeys] == [1, 2, 2, 3, 3, 3]
        for journey in journeys:
            message = the("pull.encoded", journey).facts["fields"]["req_blocks"]
            assert message[journey.decode.request_id] == [journey.transfer_id, [journey.decode.block_ids]]
            assert len(message) == len(the("pull.encoded", journey).transfers)

    def test_several_requests_in_one_transfer_are_kept_apart(self) -> None:
        journeys = [recorded_journey(index) for index in AT_ONCE]
        assert [len(the("transfer.planned", journey).transfers) for journey in journeys] == [1, 2, 2, 3, 3, 3]
        for journey in journeys:
            assert len(journey.writes) == LAYERS
            for layer, write in enumerate(journey.writes):
                assert write.layer == layer
                assert list(write.source_blocks) == journey.prefill.block_ids
                assert list(write.destination_blocks) == journey.decode.block_ids
        for planned in {str(the("transfer.planned", j).facts): the("transfer.planned", j) for j in journeys}.values():
            mine = [w for j in journeys for w in j.writes if j.transfer_id in planned.transfers]
            assert sorted(write.source_address for write in mine) == sorted(planned.facts["src_ptrs"])
            assert sorted(write.destination_address for write in mine) == sorted(planned.facts["dst_ptrs"])

    def test_what_d_submits_to_have_p_free_its_blocks_is_no_part_of_its_half(self) -> None:
        """P was killed and the client has its error: D keeps the blocks, whatever that other request did."""
        journey = saved("p_died")
        notice = {e.request_id for e in journey.events if e.actor == "D scheduler"} - {journey.decode.request_id}
        assert len(notice) == 1
        assert [status for _, status in journey.decode.status] == [
            "WAITING", "WAITING_FOR_REMOTE_KVS", "FINISHED_ABORTED",
        ]  # fmt: skip
        assert journey.decode.prompt_tokens == 143 and len(journey.decode.blocks) == 5
        assert journey.of("blocks.freed") == [] and "step 23: D is finished and frees the blocks" in journey.missing
        assert not journey.complete

    def test_where_d_refuses_its_half_there_is_only_that_other_request(self) -> None:
        journey = saved("p_died")
        own = journey.decode.request_id
        notice = [e for e in journey.events if e.actor != "D scheduler" or e.request_id != own]
        notice = [changed(e, abort_immediately=True) if e.name == "request.added" else e for e in notice]
        refused = journey_of([e for e in notice if e.actor != "P scheduler"], journey)
        assert refused.decode.request_id is None and refused.decode.moments == []

    def test_a_trace_that_begins_in_its_midst_is_of_its_request(self) -> None:
        journey = recorded_journey(WHOLE)
        rest = journey_of([event for event in journey.events if event.name != "request.added"], journey)
        assert rest.decode.computed_tokens[1:] == journey.decode.computed_tokens[2:]

    def test_by_name_and_actor(self) -> None:
        journey = recorded_journey(WHOLE)
        assert [event.actor for event in journey.of("blocks.freed")] == ["P scheduler", "D scheduler"]
        assert [event.actor for event in journey.of("blocks.freed", "D scheduler")] == ["D scheduler"]
        assert journey.of("blocks.freed", "proxy") == []


class TestUnderWay:
    """A journey that is fed from a trace that grows."""

    def test_fills_up(self, tmp_path: Path) -> None:
        whole = recorded_journey(WHOLE)
        reader, came = Reader(tmp_path), []
        journey = Journey(whole.request_id, feed=feeding(reader))
        (tmp_path / "all.jsonl").write_text(header_line())
        for event in whole.events:
            with (tmp_path / "all.jsonl").open("a") as file:
                file.write(event.as_line() + "\n")
            came.append(len({step.number for step in journey.steps}))
            repr(journey), journey.prefill, journey.writes, journey.held
        assert came == sorted(came)
        assert len(set(came)) == 23
        journey.answered(ANSWER)
        assert journey.complete
        journey.close()
        assert journey.as_dict()["events"] == whole.as_dict()["events"]
        assert (str(journey).splitlines()[1:], journey.writes) == (str(whole).splitlines()[1:], whole.writes)

    def test_is_done_with_its_answer_and_not_with_the_proxy(self) -> None:
        whole = recorded_journey(WHOLE)
        journey = Journey(whole.request_id, whole.events, feed=lambda _: None)
        assert not journey.done
        assert journey.missing == []
        journey.answered(None, PdlabError("refused"))
        assert journey.done

    def test_keeps_what_the_reader_forgot(self) -> None:
        whole = recorded_journey(WHOLE)
        journey = Journey(whole.request_id)
        journey.fill(whole.events[:20], whole.transfer_id)
        for fewer in ([], whole.events[:3]):
            journey.fill(fewer, whole.transfer_id)
            assert journey.events == whole.events[:20]
        journey.fill(whole.events[::-1], whole.transfer_id)
        assert journey.events == whole.events

    def test_closed_takes_nothing_more(self) -> None:
        fed: list[Journey] = []
        journey = Journey("pdlab-1", feed=fed.append)
        assert (journey.events, len(fed)) == ([], 1)
        journey.close()
        assert (journey.events, len(fed)) == ([], 1)


class TestWait:
    def test_for_one_that_is_complete(self) -> None:
        journey = recorded_journey(WHOLE)
        assert journey.wait() is journey

    def test_in_vain(self) -> None:
        with pytest.raises(PdlabError) as raised:
            saved("held").wait(0)
        assert raised.value.message == "the journey is not complete after 0 s; it is held at before_write"

    @pytest.mark.parametrize("events", [0, 20, 53])
    def test_for_one_that_failed(self, events: int) -> None:
        whole = recorded_journey(WHOLE)
        journey = journey_of(whole.events[:events], whole)
        journey.answered(None, PdlabError("the proxy refused it"))
        with pytest.raises(PdlabError, match="the proxy refused it"):
            journey.wait()

    def test_where_no_trace_is_written_the_answer_is_all(self) -> None:
        journey = Journey("pdlab-1")
        journey.answered(ANSWER)
        assert journey.wait() is journey
        assert not journey.complete


class TestAnswer:
    def test_is_what_the_client_got(self) -> None:
        journey = Journey("pdlab-1")
        journey.answered(ANSWER)
        look(journey)
        assert (journey.text, journey.token_ids, journey.finish_reason) == (" as the other", (1, 2, 3), "length")
        assert (journey.done, journey.prompt_tokens, journey.answer) == (True, 143, ANSWER)
        assert repr(journey) == "<Journey: 143 prompt tokens, 0 of 23 steps, ' as the other'>"
        assert repr(ANSWER) == "<Answer to 143 prompt tokens: ' as the other'>"

    def test_is_not_in_a_trace(self) -> None:
        journey = recorded_journey(WHOLE)
        assert journey.done
        assert not journey.has_text
        with pytest.raises(PdlabError, match="a trace keeps no text"):
            _ = journey.text

    def test_is_an_error(self) -> None:
        journey = Journey("pdlab-1")
        journey.answered(None, PdlabError("the proxy refused it", "ask otherwise"))
        assert repr(journey) == "<Journey: 0 of 23 steps, failed: the proxy refused it>"
        with pytest.raises(PdlabError, match="the proxy refused it"):
            _ = journey.answer


P, D = "http://127.0.0.1:41001", "http://127.0.0.1:41002"
BOOTSTRAP = "http://127.0.0.1:41998"
LOST = "it ended, or was started again, before D had its KV"
REFUSED = "not served by prefill/decode: more than one answer (n, best_of, use_beam_search)"
HALF = {"role": "prefill", "status": 502}
OURS = json.dumps({"error": {"message": f"prefill instance {P}: connection refused", "type": "Bad", "code": 502}})
UNKNOWN = f"remote engine_id 3f2504e0-4f89-41d3-9a0c-0305e82c3301 not found from bootstrap server {BOOTSTRAP}"


def event_after(journey: Journey, name: str, actor: str, **facts: Any) -> Event:
    """One more event of a journey, as its last."""
    return Event(journey.events[-1].time + 1, name, actor, "MainThread", (str(journey.transfer_id),), "r", facts)


def parked(*more: tuple[str, str, dict[str, Any]]) -> Journey:
    """A recorded journey as far as D parked it, and then these events."""
    whole = recorded_journey(WHOLE)
    part = journey_of([event for event in whole.events if event.time <= whole.start + whole.step(9).time], whole)
    return journey_of([*part.events, *(event_after(part, name, actor, **facts) for name, actor, facts in more)], part)


class TestFailure:
    @pytest.mark.parametrize(
        ("error", "line"),
        [
            (
                RequestError(502, f"the proxy answered 502: prefill instance {P}: {LOST}", hop=f"prefill instance {P}"),
                f"502 from the prefill instance: {LOST}",
            ),
            (
                RequestError(500, f"the proxy answered 500: decode instance {D}: no", hop=f"decode instance {D}"),
                "500 from the decode instance: no",
            ),
            (
                # Below 500 the message is the engine's own, which does not name it.
                RequestError(400, "the proxy answered 400: too long:\nby 7", hop=f"prefill instance {P}"),
                "400 from the prefill instance: too long:",
            ),
            (
                RequestError(
                    503, f"the proxy answered 503: bootstrap {BOOTSTRAP} of prefill instance {P}: connection refused",
                    hop=f"bootstrap {BOOTSTRAP} of prefill instance {P}",
                ),
                "503 from the bootstrap server of the prefill instance: connection refused",
            ),
            (RequestError(400, f"the proxy answered 400: request: {REFUSED}"), f"400 for the request: {REFUSED}"),
            (PdlabError(f"the proxy answered 400: request: {REFUSED}"), f"400 for the request: {REFUSED}"),
            (RequestError(400, "the proxy answered 400: too long"), "400: too long"),
            (RequestError(500, "the decode instance answered 500: no"), "500 from the decode instance: no"),
            (RequestError(0, f"the proxy {P} does not answer (refused)"), "the proxy does not answer (refused)"),
            (RequestError(502, "P died", hop="nowhere"), "502 from nowhere: P died"),
            (OSError(f"no route to {P}/v1, 10.0.0.1:80, node-3:41001"), "no route to …, …, …"),
            (ValueError(), "ValueError"),
        ],
    )  # fmt: skip
    def test_names_the_hop_and_nothing_of_one_run(self, error: Exception, line: str) -> None:
        journey = recorded_journey(WHOLE)
        journey.answered(None, error)
        assert journey.failure == line
        assert f", failed: {line}>" in repr(journey)

    def test_is_the_same_from_a_file_where_the_words_name_the_hop(self) -> None:
        for words in (f"prefill instance {P}: {LOST}", f"request: {REFUSED}"):
            error = RequestError(502, f"the proxy answered 502: {words}", "ask", hop=words.partition(": ")[0])
            journey = Journey("pdlab-1", error=error)
            assert Journey.from_dict(journey.as_dict()).failure == journey.failure

    def test_is_short_however_long_a_refusal_is(self) -> None:
        journey = Journey("pdlab-1", error=RequestError(400, "no " * 1000, hop=f"decode instance {D}"))
        assert (
            str(journey.failure).startswith("400 from the decode instance: no no") and str(journey.failure)[-1] == "…"
        )
        assert len(str(journey.failure)) < 300

    def test_has_what_ds_worker_says(self) -> None:
        journey = parked(("pull.failed", "D worker", {"reason": UNKNOWN}))
        assert journey.failure is None
        journey.answered(None, RequestError(502, "no KV", hop=f"decode instance {D}"))
        says = "D's worker says: remote engine_id … not found from bootstrap server"
        assert journey.failure == f"502 from the decode instance: no KV; {says}"

    def test_has_it_once_where_the_proxy_has_said_it(self) -> None:
        journey = parked(("pull.failed", "D worker", {"reason": UNKNOWN}))
        says = f"D's worker says: {UNKNOWN}"
        journey.answered(None, RequestError(500, f"no KV; {says}", hop=f"decode instance {D}"))
        assert str(journey.failure).count("D's worker says") == 1

    @pytest.mark.parametrize(
        ("facts", "line"),
        [
            (HALF | {"role": "decode", "status": 500}, "500 from the decode instance"),
            (
                HALF | {"error": f"prefill instance {P}: status 502: {OURS}"},
                "502 from the prefill instance: connection refused",
            ),
            (HALF | {"error": f'prefill instance {P}: status 502: {{"mes'}, '502 from the prefill instance: {"mes'),
            (HALF | {"status": None, "error": "KeyError"}, "from the prefill instance: KeyError"),
        ],
    )  # fmt: skip
    def test_of_a_trace_is_the_half_that_failed_first(self, facts: dict[str, Any], line: str) -> None:
        closed = {"role": "decode", "unanswered": True}
        journey = parked(("half.failed", "proxy", facts), ("half.closed", "proxy", closed))
        assert journey.failure == line
        assert f"failed: {line}>" in repr(journey)

    def test_of_a_trace_is_that_d_was_not_waited_for(self) -> None:
        journey = parked(("half.closed", "proxy", {"role": "decode", "unanswered": True}))
        assert journey.failure == "ended before D had answered"

    def test_of_a_half_that_no_proxy_sent(self) -> None:
        failed = [("pull.failed", "D worker", {"reason": "no"}), ("load.failed", "D scheduler", {"policy": "fail"})]
        assert parked(*failed).failure == "D did not get the KV; D's worker says: no"
        assert parked(failed[0], ("load.failed", "D scheduler", {"policy": "recompute"})).failure is None

    def test_is_none_of_one_that_was_answered(self) -> None:
        assert [recorded_journey(index).failure for index in EVERY] == [None] * len(EVERY)
        assert saved("held").failure is None
        whole = recorded_journey(WHOLE)
        late = journey_of([*whole.events, event_after(whole, "half.failed", "proxy", **HALF)], whole)
        assert late.failure is None
        late.answered(ANSWER)
        assert late.failure is None and "failed" not in repr(late)


class TestSaved:
    @pytest.mark.parametrize("name", ["j.json", "j.json.gz"])
    @pytest.mark.parametrize("index", EVERY)
    def test_is_the_same_when_loaded(self, index: int, name: str, tmp_path: Path) -> None:
        journey = recorded_journey(index)
        assert journey.save(tmp_path / name) == tmp_path / name
        loaded = Journey.load(str(tmp_path / name))
        assert loaded.events == journey.events
        assert (loaded.request_id, loaded.transfer_id) == (journey.request_id, journey.transfer_id)
        assert (str(loaded), repr(loaded), loaded.outline()) == (str(journey), repr(journey), journey.outline())
        assert (loaded.seconds, loaded.writes, loaded.prefill) == (journey.seconds, journey.writes, journey.prefill)

    def test_with_what_the_client_got(self, tmp_path: Path) -> None:
        journey = saved("plain")
        assert (journey.finish_reason, len(journey.token_ids), journey.prompt_tokens) == ("length", 6, 143)
        again = Journey.load(journey.save(tmp_path / "again.json"))
        assert again.answer == journey.answer
        assert isinstance(again.token_ids, tuple)
        assert again.complete

    def test_with_its_error(self, tmp_path: Path) -> None:
        journey = Journey("pdlab-1")
        journey.answered(None, PdlabError("refused", "ask otherwise"))
        loaded = Journey.load(journey.save(tmp_path / "j.json"))
        assert str(loaded.error) == "refused\n  ask otherwise"
        assert repr(loaded) == repr(journey)
        assert loaded.done

    def test_while_it_is_under_way(self, tmp_path: Path) -> None:
        journey = saved("held")
        loaded = Journey.load(journey.save(tmp_path / "j.json"))
        assert loaded.held == "before_write"
        assert loaded.as_dict() == journey.as_dict()

    def test_says_where_it_comes_from(self, tmp_path: Path) -> None:
        journey = saved("plain")
        journey.about = {"when": "2026-11-30", "where": "a laptop", "with": {"vllm": "0.32.0"}}
        assert Journey.load(journey.save(tmp_path / "j.json.gz")).about == journey.about

    def test_twice_is_the_same_file(self, tmp_path: Path) -> None:
        journey = recorded_journey(WHOLE)
        files = [journey.save(tmp_path / name).read_bytes() for name in ("a.json.gz", "b.json.gz")]
        assert files[0] == files[1]
        assert gzip.decompress(files[0]) == journey.save(tmp_path / "c.json").read_bytes()

    def test_of_another_schema(self, tmp_path: Path) -> None:
        path = tmp_path / "j.json"
        path.write_text(json.dumps(recorded_journey(WHOLE).as_dict() | {"schema": 2}))
        with pytest.raises(PdlabError) as raised:
            Journey.load(path)
        assert raised.value.message == "this journey has trace schema 2; this pdlab reads 1"

    @pytest.mark.parametrize(
        "broken",
        [
            lambda raw: b"", lambda raw: raw[:-20], lambda raw: b"INFO not a journey\n", lambda raw: b"\xff\xfe",
            lambda raw: gzip.compress(raw)[:-40], lambda raw: gzip.compress(raw)[:10] + b"\xff" * 99,
            lambda raw: b"\x1f\x8b", lambda raw: gzip.compress(raw[:-20]), lambda raw: flipped(gzip.compress(raw)),
        ],
    )  # fmt: skip
    def test_but_broken(self, broken: Callable[[bytes], bytes], tmp_path: Path) -> None:
        path = tmp_path / "j.json.gz"
        path.write_bytes(broken(json.dumps(recorded_journey(WHOLE).as_dict()).encode()))
        with pytest.raises(PdlabError) as raised:
            Journey.load(path)
        assert raised.value.message.startswith(f"cannot read a journey from {path} (")
        assert "\n" not in raised.value.message

    @pytest.mark.parametrize("fields", [
        None, 1, "x", [], {}, {"schema": 1}, {"schema": 1, "events": []},
        {"about": None, "events": None}, {"events": [[1, 2]]}, {"events": [None]}, {"events": {"a": 1}},
        {"events": [["late", "x", "P worker", "t", [], None, {}], [0.0, "x", "P worker", "t", [], None, {}]]},
        {"answer": "yes"}, {"answer": {"text": "x"}}, {"answer": {"token_ids": None}}, {"answer": {"token_ids": [1]}},
    ])  # fmt: skip
    def test_that_is_none(self, fields: Any, tmp_path: Path) -> None:
        if isinstance(fields, dict) and fields and "schema" not in fields:
            fields = recorded_journey(WHOLE).as_dict() | fields
        path = tmp_path / "j.json"
        path.write_text(json.dumps(fields))
        with pytest.raises(PdlabError) as raised:
            Journey.load(path)
        assert raised.value.message.startswith("this is no journey (")
        assert "\n" not in raised.value.message

    def test_that_is_not_there(self, tmp_path: Path) -> None:
        for path in (tmp_path / "none.json", tmp_path):
            with pytest.raises(PdlabError, match="cannot read a journey from") as raised:
                Journey.load(path)
            assert "\n" not in raised.value.message


class TestTrace:
    def test_lists_journeys_as_they_began(self) -> None:
        trace = recorded_trace()
        assert [journey.start for journey in trace] == sorted(journey.start for journey in trace)
        assert len(trace) == 11
        assert trace[-1] is list(trace)[10]
        assert repr(trace) == "<Trace of 11 journeys>"
        assert all(journey.request_id.startswith("pdlab-") for journey in trace)

    def test_finds_one_by_its_transfer_id(self) -> None:
        trace = recorded_trace()
        assert [trace.of(str(journey.transfer_id)) for journey in trace] == list(trace)
        assert trace.of("xfer-none") is None

    def test_since_a_moment(self) -> None:
        # Read at another moment, the clock of the machine that recorded it lies a little otherwise.
        began = recorded_trace()[HELD].start - 0.01
        assert [journey.request_id for journey in read(TRACE, began)] == [j.request_id for j in recorded_trace()][HELD:]

    def test_keeps_what_is_of_no_request(self) -> None:
        names = [event.name for event in recorded_trace().startup]
        assert sorted(set(names)) == ["bootstrap.queried", "bootstrap.registered", "kv.registered"]
        assert names.count("kv.registered") == 2
        assert recorded_trace().probe_errors == {}

    def test_counts_what_probes_failed(self) -> None:
        def failed(actor: str, probe: str, count: int) -> Event:
            return Event(1.0, "probe.failed", actor, "MainThread", facts={"probe": probe, "count": count, "error": "E"})

        notes = [("P worker", "scheduled", 1), ("P worker", "scheduled", 10), ("D worker", "scheduled", 1),
                 ("D worker", "stage.set", 1), ("P worker", "scheduled", 1)]  # fmt: skip
        trace = Trace([], [failed(*note) for note in notes])
        assert trace.probe_errors == {"scheduled": 11, "stage.set": 1}
        assert repr(trace) == "<Trace of 0 journeys, 12 probe errors>"
        assert trace.startup == []

    def test_of_an_empty_folder(self, tmp_path: Path) -> None:
        assert len(read(tmp_path)) == 0
        assert len(read(tmp_path / "none")) == 0


class TestEvent:
    def test_survives_its_line(self) -> None:
        for event in recorded_journey(WHOLE).events:
            assert read_line(event.as_line()) == event
            assert "\n" not in event.as_line()

    @pytest.mark.parametrize("line", ["", "[", "{}", "[1]", '{"schema": 1}', "[1,2,3,4,5,6,7,8]"])
    def test_of_a_line_that_is_none(self, line: str) -> None:
        with pytest.raises((ValueError, TypeError)):
            read_line(line)


def flipped(raw: bytes) -> bytes:
    return raw[:200] + bytes([raw[200] ^ 0xFF]) + raw[201:]


def feeding(reader: Reader) -> Callable[[Journey], None]:
    """What feeds a journey from a reader, as a lab does."""

    def feed(journey: Journey) -> None:
        reader.poll()
        if transfer := reader.transfer_of.get(journey.request_id):
            journey.fill(reader.of_transfer[transfer], transfer)

    return feed


def test_it_waits_until_a_step_has_happened() -> None:
    journey = saved("held")
    assert journey.until(14) is journey
    with pytest.raises(PdlabError, match="step 15 has not happened"):
        journey.until(15, seconds=0.05)
