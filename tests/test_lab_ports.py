"""Free ports without races."""

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pdlab.errors import PdlabError
from pdlab.lab.ports import Ports

HOST = "127.0.0.1"


@pytest.fixture
def ports() -> Iterator[Ports]:
    ports = Ports(HOST)
    yield ports
    ports.close()


def test_two_never_pick_the_same(ports: Ports) -> None:
    others = [Ports(HOST) for _ in range(3)]
    taken = [held.take(str(number)) for number in range(100) for held in (ports, *others)]
    assert len(set(taken)) == len(taken)
    for other in others:
        other.close()


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("host", [HOST, "0.0.0.0"])
def test_the_kernel_gives_a_held_port_to_nobody(host: str, reuse: bool, ports: Ports) -> None:
    # Every second port of a narrow range (the kernel tries those of one parity first) is held; the rest is asked for.
    held = {ports.take(str(number)) for number in range(200)}
    given = []
    for _ in range(2000):
        asking = socket.socket()
        if reuse:
            asking.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        asking.bind((host, 0))
        given.append(asking)
    assert held.isdisjoint(asking.getsockname()[1] for asking in given)
    for asking in given:
        asking.close()


@pytest.mark.parametrize("host", [HOST, "0.0.0.0"])
def test_a_server_can_have_a_held_port(host: str, ports: Ports) -> None:
    port = ports.take("api")
    for _ in range(2):  # and again, when it is restarted
        with socket.create_server((host, port)), socket.create_connection((HOST, port), timeout=5):
            pass


def test_nobody_answers_on_a_port_that_is_only_held(ports: Ports) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, ports.take("api")), timeout=5)


def test_an_inherited_socket_holds_the_port_on(ports: Ports) -> None:
    port = ports.take("api")
    sleeper = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE, pass_fds=ports.fds()
    )
    try:
        ports.close()
        assert ports.fds() == []
        with socket.socket() as asking, pytest.raises(OSError, match="in use"):
            asking.bind((HOST, port))
    finally:
        sleeper.communicate(b"\n")
    with socket.socket() as asking:
        asking.bind((HOST, port))


class TestErrors:
    def test_a_taken_port(self, ports: Ports) -> None:
        with socket.create_server((HOST, 0)) as server:
            port = server.getsockname()[1]
            with pytest.raises(PdlabError) as raised:
                ports.take("the API server", port)
        assert raised.value.message == f"cannot take port {port} of {HOST} for the API server: Address already in use"
        assert raised.value.hint
        assert ports.sockets == {}
        assert ports.take("the API server", port) == port  # free again, and the number asked for

    def test_a_port_asked_for_twice(self, ports: Ports) -> None:
        port = ports.take("the API server")
        with pytest.raises(PdlabError, match=f"port {port} for the bootstrap server: it is asked for twice"):
            ports.take("the bootstrap server", port)

    @pytest.mark.parametrize("number", [-1, 65536])
    def test_no_port(self, number: int, ports: Ports) -> None:
        with pytest.raises(PdlabError, match="must be 0-65535"):
            ports.take("api", number)

    @pytest.mark.parametrize("host", ["203.0.113.7", "not-a-host.invalid"])
    def test_an_address_of_another_machine(self, host: str) -> None:
        with pytest.raises(PdlabError, match=f"cannot take any port of {host} for api") as raised:
            Ports(host).take("api")
        assert raised.value.hint == "give an address of this machine"
