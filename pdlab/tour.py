"""`python3 -m pdlab tour`: one request, taken from the proxy to the last token, told in the terminal.

Every number comes from the running engines: see pdlab.inside.probes.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pdlab.errors import PdlabError
from pdlab.lab.instance import Instance
from pdlab.lab.lab import Lab
from pdlab.trace.journey import Journey
from pdlab.trace.text import told

PROMPT = (
    "A server that answers questions with a language model does two kinds of work. First it reads the whole prompt at "
    "once and computes keys and values for every token of it, layer by layer. This is called prefill, and it keeps the "
    "arithmetic units busy. Then it writes the answer, one token after the other, and for each of them it reads all "
    "the keys and values again. This is called decode, and it keeps the memory busy. When the two are given to two "
    "instances, the keys and values have to travel. The prefill instance writes them straight into the memory of the "
    "decode instance, block by block, and the decode instance"
)


def tour(lab: Lab, prompt: str = PROMPT, max_tokens: int = 24) -> tuple[Journey, dict[str, Any]]:
    """Send `prompt` through the lab and then to D alone; return its journey, and what `tour --json` prints.

    Raises:
        PdlabError: the request failed, or the lab is not traced.
    """
    if lab.trace_folder is None:
        raise PdlabError("this lab is not traced", "end it (python3 -m pdlab down) and start the tour again")
    journey = lab.send(prompt, max_tokens, fresh=True)
    alone = lab.decode.complete(prompt, max_tokens)
    return journey, {
        **journey.summary(),
        "text": journey.text,
        "single_engine_text": alone.text,
        "equal": journey.token_ids == alone.token_ids,
        "prompt": prompt,
        "request_id": journey.request_id,
        "transfer_id": journey.transfer_id,
        "engine_id": lab.prefill.engine_id,
        "steps": [step.as_dict() for step in journey.steps],
        "missing": journey.missing,
        "seconds": journey.seconds,
        "versions": versions(lab),
    }


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


def render(journey: Journey, facts: dict[str, Any], lab: Lab) -> str:
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
    said.head("Its journey: time, step of the mechanism, who does it")
    said.lines += told(journey).splitlines()[1:]
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
