"""What the engines reported about a request, and how the tour tells it: recorded logs and step files of real engines.

Two requests of the same 77 tokens: the first found nothing cached, the second 64 tokens on either side.
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from pdlab import tour
from pdlab.errors import PdlabError
from pdlab.lab import report
from pdlab.lab.answer import Answer
from pdlab.lab.instance import Instance
from pdlab.lab.process import Process
from pdlab.lab.report import Witness
from pdlab.tour import TOLD, read_stages
from tests.helpers import RECORDED, recorded

FIRST, ALONE, AGAIN = "pdlab-06e790eb68d4", "pdlab-d3aebb747963", "pdlab-a2cc318ff976"
# Of each request: between which times of the logs, and which of the step files, the engines reported it.
SPANS = {
    FIRST: (("23:10:14.500", "23:10:16.100"), (1931.0, 1932.5)),
    ALONE: (("23:10:16.100", "23:10:17.300"), (1932.5, 1934.0)),
    AGAIN: (("23:10:17.500", "23:10:18.700"), (1934.0, 1935.0)),
}
REGIONS = [{"layer": f"model.layers.{n}.self_attn.attn", "block_len": 49152} for n in range(30)]


def log_of(role: str, request: str) -> str:
    start, end = SPANS[request][0]
    lines = recorded(role).splitlines(keepends=True)
    return "".join(line for line in lines if "[mooncake" in line and start <= line.split()[2] < end)


def steps_of(role: str, request: str) -> str:
    start, end = SPANS[request][1]
    lines = (RECORDED / f"{role}.steps.jsonl").read_text().splitlines(keepends=True)
    return "".join(line for line in lines if start <= json.loads(line)["t"] < end)


def answer(request: str) -> Answer:
    return Answer("text", (1, 2), prompt_tokens=77, finish_reason="length", request_id=request, transfer_id="xfer-1")


class Engines:
    """Two engines that write what was recorded."""

    def __init__(self, folder: Path):
        self.folder = folder
        facts = {"workers": [{"engine_id": "e", "regions": REGIONS}]}
        self.prefill, self.decode = (
            Instance(role, "http://x", process=self.process(role), folder=folder, _facts=facts)  # type: ignore[arg-type]
            for role in ("prefill", "decode")
        )

    def process(self, role: str) -> Process:
        return Process(role, 0, -1, str(self.folder / f"{role}.log"), "", "")

    def write(self, request: str, *, steps: bool = True, logs: bool = True) -> None:
        for role in ("prefill", "decode"):
            self.append(f"{role}.log", log_of(role, request) if logs else "")
            self.append(f"{role}.steps.jsonl", steps_of(role, request) if steps else "")

    def append(self, name: str, text: str) -> None:
        with (self.folder / name).open("a") as file:
            file.write(text)


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engines:
    monkeypatch.setattr(report, "PATIENCE", 0.1)
    return Engines(tmp_path)


class TestWitness:
    def test_reports_what_the_engines_wrote(self, engines: Engines) -> None:
        witness = Witness(engines.prefill, engines.decode)
        engines.write(FIRST)
        assert witness.report(answer(FIRST)) == {
            "prompt_tokens": 77,
            "computed_on_prefill": 77,
            "computed_on_decode": 1,
            "transfer": {
                "regions": 30, "blocks": 3, "block_bytes": 49152, "bytes": 4423680, "descriptors": 30,
                "seconds": 0.03361410900015471,
            },
        }  # fmt: skip

    def test_leaves_out_what_was_there_before(self, engines: Engines) -> None:
        engines.write(FIRST)
        engines.write(ALONE)
        witness = Witness(engines.prefill, engines.decode)
        engines.write(AGAIN)
        found = witness.report(answer(AGAIN))
        assert (found["computed_on_prefill"], found["computed_on_decode"]) == (13, 1)
        assert (found["transfer"]["blocks"], found["transfer"]["bytes"]) == (1, 1474560)
        lines = witness.log_lines(engines.decode)
        assert lines == log_of("decode", AGAIN).splitlines()
        assert FIRST not in "".join(lines)

    def test_log_lines_are_the_connector_s(self, engines: Engines) -> None:
        witness = Witness(engines.prefill, engines.decode)
        engines.append("prefill.log", "INFO 11-29 23:10:14.000 [core.py:1] something else\n")
        engines.write(FIRST)
        assert witness.log_lines(engines.prefill) == log_of("prefill", FIRST).splitlines()

    @pytest.mark.parametrize("what", [{"steps": False}, {"logs": False}])
    def test_waits_for_steps_and_logs(self, what: dict[str, bool], engines: Engines) -> None:
        witness = Witness(engines.prefill, engines.decode)
        engines.write(FIRST, **what)
        with pytest.raises(PdlabError, match="have not reported this request"):
            witness.report(answer(FIRST))

    def test_waits_until_d_has_finished(self, engines: Engines) -> None:
        witness = Witness(engines.prefill, engines.decode)
        engines.write(FIRST)
        steps = engines.folder / "decode.steps.jsonl"
        steps.write_text(steps.read_text().splitlines(keepends=True)[0])
        with pytest.raises(PdlabError, match="have not reported this request"):
            witness.report(answer(FIRST))

    def test_of_another_request_it_says_nothing(self, engines: Engines) -> None:
        witness = Witness(engines.prefill, engines.decode)
        engines.write(FIRST)
        with pytest.raises(PdlabError, match="have not reported this request"):
            witness.report(answer(AGAIN))

    def test_two_transfers_are_not_added_up(self, engines: Engines) -> None:
        witness = Witness(engines.prefill, engines.decode)
        engines.write(FIRST)
        engines.write(AGAIN)
        both = "2 KV transfers and 2 requests on prefill and 2 requests on decode ran meanwhile"
        with pytest.raises(PdlabError, match=both):
            witness.report(answer(AGAIN))

    def test_a_line_that_is_half_written_is_left_for_later(self, engines: Engines) -> None:
        witness = Witness(engines.prefill, engines.decode)
        engines.write(FIRST)
        engines.append("decode.steps.jsonl", '{"t": 1, "prompt_tok')
        assert witness.report(answer(FIRST))["computed_on_decode"] == 1

    def test_bytes_that_are_no_text_do_not_stop_it(self, engines: Engines) -> None:
        witness = Witness(engines.prefill, engines.decode)
        (engines.folder / "prefill.log").write_bytes(b"\xff\xfe\n")
        engines.write(FIRST)
        assert witness.report(answer(FIRST))["transfer"]["blocks"] == 3

    def test_instances_of_elsewhere_have_no_files_here(self, engines: Engines) -> None:
        for pair in (
            (engines.prefill, Instance("decode", "http://elsewhere")),
            (Instance("prefill", "http://elsewhere"), engines.decode),
        ):
            with pytest.raises(PdlabError, match="http://elsewhere was started elsewhere"):
                Witness(*pair)


class TestStages:
    def test_what_p_logged(self) -> None:
        mine, theirs = "cmpl-pdlab-06e790eb68d4-0-b028a63e", "127.0.0.1:15899"
        stages = read_stages("P", log_of("prefill", FIRST).splitlines())
        assert [(stage.time, stage.said) for stage in stages] == [
            ("23:10:14.757", f"scheduler: {mine} is scheduled; its KV will be sent, so its blocks will outlive it"),
            ("23:10:15.011", f"scheduler: {mine} ended: FINISHED_LENGTH_CAPPED"),
            ("23:10:15.019", f"worker: writes 3 blocks into D's memory, at {theirs}"),
            ("23:10:15.053", "worker: the write returned after 0.0336 s"),
            ("23:10:15.053", "worker: reports the send as finished; P's blocks are freed"),
        ]
        assert {stage.actor for stage in stages} == {"P"}

    def test_what_d_logged(self) -> None:
        mine = "cmpl-pdlab-06e790eb68d4-0-9f4308cf"
        stages = read_stages("D", log_of("decode", FIRST).splitlines())
        assert [stage.said for stage in stages] == [
            "scheduler: 0 prompt tokens are in the local prefix cache; the others are to be loaded from P",
            f"scheduler: allocated blocks for 77 external tokens; {mine} is parked as WAITING_FOR_REMOTE_KVS",
            "worker: packed the pull message: 1884 bytes",
            "worker: asks P over ZMQ, at tcp://127.0.0.1:40057",
            f"worker: P's answer is here: all of {mine} is in memory",
            f"scheduler: {mine} is resumed: everything is here but the last prompt token, which is computed now",
            f"scheduler: {mine} ended: FINISHED_LENGTH_CAPPED",
        ]
        assert [stage.time for stage in stages] == sorted(stage.time for stage in stages)

    def test_a_cached_beginning_is_not_asked_for(self) -> None:
        said = [stage.said for stage in read_stages("D", log_of("decode", AGAIN).splitlines())]
        assert said[0].startswith("scheduler: 64 prompt tokens are in the local prefix cache")
        assert "13 external tokens" in said[1]

    def test_of_a_request_to_one_engine_only_its_end(self) -> None:
        (stage,) = read_stages("D", log_of("decode", ALONE).splitlines())
        assert stage.said == f"scheduler: cmpl-{ALONE}-0-8dd4edb6 ended: FINISHED_LENGTH_CAPPED"

    def test_every_pattern_is_met(self) -> None:
        lines = [line for role in ("prefill", "decode") for line in log_of(role, FIRST).splitlines()]
        for pattern, words in TOLD:
            assert any(told(line) == (pattern, words) for line in lines), pattern

    def test_other_lines_say_nothing(self) -> None:
        assert read_stages("P", ["", "INFO:     Application startup complete.", "DEBUG 11-29 23:10 [x.py:1] y"]) == []


class TestTour:
    FACTS = {  # noqa: RUF012
        "kv_role": "kv_producer", "layers": 30, "dtype": "float32", "vllm_version": "0.32.0",
        "workers": [{"engine_id": "e", "regions": REGIONS, "num_blocks": 364, "block_size": 32}],
    }  # fmt: skip

    def lab(self, engines: Engines, alone: Answer) -> Any:
        """What `tour` takes of a lab; sending has the engines write what was recorded."""

        class Decode(Instance):
            def complete(self, *_: Any, **__: Any) -> Answer:
                engines.write(ALONE)
                return alone

        prefill = dataclasses.replace(engines.prefill, _facts=self.FACTS)
        decode = Decode(**{**vars(engines.decode), "_facts": self.FACTS})

        class Lab:
            def __init__(self) -> None:
                self.prefill, self.decode, self.proxy = prefill, decode, Instance("decode", "http://proxy")

            def witness(self) -> Witness:
                return Witness(prefill, decode)

            def send(self, *_: Any, fresh: bool) -> Answer:
                assert fresh  # else a second tour would tell of a prompt that is cached
                engines.write(FIRST)
                return answer(FIRST)

        return Lab()

    def test_gathers_it_all(self, engines: Engines) -> None:
        lab = self.lab(engines, dataclasses.replace(answer(ALONE), text="alone", transfer_id=None))
        facts = tour.tour(lab, "A prompt", 2)
        assert json.loads(json.dumps(facts)) == facts
        assert facts["equal"]
        assert (facts["text"], facts["single_engine_text"]) == ("text", "alone")
        assert (facts["prompt"], facts["request_id"], facts["transfer_id"]) == ("A prompt", FIRST, "xfer-1")
        assert facts["transfer"]["bytes"] == 4423680
        stages = facts["stages"]
        assert len(stages) == 12
        assert [stage["time"] for stage in stages] == sorted(stage["time"] for stage in stages)
        assert {stage["actor"] for stage in stages} == {"P", "D"}
        assert facts["versions"]["vllm"] == "0.32.0"
        text = tour.render(facts, lab)
        assert "4,423,680 bytes = 30 regions × 3 blocks × 49,152 bytes" in text
        assert "computed on P   77 prompt tokens" in text
        assert "equal, token for token" in text

    def test_says_when_the_answers_differ(self, engines: Engines) -> None:
        lab = self.lab(engines, dataclasses.replace(answer(ALONE), token_ids=(1, 3)))
        facts = tour.tour(lab, "A prompt", 2)
        assert not facts["equal"]
        assert "NOT EQUAL" in tour.render(facts, lab)


def told(line: str) -> tuple[str, str] | None:
    """The pattern that `read_stages` takes a line for."""
    return next(((pattern, words) for pattern, words in TOLD if re.search(pattern, line)), None)
