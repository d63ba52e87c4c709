"""`python3 -m pdlab serve prefill|decode`: one instance in the foreground, for a second GPU or another host."""

import ipaddress
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from pdlab.errors import PdlabError
from pdlab.lab.command import engine_command, instrumented
from pdlab.lab.instance import Instance
from pdlab.lab.ports import Ports
from pdlab.lab.process import Process, myself, spawn
from pdlab.lab.profile import cores_for
from pdlab.lab.settings import Role, Settings
from pdlab.lab.startup import failure
from pdlab.paths import state_dir

POLL = 0.1
HOST_HINT = "give the address by which the other instance's host reaches this one"


def serve(
    role: Role,
    settings: Settings,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    bootstrap_port: int = 0,
    extra: Sequence[str] = (),
    say: Callable[[str], None] = print,
) -> None:
    """Run one instance until it ends or Ctrl-C; shows its log, and how to join it once it answers.

    Args:
        host: the address by which the other instance reaches this one; loopback: only from this machine.
        port, bootstrap_port: 0: any free one. A decode instance has no bootstrap server.
        extra: further arguments of vLLM's own.

    Raises:
        StartError: the engine ended by itself; says its first real error.
        PdlabError: the address or a port cannot be had.
    """
    _check_host(host)
    if settings.gpus and settings.gpus[0] == settings.gpus[1]:
        settings = replace(settings, gpus=None)  # here it is not shared with the other instance
    ports = Ports(host)
    port = ports.take("the API server", port)
    bootstrap = ports.take("the bootstrap server", bootstrap_port) if role == "prefill" else None
    folder = state_dir() / "served" / f"{role}-{port}"
    command = engine_command(role, settings, host=host, port=port, bootstrap_port=bootstrap, extra=extra)
    command = instrumented(command, role, folder)
    say(str(command))
    cores = cores_for(role) if settings.profile == "cpu" else ()
    process = spawn(
        role, command.full_argv(), folder=folder, env=command.full_env(), ports=ports, owner=myself(), cores=cores
    )  # fmt: skip
    ports.close()
    bootstrap_url = f"http://{host}:{bootstrap}" if bootstrap else None
    instance = Instance(role, f"http://{host}:{port}", bootstrap_url, command, process)
    try:
        _follow(instance, process, say)
    except (KeyboardInterrupt, SystemExit):
        process.stop()  # first: at the end its nanny writes into the folder
        shutil.rmtree(folder, ignore_errors=True)  # kept after a failure, for its log
        raise
    finally:
        process.stop()


def _check_host(host: str) -> None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise PdlabError(f"--host {host} is not an IP address", HOST_HINT) from None
    if address.version == 6:
        raise PdlabError(f"--host {host} is an IPv6 address", "give an IPv4 address")
    if address.is_unspecified:
        raise PdlabError(f"--host {host} names no single address", HOST_HINT)


def _follow(instance: Instance, process: Process, say: Callable[[str], None]) -> None:
    ready = False
    with Path(process.log).open(errors="replace") as log:
        while process.alive:
            sys.stdout.write(log.read())
            sys.stdout.flush()
            if not ready and instance.healthy:
                ready = True
                say(_how_to_join(instance))
            time.sleep(POLL)
        sys.stdout.write(log.read())
    raise failure(f"the {instance.role} instance", process, "ended" if ready else "did not start")


def _how_to_join(instance: Instance) -> str:
    if instance.role == "decode":
        return f"\npdlab: the decode instance answers at {instance.url}\n"
    return (
        f"\npdlab: the prefill instance answers at {instance.url}, its bootstrap server at {instance.bootstrap}\n"
        f'  lab = pdlab.join(prefill="{instance.url}", bootstrap="{instance.bootstrap}", decode="http://…")\n'
    )
