"""Starting the servers of a lab, starting again those of them that died, and ending them."""

import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path

from pdlab.errors import PdlabError, RequestError, StartError
from pdlab.lab import profile as profiles
from pdlab.lab import record as records
from pdlab.lab.command import Command, engine_command, instrumented
from pdlab.lab.compare import check_pair
from pdlab.lab.http import healthy
from pdlab.lab.instance import Instance
from pdlab.lab.ports import Ports
from pdlab.lab.process import Process, owner_of_lab, spawn
from pdlab.lab.proxy_server import ProxyServer, spawn_proxy
from pdlab.lab.record import SERVERS, Record
from pdlab.lab.settings import ROLES, Role, Settings
from pdlab.lab.startup import Report, wait_until_serving

LOOPBACK = "127.0.0.1"
PORTS = {"prefill": ("prefill", "bootstrap"), "decode": ("decode",), "proxy": ("proxy",)}  # of each server


def start(name: str, settings: Settings, tell: Report) -> Record:
    """Start all servers of a lab and return when they answer.

    Raises:
        StartError: one did not; nothing is left.
    """
    record = Record(settings, {}, {}, token=secrets.token_hex(16), owner=owner_of_lab())
    shutil.rmtree(trace_folder(name), ignore_errors=True)
    try:
        _bring_up(name, record, SERVERS, tell)
    except BaseException:  # Ctrl-C too: whatever was started goes
        stop(record)
        records.remove(name)
        raise
    return record


def restart(name: str, record: Record, servers: Iterable[str], tell: Report) -> None:
    """Start these servers of a lab again, at the ports they had; the others stay. The record is brought up to date.

    Raises:
        StartError: one did not start; of those started here nothing is left.
        PdlabError: another process has its port by now.
    """
    servers = [server for server in SERVERS if server in set(servers)]
    for server in servers:
        record.processes[server].stop()
    try:
        _bring_up(name, record, servers, tell)
    except BaseException:
        for server in servers:
            record.processes[server].stop()
        raise


def _bring_up(name: str, record: Record, servers: Iterable[str], tell: Report) -> None:
    ports = Ports(LOOPBACK)
    try:
        _take_ports(record, servers, ports)
        for server in servers:
            record.processes[server] = _spawn(name, record, server, ports)
        records.save(name, record)
    finally:
        ports.close()
    wait_until_serving({key: (record.processes[key], record.url(key)) for key in servers}, tell)
    _prove_ready(record, servers)
    record.ready = True
    records.save(name, record)
    for server in servers:
        record.processes[server].keep()


def _take_ports(record: Record, servers: Iterable[str], ports: Ports) -> None:
    try:
        for key in [key for server in servers for key in PORTS[server]]:
            record.ports[key] = ports.take(key, record.ports.get(key, 0))
    except PdlabError as error:
        raise PdlabError(error.message, "start the lab anew: lab.down(), then pdlab.up()") from None


def _spawn(name: str, record: Record, server: str, ports: Ports) -> Process:
    if server == "proxy":
        urls = {key: record.url(key) for key in ("prefill", "bootstrap", "decode")}
        folder, port, traced = records.folder(name), record.ports["proxy"], record.settings.trace
        return spawn_proxy(folder, ports, port, **urls, owner=record.owner, trace=traced)
    role: Role = "prefill" if server == "prefill" else "decode"
    return spawn_engine(records.folder(name), _command(record, role), role, record, ports)


def spawn_engine(folder: Path, command: Command, role: Role, record: Record, ports: Ports) -> Process:
    """Start an engine of this record's settings, token and owner; its log, and its events, go into `folder`."""
    settings = record.settings
    command = instrumented(command, role, folder, settings.trace, record.token)
    return spawn(
        role, command.full_argv(), folder=folder, env=command.full_env(), ports=ports,
        owner=record.owner, cores=profiles.cores_for(role) if settings.profile == "cpu" else (),
    )  # fmt: skip


def _command(record: Record, role: Role) -> Command:
    bootstrap = record.ports["bootstrap"] if role == "prefill" else None
    settings, port = record.settings, record.ports[role]
    extra = settings.prefill_args if role == "prefill" else settings.decode_args
    return engine_command(role, settings, host=LOOPBACK, port=port, bootstrap_port=bootstrap, extra=extra)


def instance(record: Record, role: Role) -> Instance:
    """An engine of a lab, as its record has it."""
    bootstrap = record.url("bootstrap") if role == "prefill" else None
    return Instance(role, record.url(role), bootstrap, _command(record, role), record.processes[role], record.token)


def proxy(record: Record) -> ProxyServer:
    """The proxy of a lab, as its record has it."""
    return ProxyServer(record.url("proxy"), record.processes["proxy"])


def trace_folder(name: str) -> Path:
    """Where the processes of a lab note what happens, if they do."""
    return records.folder(name) / "trace"


def broken(record: Record) -> list[str]:
    """Servers that do not run, and engines that are not healthy: an API server outlives its EngineCore by seconds."""
    dead = record.dead
    ill = [role for role in ROLES if role not in dead and not healthy(record.url(role), timeout=10)]
    return [server for server in SERVERS if server in (*dead, *ill)]


def _prove_ready(record: Record, servers: Iterable[str]) -> None:
    """Those of them that are engines answer a completion, the bootstrap names OUR P, and P and D are a pair."""
    prefill, decode = instance(record, "prefill"), instance(record, "decode")
    for each in (prefill, decode):
        if each.role in servers:
            _prove_answers(each)
    named = {entry["engine_id"] for entry in prefill.bootstrap_query().values()}
    if prefill.engine_id not in named:
        raise StartError(
            f"the bootstrap server {prefill.bootstrap} names {named}, not our prefill instance", "try again"
        )
    check_pair(prefill.facts, decode.facts)


def _prove_answers(engine: Instance) -> None:
    try:
        engine.complete("Hello", max_tokens=1)
    except RequestError as error:
        raise StartError(f"{engine.role} started, and does not answer: {error.message}", f"see {engine.log}") from None


def stop(record: Record) -> None:
    """End all servers of a lab; returns when they are gone."""
    for process in record.processes.values():
        process.tell_to_end()  # all of them first: each takes its seconds
    for process in record.processes.values():
        process.stop()
