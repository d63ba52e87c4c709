"""`lab = pdlab.up()`: a prefill instance, a decode instance and the proxy, as one thing a notebook holds."""

import shutil
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdlab.errors import PdlabError
from pdlab.inside.holds import holds, release_all
from pdlab.lab import profile as profiles
from pdlab.lab import record as records
from pdlab.lab import start
from pdlab.lab.comparison import Comparison, compare
from pdlab.lab.heal import catch_up, heal
from pdlab.lab.healed import Healed
from pdlab.lab.hold import Hold, seconds_for
from pdlab.lab.instance import Instance
from pdlab.lab.journeys import Journeys
from pdlab.lab.processes import Processes, processes_of
from pdlab.lab.progress import progress
from pdlab.lab.proxy_server import ProxyServer
from pdlab.lab.record import Record
from pdlab.lab.settings import Settings
from pdlab.lab.startup import Report
from pdlab.lab.usage import Usage
from pdlab.trace.journey import Journey
from pdlab.trace.trace import Trace
from pdlab.trace.trace import read as read_trace

if TYPE_CHECKING:
    from pdlab.faults import Outcome


@dataclass
class Lab:
    """A running lab.

    Attributes:
        name: by which other processes find it.
        settings: what it was started with; None for instances that were joined.
        prefill, decode: its engines.
        proxy: the server that a client talks to.
        started: whether the `up()` that returned it started it, or attached to it.
        trace_folder: where its processes note what happens to each request; None: they note nothing.
    """

    name: str
    settings: Settings | None
    prefill: Instance
    decode: Instance
    proxy: ProxyServer
    started: bool = False
    trace_folder: Path | None = None

    def send(self, prompt: str | list[int], max_tokens: int = 16, fresh: bool = False, **body: Any) -> Journey:
        """Send one prompt through the proxy: prefilled on P, decoded on D. Greedy unless `body` says otherwise.

        Args:
            prompt: text, or token ids.
            fresh: keep both prefix caches out of it, by a `cache_salt` of its own: P computes all of the prompt, and
                all of it travels, however often it was sent before.
            body: further fields of `/v1/completions`; and request_id, the X-Request-Id.

        Returns:
            Its whole journey, with the answer.

        Raises:
            RequestError: the proxy or an instance refused or failed it; `error.journey` is how far it came.
        """
        return self._journeys.send(prompt, max_tokens, fresh, body)

    def submit(self, prompt: str | list[int], max_tokens: int = 16, fresh: bool = False, **body: Any) -> Journey:
        """Send one prompt as `send` does and return at once, with a journey that fills up; `wait()` is its end."""
        return self._journeys.submit(prompt, max_tokens, fresh, body)

    @cached_property
    def _journeys(self) -> Journeys:
        return Journeys(self.proxy.url, self.trace_folder)

    def trace(self, since: float = 0.0) -> Trace:
        """All journeys that the trace still has, whoever sent them; those that began at `since` or later.

        Args:
            since: seconds, as `time.monotonic()` gives them.
        """
        return read_trace(self._must_trace(), since)

    def hold(self, point: str, match: str = "*", seconds: float | None = None) -> Hold:
        """Hold matching requests at a point until the `with` block is left; everything else goes on.

        Args:
            point: before_prefill_send, before_decode_send (in the proxy), before_pull (in D's worker), before_ready,
                before_write or before_answer (in P's worker).
            match: a glob pattern for the request_id, or the transfer_id.
            seconds: after which the hold ends by itself. None: before an engine would give the request up.

        Raises:
            PdlabError: there is no such point, or the lab is not traced.
        """
        folder = self._must_trace()
        if self.settings is None:
            raise PdlabError("these instances were started elsewhere", "holds work in a lab that pdlab.up() started")
        return Hold(folder, point, match, seconds_for(point, seconds, self.settings.abort_timeout))

    def release(self) -> None:
        """End every hold of this lab, whoever holds it."""
        release_all(self._must_trace() / "gates")

    def held(self) -> dict[str, str]:
        """What is held now: the point, by transfer_id."""
        # A process that was killed does not say that it holds nobody any more: a hold that is gone holds nobody.
        standing = {hold.path.stem for hold in holds(self._must_trace() / "gates")}
        events = [(str(journey.transfer_id), event.facts) for journey in self.trace() for event in journey.holding]
        return {transfer: facts["point"] for transfer, facts in events if facts["hold"] in standing}

    def reset(self) -> None:
        """As new: nothing is held, nothing is under way, and both prefix caches are empty.

        Raises:
            PdlabError: a request goes on holding blocks longer than an engine would wait for it.
        """
        if self.trace_folder is not None:
            self.release()
        patience = (self.settings.abort_timeout if self.settings else 60) + 10
        deadline = time.monotonic() + patience
        for instance in self.engines:
            while not instance.reset_prefix_cache():
                if time.monotonic() > deadline:
                    raise PdlabError(
                        f"the {instance.role} instance still holds blocks after {patience} s",
                        "start it anew: lab.down(), then pdlab.up()",
                    )
                time.sleep(0.1)

    def heal(self, report: Report | None = None) -> Healed:
        """Bring the lab back: start again what died, let go what is held, wait for what still holds blocks, empty the
        prefix caches. Requests that are under way are left alone.

        Args:
            report: as of `up`.

        Raises:
            StartError: an engine did not start again.
            PdlabError: the lab is down, or its instances were started elsewhere.
        """
        return heal(self, report)

    def usage(self) -> dict[str, Usage]:
        """What each engine holds now: {"prefill": …, "decode": …}. PdlabError if one does not answer."""
        return {engine.role: engine.usage() for engine in self.engines}

    def fault(self, name: str) -> "Outcome":
        """Produce a fault on purpose, look at what becomes of it, and leave the lab healed.

        Args:
            name: one of `pdlab.faults.FAULTS`.

        Raises:
            PdlabError: there is no such fault, or the lab is not one that `up` started.
        """
        from pdlab.faults import produce

        return produce(self, name)

    def compare(self, journey: Journey) -> Comparison:
        """Compare every pulled block of every layer on both sides, by digest, while the request is held.

        The moment that counts is `before_answer`: all is written, and D has not overwritten the last slot yet.

        Raises:
            PdlabError: the request is not held, or nothing of it is planned yet.
        """
        return compare(journey, self.prefill, self.decode)

    def _must_trace(self) -> Path:
        if self.trace_folder is None:
            raise PdlabError("this lab is not traced", "start it with trace=True, which is the default")
        return self.trace_folder

    def status(self) -> dict[str, Any]:
        """What runs: up (all of it), and for each server its url, whether it is up, its pids and its log."""
        catch_up(self)
        states = {key: _status_of(server) for key, server in self._servers().items()}
        return {"name": self.name, "up": all(state["up"] for state in states.values()), "servers": states}

    def processes(self) -> Processes:
        """Every process of the lab that runs on this machine, with its pid, cores, memory and listening addresses."""
        return processes_of({key: server.process for key, server in self._servers().items()})

    @property
    def engines(self) -> tuple[Instance, Instance]:
        """P and D."""
        return self.prefill, self.decode

    def _servers(self) -> "dict[str, Instance | ProxyServer]":
        return {"prefill": self.prefill, "decode": self.decode, "proxy": self.proxy}

    def down(self) -> None:
        """End every process of the lab that pdlab started. Instances that were joined are left alone; so is a lab of
        the same name that was started since this one ended."""
        if self.settings is None:
            self.proxy.process.stop()
            shutil.rmtree(self.proxy.log.parent, ignore_errors=True)
        else:
            down(self.name, self.prefill.token)

    def __enter__(self) -> "Lab":
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def __repr__(self) -> str:
        return f"Lab {self.name!r}\n  {self.prefill!r}\n  {self.decode!r}\n  {self.proxy!r}"


def _status_of(server: Instance | ProxyServer) -> dict[str, Any]:
    process = server.process
    status: dict[str, Any] = {"url": server.url, "up": server.alive}
    if isinstance(server, Instance):
        status["up"] = server.alive and server.healthy
        status |= {"bootstrap": server.bootstrap} if server.bootstrap else {}
    if process is not None:
        status |= {"pids": process.pids(), "log": process.log}
        if not server.alive:
            status["ended"] = process.why_ended()
        elif not status["up"]:
            status["ended"] = "it is not healthy"
    return status


def up(
    model: str | None = None,
    profile: str | None = None,
    *,
    name: str = "default",
    report: Report | None = None,
    **choices: Any,
) -> Lab:
    """Attach to the running lab, or start one and return when it answers.

    Args:
        model: path of a checkpoint, or a hub name; None: SmolLM2-135M-Instruct.
        profile: "cpu" or "cuda"; None: what this machine has.
        name: labs of other names run beside each other.
        report: called with (server, stage, seconds) while waiting; None: shown where this runs.
        choices: further fields of `pdlab.lab.settings.Settings`: dtype, max_model_len, kv_cache_bytes …

    Raises:
        StartError: an engine did not start; nothing is left of it.
        MismatchError: the two engines are no pair (with a model folder that changed between their starts, say).
        PdlabError: the running lab has other settings than those asked for, its record cannot be read, or a setting is
            impossible.
    """
    asked = {key: value for key, value in {"model": model, "profile": profile, **choices}.items() if value is not None}
    wanted = _settings(asked)
    with records.locked(name), progress(report) as tell:
        found = records.load(name)
        broken = start.broken(found) if found is not None and found.ready else []
        if found is not None and found.ready and not broken:
            _must_agree(name, found.settings, wanted, set(asked))
            tell("lab", "attached to the running one", 0.0)
            return _lab(name, found)
        if broken:
            tell("lab", f"{', '.join(broken)} died: starting again", 0.0)
        if found is not None:
            start.stop(found)
        tell("lab", f"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT is {wanted.abort_timeout} s (upstream: 480)", 0.0)
        return _lab(name, start.start(name, wanted, tell), started=True)


def _settings(asked: dict[str, Any]) -> Settings:
    try:
        return profiles.settings(**asked)
    except TypeError as error:
        raise PdlabError(
            f"up() does not take this: {error}", "it takes model, profile and the fields of Settings"
        ) from None


def _must_agree(name: str, running: Settings, wanted: Settings, asked: set[str]) -> None:
    same = Settings.from_dict({**running.as_dict(), **{key: wanted.as_dict()[key] for key in asked}})
    if same != running:
        raise PdlabError(
            f"lab {name!r} is running with {running.differences(same)}",
            "end it first (lab.down() or: python3 -m pdlab down), or start another with name=…",
        )


def status_of(name: str = "default") -> dict[str, Any]:
    """`Lab.status` of the lab of that name; without servers if there is none."""
    found = records.load(name)
    if found is None or not found.ready:
        return {"name": name, "up": False, "servers": {}}
    return _lab(name, found).status()


def attach(name: str = "default") -> Lab:
    """The running lab of that name.

    Raises:
        PdlabError: there is none, or a server of it died.
    """
    found = records.load(name)
    if found is None or not found.ready:
        raise PdlabError(f"no lab {name!r} is running", "start it: python3 -m pdlab up")
    if broken := start.broken(found):
        raise PdlabError(f"lab {name!r} is broken: {', '.join(broken)} died", "bring it back: python3 -m pdlab up")
    return _lab(name, found)


def down(name: str = "default", token: str | None = None) -> bool:
    """End the lab of that name; False if there was none, or none with this token.

    Raises:
        PdlabError: its record cannot be read.
    """
    if not records.folder(name).exists():
        return False
    with records.locked(name):
        found = records.load(name)
        if found is None or token not in (None, found.token):
            return False
        start.stop(found)
        records.remove(name)
        return True


def _lab(name: str, record: Record, started: bool = False) -> Lab:
    traced = start.trace_folder(name) if record.settings.trace else None
    prefill, decode = start.instance(record, "prefill"), start.instance(record, "decode")
    return Lab(name, record.settings, prefill, decode, start.proxy(record), started, traced)
