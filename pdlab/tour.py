"""`python3 -m pdlab tour`: one request, taken from the proxy to the last token, told in the terminal.

Every number comes from the running engines: see pdlab.lab.report.
"""

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pdlab.lab.instance import Instance
from pdlab.lab.lab import Lab

PROMPT = (
    "A server that answers questions with a language model does two kinds of work. First it reads the whole prompt at "
    "once and computes keys and values for every token of it, layer by layer. This is called prefill, and it keeps the "
    "arithmetic units busy. Then it writes the answer, one token after the other, and for each of them it reads all "
    "the keys and values again. This is called decode, and it keeps the memory busy. When the two are given to two "
    "instances, the keys and values have to travel. The prefill instance writes them straight into the memory of the "
    "decode instance, block by block, and the decode instance"
)


@dataclass(frozen=True)
class Stage:
    """Attributes:
    time: HH:MM:SS.mmm, by the engine's own clock.
    actor: "P" or "D".
    said: the connector's log, in our words, with its values.
    """

    time: str
    actor: str
    said: str


def tour(lab: Lab, prompt: str = PROMPT, max_tokens: int = 24) -> dict[str, Any]:
    """Send `prompt` through the lab and then to D alone; return what happened, as `tour --json` prints it.

    Raises:
        PdlabError: the request failed, or the engines' reports could not be read.
    """
    witness = lab.witness()
    answer = lab.send(prompt, max_tokens, fresh=True)
    report = witness.report(answer)
    stages = read_stages("P", witness.log_lines(lab.prefill)) + read_stages("D", witness.log_lines(lab.decode))
    alone = lab.decode.complete(prompt, max_tokens)
    return {
        **report,
        "text": answer.text,
        "single_engine_text": alone.text,
        "equal": answer.token_ids == alone.token_ids,
        "prompt": prompt,
        "request_id": answer.request_id,
        "transfer_id": answer.transfer_id,
        "engine_id": lab.prefill.engine_id,
        "stages": [vars(stage) for stage in sorted(stages, key=lambda stage: stage.time)],
        "versions": versions(lab),
    }


# What the connector logs (0.32.0), as patterns, and what it means.
TOLD = (
    (
        r"get_num_new_matched_tokens: num_computed_tokens=(\d+), .*'do_remote_prefill': True",
        "scheduler: {0} prompt tokens are in the local prefix cache; the others are to be loaded from P",
    ),
    (
        r"update_state_after_alloc: req_id=(\S+) num_external_tokens=([1-9]\d*)",
        "scheduler: allocated blocks for {1} external tokens; {0} is parked as WAITING_FOR_REMOTE_KVS",
    ),
    (
        r"update_state_after_alloc: req_id=(\S+) num_external_tokens=0, .*'do_remote_prefill': False, 'remote_engine",
        "scheduler: {0} is resumed: everything is here but the last prompt token, which is computed now",
    ),
    (
        r"update_state_after_alloc: req_id=(\S+) num_external_tokens=0, .*'do_remote_decode': True",
        "scheduler: {0} is scheduled; its KV will be sent, so its blocks will outlive it",
    ),
    (r"Size of encoded MooncakeXferMetadata: (\d+) bytes", "worker: packed the pull message: {0} bytes"),
    (r"Sending kv transfer request for \{'(\S+)'\} on path: (\S+)", "worker: asks P over ZMQ, at {1}"),
    (r"request_finished, req_id=(\S+), request_status=(\w+),", "scheduler: {0} ended: {1}"),
    (
        r"Sending kv_caches for request (\S+) \((\d+) blocks\) to (\S+)",
        "worker: writes {1} blocks into D's memory, at {2}",
    ),
    (r"Sending to (\S+) done, took (\d+\.\d{1,4})", "worker: the write returned after {1} s"),
    (r"get_finished: ([1-9]\d*) requests done sending", "worker: reports the send as finished; P's blocks are freed"),
    (r"pulling kv_caches for \['(\S+)'\] finished", "worker: P's answer is here: all of {0} is in memory"),
)


def read_stages(actor: str, lines: list[str]) -> list[Stage]:
    """What one engine's connector logged, line by line, in our words. Lines that say nothing new are left out."""
    return [stage for line in lines if (stage := _read_stage(actor, line))]


def _read_stage(actor: str, line: str) -> Stage | None:
    for pattern, words in TOLD:
        match = re.search(pattern, line)
        if match:
            return Stage(line.split()[2], actor, words.format(*match.groups()))
    return None


def versions(lab: Lab) -> dict[str, str]:
    """vLLM's version as the engines say it, and the distributions that are installed here."""
    names = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine-cuda13", "torch", "transformers", "pdlab")
    found = {"vllm": str(lab.decode.facts["vllm_version"])}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def render(facts: dict[str, Any], lab: Lab) -> str:
    """The tour as text for a terminal."""
    transfer, said = facts["transfer"], Teller()
    said.head("What runs")
    for instance in (lab.prefill, lab.decode):
        said.line(describe(instance))
    said.line(f"proxy      {lab.proxy.url}: sends each request to both, under one transfer_id")
    said.head("The request")
    said.line(f"prompt      …{facts['prompt'][-60:]!r}: {facts['prompt_tokens']} tokens")
    said.line(f"request_id  {facts['request_id']}: the same to both; each engine appends a suffix of its own")
    said.line(f"transfer_id {facts['transfer_id']}: what links the two halves")
    said.head("What the connectors of P and D logged")
    for stage in facts["stages"]:
        said.line(f"{stage['time']}  {stage['actor']}  {stage['said']}")
    said.head("What it came to")
    said.line(f"computed on P   {facts['computed_on_prefill']} prompt tokens")
    said.line(
        f"moved           {transfer['bytes']:,} bytes = {transfer['regions']} regions × {transfer['blocks']} blocks × "
        f"{transfer['block_bytes']:,} bytes"
    )
    said.line(f"                in {transfer['descriptors']} descriptors, {transfer['seconds'] * 1e3:.1f} ms")
    said.line(
        f"computed on D   {facts['computed_on_decode']} prompt token, the last: its logits give the answer's first"
    )
    said.line(f"answer          {facts['text']!r}")
    said.line(f"one engine      {facts['single_engine_text']!r}")
    said.line("                equal, token for token" if facts["equal"] else "                NOT EQUAL")
    return said.text()


def describe(instance: Instance) -> str:
    facts, layout = instance.facts, instance.registered_kv
    name = "prefill P" if instance.role == "prefill" else "decode  D"
    return (
        f"{name}  {instance.url}: {facts['kv_role']}, {facts['layers']} layers, {facts['dtype']}, "
        f"{layout['num_blocks']} KV blocks of {layout['block_size']} tokens, {len(layout['regions'])} regions"
    )


class Teller:
    """Lines of text under headings."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def head(self, words: str) -> None:
        self.lines += ["", words]

    def line(self, words: str) -> None:
        self.lines.append(f"  {words}")

    def text(self) -> str:
        return "\n".join(self.lines)
