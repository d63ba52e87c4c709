"""What the engines themselves reported about one request: their steps, the KV transfer, their connectors' log.

Nothing here is worked out from the prompt's length. Tokens computed come from each scheduler's account of its steps,
bytes, descriptors and seconds from the connector's transfer statistics, the number of blocks from its log, regions and
block length from the memory that the worker registered.
"""

import json
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdlab.errors import PdlabError
from pdlab.lab.instance import Instance
from pdlab.trace.answer import Answer
from pdlab.trace.journey import Journey

PATIENCE = 10.0


@dataclass
class Witness:
    """Reads what two engines write between its creation and `report`. Send one request in between, and only one."""

    prefill: Instance
    decode: Instance
    _marks: dict[Path, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for path in [_steps(self.prefill), _steps(self.decode), _log(self.prefill), _log(self.decode)]:
            self._marks[path] = path.stat().st_size if path.exists() else 0

    def report(self, answer: Answer | Journey) -> dict[str, Any]:
        """What happened to the request that `answer` answers.

        Returns:
            prompt_tokens, computed_on_prefill, computed_on_decode (tokens);
            transfer: regions, blocks, block_bytes, bytes, descriptors, seconds.

        Raises:
            PdlabError: the engines did not report it within 10 s, or other requests ran beside it.
        """
        deadline = time.monotonic() + PATIENCE
        while not (self._transfers() and self._finished(answer) and self._blocks(answer)):
            if time.monotonic() > deadline:
                raise PdlabError("the engines have not reported this request", "see their logs: pdlab status")
            time.sleep(0.05)
        transfers = self._transfers()
        self._must_be_alone(transfers)
        regions = self.prefill.registered_kv["regions"]
        return {
            "prompt_tokens": answer.prompt_tokens,
            "computed_on_prefill": self._computed(self.prefill),
            "computed_on_decode": self._computed(self.decode),
            "transfer": {
                "regions": len(regions),
                "blocks": self._blocks(answer),
                "block_bytes": regions[0]["block_len"],
                **transfers[0],
            },
        }

    def _must_be_alone(self, transfers: list[dict[str, Any]]) -> None:
        """Raise if the engines' reports are also of other requests: they do not tell whose a step was."""
        busy = [f"{len(transfers)} KV transfers"] if len(transfers) > 1 else []
        for instance in (self.prefill, self.decode):
            steps = self._step_lines(instance)
            finished = sum(len(step.get("finished", ())) for step in steps)
            together = max((step.get("prompt_requests", 0) for step in steps), default=0)
            if max(finished, together) > 1:
                busy.append(f"{max(finished, together)} requests on {instance.role}")
        if busy:
            raise PdlabError(f"{' and '.join(busy)} ran meanwhile", "send this request when nothing else runs")

    def log_lines(self, instance: Instance) -> list[str]:
        """What the engine's connector logged meanwhile."""
        return [line for line in self._new(_log(instance)).splitlines() if "[mooncake_connector.py:" in line]

    def _blocks(self, answer: Answer | Journey) -> int | None:
        """The number of blocks that P's connector says it sent for this request (of which it logs D's internal id)."""
        pattern = rf"Sending kv_caches for request \S*{re.escape(answer.request_id)}\S* \((\d+) blocks\)"
        sent = re.findall(pattern, self._new(_log(self.prefill)))
        return int(sent[-1]) if sent else None

    def _transfers(self) -> list[dict[str, Any]]:
        return [transfer for step in self._step_lines(self.prefill) for transfer in step.get("transfers", ())]

    def _finished(self, answer: Answer | Journey) -> bool:
        rows = [row for step in self._step_lines(self.decode) for row in step.get("finished", ())]
        return any(answer.request_id in row["request_id"] for row in rows)

    def _computed(self, instance: Instance) -> int:
        return sum(step.get("prompt_tokens_scheduled", 0) for step in self._step_lines(instance))

    def _step_lines(self, instance: Instance) -> list[dict[str, Any]]:
        lines = self._new(_steps(instance)).splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may be half written

    def _new(self, path: Path) -> str:
        if not path.exists():
            return ""
        with path.open("rb") as file:
            file.seek(self._marks[path])
            return file.read().decode(errors="replace")


def _steps(instance: Instance) -> Path:
    return _of_ours(instance, instance.steps_file)


def _log(instance: Instance) -> Path:
    return _of_ours(instance, instance.log)


def _of_ours(instance: Instance, path: Path | None) -> Path:
    if path is None:
        raise PdlabError(
            f"{instance.url} was started elsewhere: what it reports of its steps is on its own machine",
            "use a lab that pdlab.up() started here",
        )
    return path
