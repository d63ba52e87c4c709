"""The record of a lab, and what `up`, `attach`, `status_of` and `down` make of it. No engines: servers that sleep."""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import pdlab
from pdlab.errors import PdlabError, RequestError
from pdlab.lab import instance as instances
from pdlab.lab import profile as profiles
from pdlab.lab import record as records
from pdlab.lab import start as starts
from pdlab.lab.healed import Healed
from pdlab.lab.lab import attach, down, status_of, up
from pdlab.lab.process import Process, spawn
from pdlab.lab.record import SERVERS, Record
from pdlab.lab.settings import Settings
from pdlab.lab.usage import Usage
from tests.helpers import Zoo, gone, wait_until

SLEEP = [sys.executable, "-I", "-S", "-c", "print('here', flush=True); import time; time.sleep(600)"]
PORTS = {"prefill": 1, "bootstrap": 2, "decode": 3, "proxy": 4}
NOT_READABLE = (
    "", "{", "null", "[]", "1", '{"format": 1}', '{"format": 2}', '{"processes": {}}',
    '{"format": 1, "settings": {}, "processes": {}, "ports": {}, "ready": true}',
    '{"format": 1, "settings": null, "processes": {"proxy": {"pid": 1}}, "ports": {}, "ready": true}',
)  # fmt: skip


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder of the test's own, on a machine without GPU where no profile is asked for."""
    monkeypatch.setenv("PDLAB_STATE", str(tmp_path / "state"))
    monkeypatch.delenv("PDLAB_PROFILE", raising=False)
    monkeypatch.setattr(profiles, "visible_gpus", list)
    monkeypatch.setattr(profiles, "profile_of", lambda: None)
    monkeypatch.setattr(starts, "healthy", lambda url, timeout=2: True)  # the servers here only sleep
    monkeypatch.setattr(instances, "healthy", lambda url, timeout=2: True)
    return tmp_path / "state"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").touch()
    return profiles.settings(str(model))


@pytest.fixture
def lab(settings: Settings) -> Iterator[Callable[..., Record]]:
    """`lab(NAME)` makes a lab of servers that sleep, with its record."""
    made: list[Record] = []

    def make(name: str = "default", servers: tuple[str, ...] = SERVERS, ready: bool = True) -> Record:
        folder = records.folder(name)
        processes = {server: spawn(server, SLEEP, folder=folder, env=dict(os.environ)) for server in servers}
        made.append(Record(settings, processes, PORTS, ready))
        records.save(name, made[-1])
        wait_until(lambda: all(Path(process.log).read_text() for process in processes.values()))
        return made[-1]

    yield make
    for record in made:
        for process in record.processes.values():
            process.stop()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of labs that `up` would have started."""
    names: list[str] = []

    def start(name: str, *_: object) -> Record:
        names.append(name)
        raise InterruptedError

    monkeypatch.setattr(starts, "start", start)
    return names


class TestRecord:
    def test_survives_the_disk(self, settings: Settings, state: Path) -> None:
        processes = {"proxy": Process("proxy", 7, 8, "/log", "/ended", "/scratch")}
        for record in (
            Record(settings, processes, PORTS, ready=True),
            Record(dataclasses.replace(settings, profile="cuda", gpus=("0", "0")), {}, {}),
        ):
            records.save("mine", record)
            assert records.load("mine") == record
        assert [path.name for path in (state / "labs" / "mine").iterdir()] == ["lab.json"]
        records.remove("mine")
        assert records.load("mine") is None
        records.remove("mine")

    def test_of_no_lab(self) -> None:
        assert records.load("none") is None

    @pytest.mark.parametrize("text", NOT_READABLE)
    def test_that_cannot_be_read_is_an_error(self, text: str) -> None:
        path = records.folder("odd") / "lab.json"
        path.parent.mkdir(parents=True)
        path.write_text(text)
        with pytest.raises(PdlabError) as raised:
            records.load("odd")
        assert raised.value.message == f"lab 'odd' has a record that cannot be read: {path}"
        assert "remove that file" in str(raised.value.hint)

    def test_of_bytes_that_are_no_text_is_an_error(self) -> None:
        records.folder("odd").mkdir(parents=True)
        (records.folder("odd") / "lab.json").write_bytes(b"\xff")
        with pytest.raises(PdlabError, match="cannot be read"):
            records.load("odd")

    def test_of_another_format_is_an_error_to_all_and_stays(self, settings: Settings, started: list[str]) -> None:
        records.save("default", Record(settings, {}, PORTS, ready=True))
        path = records.folder("default") / "lab.json"
        fields = json.loads(path.read_text())
        path.write_text(json.dumps({**fields, "format": records.FORMAT + 1}))
        for use in (records.load, attach, down, status_of, lambda name: up(settings.model, name=name)):
            with pytest.raises(PdlabError, match="has a record that cannot be read"):
                use("default")
        assert not started
        path.write_text(json.dumps(fields))
        assert records.load("default") is not None

    def test_a_broken_write_leaves_the_old_one(self, settings: Settings) -> None:
        records.save("default", Record(settings, {}, PORTS))
        with pytest.raises(TypeError):
            records.save("default", Record(settings, {}, {"prefill": object()}))  # type: ignore[dict-item]
        assert records.load("default") == Record(settings, {}, PORTS)

    @pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "../up", "a b", "x" * 65, "a\n"])
    def test_names_that_are_none(self, name: str) -> None:
        for use in (records.folder, records.load, attach, down, status_of, lambda name: up("some/model", name=name)):
            with pytest.raises(PdlabError, match="a lab cannot be called"):
                use(name)

    @pytest.mark.parametrize("name", ["default", "a-b_c.d", "x" * 64, "lab2"])
    def test_names(self, name: str, state: Path) -> None:
        assert records.folder(name) == state / "labs" / name


class TestLock:
    def test_a_second_process_waits(self, zoo: Zoo, tmp_path: Path) -> None:
        code = f"from pdlab.lab.record import locked\nwith locked('x'): open({str(tmp_path / 'got')!r}, 'w').close()"
        with records.locked("x"):
            other = zoo.python(code, isolated=False)
            wait_until(lambda: waits_for_a_lock(other.pid), "the other's turn")
            assert not (tmp_path / "got").exists()
        assert other.wait() == 0
        assert (tmp_path / "got").exists()

    def test_of_another_lab_is_free(self) -> None:
        with records.locked("x"), records.locked("y"):
            pass

    def test_goes_with_its_holder(self) -> None:
        with pytest.raises(InterruptedError), records.locked("x"):
            raise InterruptedError
        with records.locked("x"):
            pass

    @pytest.fixture
    def zoo(self) -> Iterator[Zoo]:
        zoo = Zoo()
        yield zoo
        zoo.clean()


class TestUp:
    def test_attaches_to_the_running_one(self, lab: Callable[..., Record], settings: Settings) -> None:
        record = lab()
        for choices in ({}, {"dtype": "float32"}, {"profile": "cpu", "block_size": 32, "abort_timeout": 15}):
            found = up(settings.model, report=lambda *_: None, **choices)  # type: ignore[arg-type]
            assert found.settings == settings
            assert found.proxy.process == record.processes["proxy"]
        assert found.prefill.url == "http://127.0.0.1:1"
        assert found.prefill.bootstrap == "http://127.0.0.1:2"
        assert (found.decode.url, found.decode.bootstrap) == ("http://127.0.0.1:3", None)
        assert found.proxy.url == "http://127.0.0.1:4"
        assert "pdlab" not in str(found.prefill.command)

    def test_does_not_compare_what_is_not_asked_for(
        self, lab: Callable[..., Record], settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        record = lab()
        records.save("default", dataclasses.replace(record, settings=dataclasses.replace(settings, dtype="bfloat16")))
        monkeypatch.setattr(profiles, "resolve", lambda model: "the default model")
        running = up(report=lambda *_: None).settings
        assert running is not None
        assert (running.model, running.dtype) == (settings.model, "bfloat16")

    @pytest.mark.parametrize(
        ("asked", "words"),
        [
            ({"dtype": "bfloat16"}, "dtype float32 (asked for: bfloat16)"),
            ({"max_model_len": 64}, "max_model_len 4096 (asked for: 64)"),
            (
                {"abort_timeout": 3, "protocol": "rdma"},
                "abort_timeout 15 (asked for: 3), protocol tcp (asked for: rdma)",
            ),
        ],
    )
    def test_with_other_arguments_is_an_error(
        self, asked: dict[str, object], words: str, lab: Callable[..., Record], settings: Settings
    ) -> None:
        record = lab()
        with pytest.raises(PdlabError) as raised:
            up(settings.model, report=lambda *_: None, **asked)
        assert raised.value.message == f"lab 'default' is running with {words}"
        assert "python3 -m pdlab down" in str(raised.value.hint)
        assert record.dead == []

    def test_with_another_model_is_an_error(self, lab: Callable[..., Record], tmp_path: Path) -> None:
        lab()
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "config.json").touch()
        with pytest.raises(PdlabError, match=r"model /\S+/model \(asked for: /\S+/other\)"):
            up(str(tmp_path / "other"), report=lambda *_: None)

    def test_does_not_take_what_is_no_setting(self, settings: Settings) -> None:
        with pytest.raises(PdlabError, match=r"up\(\) does not take this: .*'colour'"):
            up(settings.model, colour="red")

    def test_starts_where_there_is_none(self, started: list[str], settings: Settings) -> None:
        with pytest.raises(InterruptedError):
            up(settings.model, name="mine", report=lambda *_: None)
        assert started == ["mine"]

    def test_starts_again_where_one_died(
        self, lab: Callable[..., Record], started: list[str], settings: Settings
    ) -> None:
        record, told = lab(), []
        record.processes["decode"].stop()
        with pytest.raises(InterruptedError):
            up(settings.model, report=lambda *words: told.append(words[:2]))
        assert started == ["default"]
        assert told[0] == ("lab", "decode died: starting again")
        assert record.dead == list(SERVERS)  # the others went first

    def test_ends_what_an_interrupted_start_left(
        self, lab: Callable[..., Record], started: list[str], settings: Settings
    ) -> None:
        record = lab(servers=("prefill",), ready=False)
        with pytest.raises(InterruptedError):
            up(settings.model, report=lambda *_: None)
        assert started == ["default"]
        assert not record.processes["prefill"].alive


class TestAttach:
    def test_none(self) -> None:
        with pytest.raises(PdlabError, match="no lab 'default' is running") as raised:
            attach()
        assert raised.value.hint == "start it: python3 -m pdlab up"

    def test_one_that_is_not_ready(self, lab: Callable[..., Record]) -> None:
        lab(ready=False)
        with pytest.raises(PdlabError, match="no lab 'default' is running"):
            attach()

    def test_a_broken_one(self, lab: Callable[..., Record]) -> None:
        record = lab()
        for name in ("prefill", "proxy"):
            record.processes[name].stop()
        with pytest.raises(PdlabError, match="lab 'default' is broken: prefill, proxy died") as raised:
            attach()
        assert raised.value.hint == "bring it back: python3 -m pdlab up"

    def test_a_running_one(self, lab: Callable[..., Record]) -> None:
        record = lab("mine")
        found = pdlab.attach("mine")
        assert found.name == "mine"
        assert found.decode.process == record.processes["decode"]


class TestHeal:
    @pytest.fixture(autouse=True)
    def _engines(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Engines that say what `self.usage` has of them; to start one again is to replace a server that sleeps."""
        self.usage = {"prefill": Usage(363, 0), "decode": Usage(363, 0)}
        self.restarts: list[list[str]] = []

        def restart(name: str, record: Record, servers: list[str], _: object) -> None:
            self.restarts.append(servers)
            for server in servers:
                record.processes[server].stop()
                record.processes[server] = spawn(server, SLEEP, folder=records.folder(name), env=dict(os.environ))
                self.usage[server] = Usage(363, 0)
            records.save(name, record)

        monkeypatch.setattr(starts, "restart", restart)
        monkeypatch.setattr(instances.Instance, "usage", lambda instance: self.usage[instance.role])
        monkeypatch.setattr(instances.Instance, "reset_prefix_cache", lambda _: True)
        self.refusals: list[int] = []  # statuses that the next requests are answered with
        monkeypatch.setattr("pdlab.lab.heal.complete", self.complete)
        monkeypatch.setattr("pdlab.lab.heal.RECOVERY", 0.05)
        monkeypatch.setattr("pdlab.lab.heal.MARGIN", -14.0)  # a second, of the 15 that P waits

    def complete(self, *_: object, **__: object) -> None:
        time.sleep(0.02)
        if self.refusals:
            raise RequestError(self.refusals.pop(), "no")

    def test_a_p_whose_writes_go_on_failing(self, lab: Callable[..., Record]) -> None:
        lab()
        found = attach()
        self.refusals = [500] * 100
        try:
            healed = found.heal(lambda *_: None)
            assert healed == Healed(mute=True) and self.restarts == [["prefill"]]
            assert repr(healed).startswith("<healed: prefill's writes to decode failed: prefill started again")
        finally:
            found.down()

    @pytest.mark.parametrize("refusals", [[500], [503]])
    def test_one_request_that_fails_is_not_enough(self, refusals: list[int], lab: Callable[..., Record]) -> None:
        lab()
        self.refusals = refusals
        assert not attach().heal().mute and self.restarts == []

    def test_nothing_is_wrong(self, lab: Callable[..., Record]) -> None:
        lab()
        assert repr(attach().heal()) == "<healed: prefix caches emptied>"
        assert self.restarts == []

    def test_what_died_is_started_again_and_every_holder_has_it(self, lab: Callable[..., Record]) -> None:
        record = lab()
        found, other = attach(), attach()
        decode = found.decode
        record.processes["decode"].stop()
        try:
            assert found.heal(lambda *_: None) == Healed(("decode",))
            assert decode is found.decode and decode.alive
            assert not other.decode.alive
            assert other.status()["servers"]["decode"]["up"] and other.decode.alive
        finally:
            found.down()

    def test_d_goes_with_p_if_it_keeps_blocks_for_it(self, lab: Callable[..., Record]) -> None:
        record = lab()
        found = attach()
        record.processes["prefill"].stop()
        self.usage["decode"] = Usage(363, 5, kept=1)
        try:
            healed = found.heal(lambda *_: None)
            assert healed == Healed(("prefill",), ("decode",))
            assert self.restarts == [["prefill", "decode"]]  # at once
            assert "decode kept blocks that nobody waits for: started again" in repr(healed)
        finally:
            found.down()

    def test_one_that_never_gives_its_blocks_back(self, lab: Callable[..., Record]) -> None:
        lab()
        found = attach()
        self.usage["prefill"] = Usage(363, 5, kept=1)
        try:
            assert found.heal(lambda *_: None) == Healed((), ("prefill",))
        finally:
            found.down()

    def test_requests_that_are_under_way_are_left_alone(self, lab: Callable[..., Record]) -> None:
        lab()
        self.usage["decode"] = Usage(363, 8, running=2, kept=1)
        healed = attach().heal()
        assert healed.under_way == 2 and self.restarts == []
        assert repr(healed) == "<healed: 2 requests under way: left alone>"

    def test_one_that_does_not_say_what_it_holds(self, lab: Callable[..., Record]) -> None:
        lab()
        found = attach()
        del self.usage["decode"]

        def usage(instance: instances.Instance) -> Usage:
            if instance.role not in self.usage:
                raise PdlabError("it does not answer")
            return self.usage[instance.role]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(instances.Instance, "usage", usage)
            try:
                assert found.heal(lambda *_: None).started == ("decode",)
            finally:
                found.down()

    def test_one_that_was_ended_leaves_nothing(self, lab: Callable[..., Record], state: Path) -> None:
        lab("mine")
        found = attach("mine")
        found.down()
        before = sorted(state.rglob("*"))
        with pytest.raises(PdlabError, match="no lab 'mine' is running"):
            found.heal()
        assert sorted(state.rglob("*")) == before

    def test_one_that_was_started_anew(self, lab: Callable[..., Record]) -> None:
        record = lab()
        found = attach()
        records.save("default", dataclasses.replace(record, token="another"))
        with pytest.raises(PdlabError, match="'default' was ended and started anew") as raised:
            found.heal()
        assert raised.value.hint == "attach to it: pdlab.up()"
        assert found.status()["servers"]["decode"]["up"]

    def test_instances_that_were_started_elsewhere(self, lab: Callable[..., Record]) -> None:
        lab()
        found = attach()
        found.settings = None
        with pytest.raises(PdlabError, match="started elsewhere"):
            found.heal()


class TestStatus:
    @pytest.mark.parametrize("ready", [None, False])
    def test_of_none(self, ready: bool | None, lab: Callable[..., Record]) -> None:
        if ready is not None:
            lab(servers=("prefill",), ready=ready)
        assert status_of() == {"name": "default", "up": False, "servers": {}}

    def test_of_a_running_one(self, lab: Callable[..., Record]) -> None:
        record = lab()
        status = status_of()
        assert status["up"]
        assert list(status["servers"]) == list(SERVERS)
        prefill = record.processes["prefill"]
        assert status["servers"]["prefill"] == {
            "url": "http://127.0.0.1:1", "up": True, "bootstrap": "http://127.0.0.1:2",
            "pids": [prefill.pid, prefill.server_pid()], "log": prefill.log,
        }  # fmt: skip
        assert "bootstrap" not in status["servers"]["decode"]
        assert json.loads(json.dumps(status)) == status

    def test_of_a_broken_one(self, lab: Callable[..., Record]) -> None:
        lab().processes["decode"].stop()
        status = status_of()
        assert not status["up"]
        decode = status["servers"]["decode"]
        assert (decode["up"], decode["pids"], decode["ended"]) == (False, [], "told to end (exit code -15)")
        assert status["servers"]["proxy"]["up"]


class TestDown:
    def test_of_none_leaves_nothing_behind(self, state: Path) -> None:
        assert down() is False
        assert not state.exists()

    @pytest.mark.parametrize("ready", [True, False])
    def test_ends_every_process(self, ready: bool, lab: Callable[..., Record]) -> None:
        record = lab(ready=ready)
        pids = [pid for process in record.processes.values() for pid in process.pids()]
        assert down() is True
        assert all(map(gone, pids))
        assert records.load("default") is None
        assert down() is False

    def test_leaves_other_labs(self, lab: Callable[..., Record]) -> None:
        mine, other = lab("mine"), lab("other")
        attach("mine").down()
        assert mine.dead == list(SERVERS)
        assert other.dead == []

    @pytest.mark.parametrize("how", ["down", "with"])
    def test_leaves_one_that_was_started_anew(self, how: str, lab: Callable[..., Record]) -> None:
        record = lab()
        found = attach()
        records.save("default", dataclasses.replace(record, token="another"))
        if how == "down":
            found.down()
        else:
            with found:
                pass
        assert record.dead == []
        assert down("default", found.prefill.token) is False
        assert down("default", "another") is True
        assert record.dead == list(SERVERS)

    def test_at_the_end_of_a_with_block(self, lab: Callable[..., Record]) -> None:
        record = lab()
        with pytest.raises(InterruptedError), attach():
            raise InterruptedError
        assert record.dead == list(SERVERS)


def waits_for_a_lock(pid: int) -> bool:
    return any("->" in line and str(pid) in line.split() for line in Path("/proc/locks").read_text().splitlines())
