"""One engine of a lab, as a notebook holds it: `lab.prefill` and `lab.decode`."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from pdlab.checks import whole, wholes
from pdlab.errors import PdlabError
from pdlab.lab.answer import complete
from pdlab.lab.command import Command
from pdlab.lab.http import client, healthy, why
from pdlab.lab.kv import KVBlock, read_block, read_digests
from pdlab.lab.process import Process
from pdlab.lab.settings import Role
from pdlab.lab.usage import Usage, usage_from
from pdlab.trace.answer import Answer

DIGESTS_AT_ONCE = 4096  # (layer, block) pairs that an engine answers in one call


@dataclass
class Instance:
    """A prefill or a decode instance that is running, here or on another host.

    Attributes:
        role: "prefill" (kv_producer) or "decode" (kv_consumer).
        url: of its OpenAI API server.
        bootstrap: of its bootstrap server; None on a decode instance, which has none.
        command: how it was started; None if it was started elsewhere.
        process: its supervised process; None if it was started elsewhere.
        token: with which its KV memory can be read; "": it cannot.
    """

    role: Role
    url: str
    bootstrap: str | None = None
    command: Command | None = None
    process: Process | None = None
    token: str = field(default="", repr=False)
    _facts: dict[str, Any] | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """What the running engine says of itself: model, dtype, layers, KV layout … (`GET /pdlab/instance`).

        Raises:
            PdlabError: it does not answer, or was started without pdlab's plugin.
        """
        if self._facts is None:
            self._facts = self._ask_facts()
        return self._facts

    def _ask_facts(self) -> dict[str, Any]:
        try:
            answer = client().get(f"{self.url}/pdlab/instance", timeout=60)
        except httpx.HTTPError as error:
            raise PdlabError(
                f"the {self.role} instance {self.url} does not answer ({why(error)})",
                "is it running, and reachable from here?",
            ) from None
        if answer.status_code != 200:
            raise PdlabError(
                f"{self.url} does not say what it runs, so prefill and decode cannot be compared",
                f"start it with: python3 -m pdlab serve {self.role}",
            )
        return dict(answer.json())

    @property
    def engine_id(self) -> str:
        """`kv_transfer_config.engine_id` as its first worker holds it."""
        return str(self.facts["workers"][0]["engine_id"])

    @property
    def registered_kv(self) -> dict[str, Any]:
        """The KV memory that its first worker registered: regions, base addresses, block lengths in bytes."""
        return dict(self.facts["workers"][0])

    @property
    def alive(self) -> bool:
        return self.process.alive if self.process else self.healthy

    @property
    def healthy(self) -> bool:
        return healthy(self.url)

    @property
    def log(self) -> Path | None:
        """The engine's log file."""
        return Path(self.process.log) if self.process else None

    def bootstrap_query(self) -> dict[str, Any]:
        """`GET /query` of its bootstrap server: {dp_rank: {engine_id, worker_addr: {tp_rank: {pp_rank: address}}}}.

        Raises:
            PdlabError: it has none, or it does not answer.
        """
        if self.bootstrap is None:
            raise PdlabError("only a prefill instance has a bootstrap server", "ask lab.prefill")
        try:
            return dict(client().get(f"{self.bootstrap}/query", timeout=5).raise_for_status().json())
        except (httpx.HTTPError, TypeError, ValueError) as error:
            raise PdlabError(
                f"the bootstrap server {self.bootstrap} does not answer ({why(error)})", "is the prefill instance up?"
            ) from None

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the engine's Prometheus samples of that name with these labels.

        Raises:
            PdlabError: it has none, or does not answer.
        """
        try:
            text = client().get(f"{self.url}/metrics", timeout=10).text
        except httpx.HTTPError as error:
            raise PdlabError(f"{self.url} does not tell its metrics ({why(error)})", "see lab.status()") from None
        rows = re.findall(rf"^{re.escape(str(name))}(\{{.*\}})? (\S+)$", text, re.MULTILINE)
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        values = [float(value) for found, value in rows if all(label in found for label in wanted)]
        if not values:
            raise PdlabError(f"{self.url} has no metric {name} {labels or ''}", f"see {self.url}/metrics")
        return sum(values)

    def usage(self) -> Usage:
        """What it holds now: blocks, requests, transfers (`GET /pdlab/usage`).

        Raises:
            PdlabError: it does not answer, or was started without pdlab's plugin.
        """
        try:
            answer = client().get(f"{self.url}/pdlab/usage", timeout=60).raise_for_status()
        except httpx.HTTPError as error:
            raise PdlabError(
                f"the {self.role} instance {self.url} does not say what it holds ({why(error)})", "see lab.status()"
            ) from None
        return usage_from(answer.json())

    def complete(self, prompt: str | list[int], max_tokens: int = 16, fresh: bool = True, **body: Any) -> Answer:
        """Have this engine alone answer a prompt, prefill and decode. Greedy unless `body` says otherwise.

        Args:
            fresh: compute the whole prompt here, whatever the prefix cache holds (by a `cache_salt` of its own): on a
                decode instance that cache also holds blocks that P computed.

        Raises:
            RequestError: it refused or failed.
        """
        return complete(self.url, prompt, max_tokens, body, who=f"the {self.role} instance", fresh=fresh)

    def kv(self, layer: int, block: int) -> KVBlock:
        """The bytes behind one block of one layer, read now from the memory that this engine registered.

        Args:
            layer: index of the region, in the order of `registered_kv`.
            block: its block id.

        Raises:
            PdlabError: there is no such layer or block, or the memory of this engine is not to be read.
        """
        return read_block(self.url, self.token, whole("layer", layer), whole("block", block), self.role)

    def kv_digests(self, blocks: list[int], layers: list[int] | None = None) -> list[list[str]]:
        """Digests of whole blocks, [layer][block]: of these layers, or of all. Raises as `kv`."""
        blocks, layers = wholes("blocks", blocks), None if layers is None else wholes("layers", layers)
        many = max(1, DIGESTS_AT_ONCE // len(layers or self.registered_kv["regions"]))
        parts = [read_digests(self.url, self.token, blocks[i : i + many], layers) for i in range(0, len(blocks), many)]
        return [[digest for part in rows for digest in part] for rows in zip(*parts, strict=True)]

    def reset_prefix_cache(self) -> bool:
        """Empty its prefix cache, of which a reader's experiment may have made what is not true.

        Returns:
            Whether it could: not while a request holds blocks.

        Raises:
            PdlabError: this engine was started elsewhere, or does not answer.
        """
        headers = {"Authorization": f"Bearer {self.token}"}
        try:
            answer = client().post(f"{self.url}/pdlab/prefix_cache/reset", headers=headers, timeout=60)
            return bool(answer.raise_for_status().json()["reset"])
        except httpx.HTTPError as error:
            raise PdlabError(
                f"{self.url} does not reset its prefix cache ({why(error)})", "it does in a lab that pdlab.up() started"
            ) from None

    def __repr__(self) -> str:
        state = "up" if self.alive else "down"
        return f"<{self.role} instance {self.url} {state}>"
