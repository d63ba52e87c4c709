"""What a fault is made with: halves sent by hand, clients that leave, killed processes, engines that differ."""

import http.client
import json
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pdlab.claims.bench import FEW_BLOCKS, OTHER, PROMPT, TOKENS
from pdlab.errors import PdlabError, RequestError, must
from pdlab.lab.command import engine_command
from pdlab.lab.halves import Asked, Body, Got, ask, decode_params, new_transfer_id, prefill_half
from pdlab.lab.instance import Instance
from pdlab.lab.lab import Lab, up
from pdlab.lab.ports import Ports
from pdlab.lab.process import owner_of_lab
from pdlab.lab.record import Record
from pdlab.lab.start import LOOPBACK, spawn_engine
from pdlab.lab.startup import wait_until_serving
from pdlab.trace.journey import Journey

CAUSE = re.compile(r"\[core\.py:\d+\] (\w+(?:Error|Exception))\b")  # as EngineCore logs it
SOON = 3.0  # seconds in which a client has to know what can be known


def quietly(*_: object) -> None:
    """A report that shows nothing: a fault is shown by its outcome, live and recorded alike."""


class Hands:
    """Hands on one lab, which `pdlab.up` started.

    Attributes:
        timeout: VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT of its engines, seconds.
    """

    def __init__(self, lab: Lab) -> None:
        if lab.settings is None:
            raise PdlabError("these instances were started elsewhere", "faults are for a lab that pdlab.up() started")
        self.lab, self.settings, self.timeout = lab, lab.settings, lab.settings.abort_timeout

    @property
    def p(self) -> Instance:
        return self.lab.prefill

    @property
    def d(self) -> Instance:
        return self.lab.decode

    @cached_property
    def right(self) -> tuple[int, ...]:
        """The right answer to PROMPT."""
        return self.d.complete(PROMPT, TOKENS).token_ids

    @cached_property
    def right_of_other(self) -> tuple[int, ...]:
        """The right answer to OTHER."""
        return self.d.complete(OTHER, TOKENS).token_ids

    # Asking -------------------------------------------------------------------------------------------------------

    def halves(self, body: Body, patience: float | None = None, **of_d: Any) -> tuple[Got, Got]:
        """Send both halves of `body` to the engines, as the proxy of vLLM's examples does.

        Args:
            patience: seconds after which D's client leaves. None: long enough for P's timeout.
            of_d: kv_transfer_params of D's half that are to be others.

        Returns:
            What P's half and what D's half got.
        """
        transfer = new_transfer_id()
        p = Asked(self.p.url, prefill_half(body, transfer))
        d = ask(self.d.url, self.decode_half(body, transfer, **of_d), self.longer(10) if patience is None else patience)
        return p.result(), d

    def decode_half(self, body: Body, transfer: str, **changed: Any) -> Body:
        """D's half; a parameter that is changed to None is left out."""
        params = decode_params(self.lab, transfer) | changed
        return {**body, "kv_transfer_params": {key: value for key, value in params.items() if value is not None}}

    def send(self, prompt: list[int] | None = None, tokens: int = TOKENS, **fields: Any) -> tuple[Got, Journey]:
        """Send one request through the proxy and wait for what the client gets."""
        return self.ended(self.lab.submit(prompt or PROMPT, tokens, fresh=True, **fields), time.monotonic())

    def ended(self, journey: Journey, since: float) -> tuple[Got, Journey]:
        """What the client got, `since` some moment, of a journey that was submitted."""
        while not journey.done:
            time.sleep(0.005)
        seconds, error = time.monotonic() - since, journey.error
        if isinstance(error, RequestError):
            return Got(error.status, seconds, reason=error.message, hop=error.hop), journey
        answer = journey.answer  # raises any other error
        return Got(200, seconds, answer.text, answer.token_ids, finish_reason=answer.finish_reason), journey

    def must_serve(self, **fields: Any) -> tuple[Got, Journey]:
        """PROMPT through the proxy has the right answer; Refuted if not."""
        got, journey = self.send(**fields)
        must(got.status == 200 and got.token_ids == self.right, f"through the proxy: {got}")
        return got, journey

    def longer(self, seconds: float) -> float:
        """So many seconds more than P waits."""
        return self.timeout + seconds

    # Looking ------------------------------------------------------------------------------------------------------

    def until_free(self, *engines: Instance, patience: float = 10) -> float:
        """Seconds until no request holds a block of these engines; Refuted if that takes longer."""
        began = time.monotonic()
        while used := [engine.usage() for engine in engines if engine.usage().used_blocks]:
            must(time.monotonic() - began < patience, f"after {patience:g} s there are still {used}")
            time.sleep(0.05)
        return time.monotonic() - began

    def until(self, condition: Any, what: str, patience: float = 10) -> None:
        """Return once `condition()` holds; Refuted if it does not in `patience` seconds."""
        deadline = time.monotonic() + patience
        while not condition():
            must(time.monotonic() < deadline, f"not in {patience:g} s: {what}")
            time.sleep(0.02)

    # Breaking -----------------------------------------------------------------------------------------------------

    def kill(self, engine: Instance) -> float:
        """SIGKILL to the engine's API server and all beneath it; when that was, by the monotonic clock."""
        assert engine.process is not None, "of a lab that pdlab.up() started"
        engine.process.kill()
        return time.monotonic()

    def until_gone(self, engine: Instance) -> None:
        """Return once the nanny of an engine that was killed has ended too."""
        self.until(lambda: not engine.alive, f"the {engine.role} instance's nanny ends", 30)

    def until_dead(self, engine: Instance) -> str:
        """Return once the engine has ended by itself: the exception that EngineCore died of. Refuted if it does not."""
        self.until(lambda: not engine.alive or not engine.healthy, f"the {engine.role} instance ends", 20)
        log = engine.log.read_text(errors="replace") if engine.log else ""
        return (CAUSE.findall(log) or ["nothing that its log tells"])[-1]

    @contextmanager
    def others(self, *arguments: list[str]) -> Iterator[list[Instance]]:
        """Further decode instances, of the lab's settings but for these arguments of vLLM's own for each."""
        folder, ports = Path(tempfile.mkdtemp(prefix="pdlab-others-", dir="/tmp")), Ports(LOOPBACK)
        made: list[Instance] = []
        try:
            for number, words in enumerate(arguments):
                made.append(self._other(folder / str(number), ports, words))
            wait_until_serving({f"decode {n}": (d.process, d.url) for n, d in enumerate(made) if d.process}, quietly)
            yield made
            shutil.rmtree(folder)  # an error may name a log that lies there
        finally:
            ports.close()
            for each in made:
                if each.process:
                    each.process.stop()

    def _other(self, folder: Path, ports: Ports, words: list[str]) -> Instance:
        record = Record(replace(self.settings, trace=False), {}, {}, token=self.d.token, owner=owner_of_lab())
        port = ports.take(folder.name)
        command = engine_command("decode", record.settings, host=LOOPBACK, port=port, bootstrap_port=None, extra=words)
        process = spawn_engine(folder, command, "decode", record, ports)
        return Instance("decode", f"http://{LOOPBACK}:{port}", None, command, process)

    @contextmanager
    def small(self) -> Iterator[Lab]:
        """A lab whose engines have 24 blocks each and prefill in chunks of 64 tokens; one that runs is left running."""
        few: dict[str, Any] = {"prefill_args": FEW_BLOCKS, "decode_args": FEW_BLOCKS, "max_model_len": 704}
        kept = ("model", "profile", "dtype", "block_size", "protocol", "gpus")
        like = {name: getattr(self.settings, name) for name in kept}
        lab = up(name=f"{self.lab.name}-small", abort_timeout=self.timeout, report=quietly, **like, **few)
        try:
            yield lab
        finally:
            if lab.started:
                lab.down()


class Client:
    """A client of one completion that can leave, or read its stream chunk by chunk."""

    def __init__(self, url: str, body: Body) -> None:
        parts = urlsplit(url)
        self.connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=120)
        headers = {"Content-Type": "application/json"}
        self.connection.request("POST", "/v1/completions", json.dumps(body), headers)

    def chunks(self) -> Iterator[dict[str, Any]]:
        """The events of its stream, as they come."""
        for line in self.connection.getresponse():
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])

    def leave(self) -> None:
        self.connection.close()
