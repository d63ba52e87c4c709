"""Joining instances that were started elsewhere: whose bootstrap server it is, and what is left of it. No engines."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdlab.errors import PdlabError, StartError
from pdlab.lab import join as joins
from pdlab.lab.instance import Instance
from pdlab.lab.join import join
from pdlab.lab.lab import Lab

PORT = 4711
AT = {"prefill": "http://p:1", "decode": "http://d:2", "bootstrap": "http://p:3"}
Spawned = list[SimpleNamespace]


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A pair that is running; every proxy gets the same port."""
    monkeypatch.setenv("PDLAB_STATE", str(tmp_path))
    monkeypatch.setattr(joins, "check_pair", lambda prefill, decode: None)
    monkeypatch.setattr(Instance, "facts", property(lambda _: {"workers": [{"engine_id": "of P"}]}))
    monkeypatch.setattr(Instance, "bootstrap_query", lambda _: {"0": {"engine_id": "of P"}})
    ports = SimpleNamespace(host="127.0.0.1", take=lambda name: PORT, fds=list, close=lambda: None)
    monkeypatch.setattr(joins, "Ports", lambda host: ports)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "labs" / f"joined-{PORT}"


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Spawned:
    """Proxies that were started: each writes a log, and an event."""
    proxies: Spawned = []

    def spawn_proxy(where: Path, *_: object, **__: object) -> SimpleNamespace:
        (where / "trace").mkdir(parents=True)
        (where / "proxy.log").touch()
        proxies.append(SimpleNamespace(stopped=False, log=str(where / "proxy.log")))
        proxies[-1].stop = lambda: setattr(proxies[-1], "stopped", True)
        return proxies[-1]

    monkeypatch.setattr(joins, "spawn_proxy", spawn_proxy)
    monkeypatch.setattr(joins, "wait_until_serving", lambda *_, **__: None)
    return proxies


def test_what_an_earlier_lab_at_this_port_left_is_none_of_it(spawned: Spawned, folder: Path) -> None:
    stale = folder / "trace" / "proxy.jsonl"
    stale.parent.mkdir(parents=True)
    stale.touch()
    lab = join(**AT)
    assert isinstance(lab, Lab) and lab.trace_folder == stale.parent
    assert spawned and not stale.exists()


def fails(error: BaseException) -> Callable[..., None]:
    def wait(*_: object, **__: object) -> None:
        raise error

    return wait


@pytest.mark.parametrize(
    ("error", "left"),
    [(KeyboardInterrupt(), False), (PdlabError("x"), False), (StartError("proxy did not start", "log: …"), True)],
)
def test_of_a_proxy_that_never_answered_its_log_is_left_if_it_is_named(
    error: BaseException, left: bool, spawned: Spawned, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joins, "wait_until_serving", fails(error))
    with pytest.raises(type(error)):
        join(**AT)
    assert spawned[0].stopped
    assert (folder / "proxy.log").exists() is folder.exists() is left


@pytest.mark.parametrize("named", [{"0": {}}, {"0": None}, {"a": "b"}, {"0": 3}, {"0": ["engine_id"]}])
def test_something_else_that_answers_at_the_bootstrap_address(named: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Instance, "bootstrap_query", lambda _: named)
    with pytest.raises(PdlabError) as raised:
        join(**AT)
    assert raised.value.message == "http://p:3 does not answer as a bootstrap server"
    assert raised.value.hint == joins.BOOTSTRAP_HINT


def test_the_bootstrap_server_of_another_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Instance, "bootstrap_query", lambda _: {"0": {"engine_id": "another"}})
    with pytest.raises(PdlabError, match=r"names \['another'\], not the instance http://p:1"):
        join(**AT)


def test_a_place_where_no_lab_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PDLAB_STATE", str(tmp_path / "file"))
    with pytest.raises(PdlabError, match="cannot make a folder for proxy") as raised:
        join(**AT)
    assert "PDLAB_STATE" in str(raised.value.hint)
