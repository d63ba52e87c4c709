"""`lab = pdlab.up()`: a prefill instance, a decode instance and the proxy, as one thing a notebook holds."""

import secrets
import shutil
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pdlab.errors import PdlabError, StartError
from pdlab.inside.holds import release_all
from pdlab.lab import profile as profiles
from pdlab.lab import record as records
from pdlab.lab.command import Command, engine_command, instrumented
from pdlab.lab.compare import check_pair
from pdlab.lab.comparison import Comparison, compare
from pdlab.lab.hold import Hold, seconds_for
from pdlab.lab.http import healthy
from pdlab.lab.instance import Instance
from pdlab.lab.journeys import Journeys
from pdlab.lab.ports import Ports
from pdlab.lab.process import Process, owner_of_lab, spawn
from pdlab.lab.processes import Processes, processes_of
from pdlab.lab.progress import progress
from pdlab.lab.proxy_server import ProxyServer, spawn_proxy
from pdlab.lab.record import Record
from pdlab.lab.settings import ROLES, Role, Settings
from pdlab.lab.startup import Report, wait_until_serving
from pdlab.trace.journey import Journey
from pdlab.trace.trace import Trace
from pdlab.trace.trace import read as read_trace

LOOPBACK = "127.0.0.1"


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
        return {str(journey.transfer_id): journey.held for journey in self.trace() if journey.held}

    def reset(self) -> None:
        """As new: nothing is held, nothing is under way, and both prefix caches are empty.

        Raises:
            PdlabError: a request goes on holding blocks longer than an engine would wait for it.
        """
        if self.trace_folder is not None:
            self.release()
        patience = (self.settings.abort_timeout if self.settings else 60) + 10
        deadline = time.monotonic() + patience
        for instance in (self.prefill, self.decode):
            while not instance.reset_prefix_cache():
                if time.monotonic() > deadline:
                    raise PdlabError(
                        f"the {instance.role} instance still holds blocks after {patience} s",
                        "start it anew: lab.down(), then pdlab.up()",
                    )
                time.sleep(0.1)

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
        states = {key: _status_of(server) for key, server in self._servers().items()}
        return {"name": self.name, "up": all(state["up"] for state in states.values()), "servers": states}

    def processes(self) -> Processes:
        """Every process of the lab that runs on this machine, with its pid, cores, memory and listening addresses."""
        return processes_of({key: server.process for key, server in self._servers().items()})

    def _servers(self) -> "dict[str, Instance | ProxyServer]":
        return {"prefill": self.prefill, "decode": self.decode, "proxy": self.proxy}

    def down(self) -> None:
        """End every process of the lab that pdlab started. Instances that were joined are left alone."""
        if self.settings is None:
            self.proxy.process.stop()
            shutil.rmtree(self.proxy.log.parent, ignore_errors=True)
        else:
            down(self.name)

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
        PdlabError: the running lab has other settings than those asked for, or a setting is impossible.
    """
    asked = {key: value for key, value in {"model": model, "profile": profile, **choices}.items() if value is not None}
    wanted = _settings(asked)
    with records.locked(name), progress(report) as tell:
        found = records.load(name)
        broken = _broken(found) if found is not None and found.ready else []
        if found is not None and found.ready and not broken:
            _must_agree(name, found.settings, wanted, set(asked))
            tell("lab", "attached to the running one", 0.0)
            return _lab(name, found)
        if broken:
            tell("lab", f"{', '.join(broken)} died: starting again", 0.0)
        if found is not None:
            _stop(found)
        tell("lab", f"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT is {wanted.abort_timeout} s (upstream: 480)", 0.0)
        return _lab(name, _start(name, wanted, tell), started=True)


def _broken(record: Record) -> list[str]:
    """Servers that do not run, and engines that are not healthy: an API server outlives its EngineCore by seconds."""
    return record.dead or [role for role in ROLES if not healthy(record.url(role), timeout=10)]


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
    if broken := _broken(found):
        raise PdlabError(f"lab {name!r} is broken: {', '.join(broken)} died", "bring it back: python3 -m pdlab up")
    return _lab(name, found)


def down(name: str = "default") -> bool:
    """End the lab of that name; False if there was none."""
    if not records.folder(name).exists():
        return False
    with records.locked(name):
        found = records.load(name)
        if found is None:
            return False
        _stop(found)
        records.remove(name)
        return True


def _start(name: str, settings: Settings, tell: Report) -> Record:
    ports = Ports(LOOPBACK)
    taken = {key: ports.take(key) for key in ("prefill", "bootstrap", "decode", "proxy")}
    record = Record(settings, {}, taken, token=secrets.token_hex(16))
    shutil.rmtree(_trace_folder(name), ignore_errors=True)
    try:
        for role in ROLES:
            record.processes[role] = _spawn_engine(name, record, role, ports)
        record.processes["proxy"] = _spawn_proxy(name, record, ports)
        ports.close()
        records.save(name, record)
        wait_until_serving({key: (process, record.url(key)) for key, process in record.processes.items()}, tell)
        _prove_ready(_lab(name, record))
        record.ready = True
        records.save(name, record)
        for process in record.processes.values():
            process.keep()
    except BaseException:  # Ctrl-C too: whatever was started goes
        ports.close()
        _stop(record)
        records.remove(name)
        raise
    return record


def _spawn_engine(name: str, record: Record, role: Role, ports: Ports) -> Process:
    folder = records.folder(name)
    command = instrumented(_command(record, role), role, folder, record.settings.trace, record.token)
    return spawn(
        role, command.full_argv(), folder=folder, env=command.full_env(), ports=ports,
        owner=owner_of_lab(), cores=profiles.cores_for(role) if record.settings.profile == "cpu" else (),
    )  # fmt: skip


def _command(record: Record, role: Role) -> Command:
    bootstrap = record.ports["bootstrap"] if role == "prefill" else None
    settings, port = record.settings, record.ports[role]
    extra = settings.prefill_args if role == "prefill" else settings.decode_args
    return engine_command(role, settings, host=LOOPBACK, port=port, bootstrap_port=bootstrap, extra=extra)


def _spawn_proxy(name: str, record: Record, ports: Ports) -> Process:
    urls = {key: record.url(key) for key in ("prefill", "bootstrap", "decode")}
    traced = record.settings.trace
    return spawn_proxy(records.folder(name), ports, record.ports["proxy"], **urls, owner=owner_of_lab(), trace=traced)


def _trace_folder(name: str) -> Path:
    return records.folder(name) / "trace"


def _prove_ready(lab: Lab) -> None:
    """Both answer a completion, the bootstrap names OUR prefill instance, and the two are a pair."""
    for instance in (lab.prefill, lab.decode):
        instance.complete("Hello", max_tokens=1)
    named = {entry["engine_id"] for entry in lab.prefill.bootstrap_query().values()}
    if lab.prefill.engine_id not in named:
        raise StartError(
            f"the bootstrap server {lab.prefill.bootstrap} names {named}, not our prefill instance", "try again"
        )
    check_pair(lab.prefill.facts, lab.decode.facts)


def _stop(record: Record) -> None:
    for process in record.processes.values():
        process.tell_to_end()  # all of them first: each takes its seconds
    for process in record.processes.values():
        process.stop()


def _lab(name: str, record: Record, started: bool = False) -> Lab:
    def instance(role: Role) -> Instance:
        bootstrap = record.url("bootstrap") if role == "prefill" else None
        command, process = _command(record, role), record.processes[role]
        return Instance(role, record.url(role), bootstrap, command, process, record.token)

    proxy = ProxyServer(record.url("proxy"), record.processes["proxy"])
    traced = _trace_folder(name) if record.settings.trace else None
    return Lab(name, record.settings, instance("prefill"), instance("decode"), proxy, started, traced)
