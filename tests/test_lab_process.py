"""Starting a server under a nanny, recognising it from any process, and ending it."""

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdlab.lab import process as processes
from pdlab.lab.ports import Ports
from pdlab.lab.process import Process, make_scratch, myself, owner_of_lab, spawn
from tests.helpers import Zoo, gone, wait_until

SLEEP = [sys.executable, "-I", "-S", "-c", "print('here', flush=True); import time; time.sleep(600)"]
Spawn = Callable[..., Process]

# A process that starts a server, says how to find it, and stays.
STARTER = """
import dataclasses, json, os, pathlib, sys, time
from pdlab.lab.process import spawn
argv = [sys.executable, "-I", "-S", "-c", "import time; print('here', flush=True); time.sleep(600)"]
folder = pathlib.Path({folder!r})
process = spawn("server", argv, folder=folder, env=dict(os.environ))
while not pathlib.Path(process.log).read_text():
    time.sleep(0.01)
{then}
(folder / "draft").write_text(json.dumps(dataclasses.asdict(process)))
(folder / "draft").rename(folder / "process.json")
time.sleep(600)
"""


@pytest.fixture
def zoo() -> Iterator[Zoo]:
    zoo = Zoo()
    yield zoo
    zoo.clean()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Spawn]:
    """`spawn` into the test's folder."""
    started: list[Process] = []

    def start(argv: list[str] = SLEEP, name: str = "server", **options: object) -> Process:
        options = {"folder": tmp_path, "env": dict(os.environ), **options}
        started.append(spawn(name, argv, **options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for process in started:
        process.stop()


def runs(process: Process) -> Process:
    """The process, once its server has printed."""
    wait_until(lambda: Path(process.log).read_text(), "the server's first line")
    return process


class TestSpawn:
    def test_gives_it_a_log_a_session_a_tmpdir_and_the_environment(self, start: Spawn) -> None:
        code = "import os; print(os.getsid(0) == os.getpid(), os.environ['TMPDIR'], os.environ['MARK'], flush=True)"
        argv = [sys.executable, "-I", "-S", "-c", f"{code}; import time; time.sleep(600)"]
        process = runs(start(argv, env={**os.environ, "MARK": "mine"}))
        assert Path(process.log).read_text().split() == ["True", process.scratch, "mine"]
        assert Path(process.scratch).is_dir()
        assert os.getsid(process.pid) == process.pid  # Ctrl-C in the terminal of whoever starts it does not reach it

    def test_its_exit_code_is_known_once_it_has_ended(self, start: Spawn) -> None:
        running = runs(start(name="running"))
        assert running.exit_code is None
        for code in (0, 3):
            ended = start([sys.executable, "-I", "-S", "-c", f"raise SystemExit({code})"], name=f"ended{code}")
            ended.wait()
            assert ended.exit_code == code

    def test_server_and_nanny_are_found(self, start: Spawn) -> None:
        process = runs(start())
        server = process.server_pid()
        assert server is not None
        assert process.pids() == [process.pid, server]
        assert "time.sleep(600)" in Path(f"/proc/{server}/cmdline").read_text()

    def test_the_nanny_holds_the_ports_and_the_server_does_not_inherit_them(self, start: Spawn) -> None:
        ports = Ports("127.0.0.1")
        ports.take("api")
        process = runs(start(ports=ports))
        assert sockets(process.pid)
        assert not sockets(int(str(process.server_pid())))
        ports.close()

    def test_a_command_that_is_not_there(self, start: Spawn) -> None:
        process = start(["/not/there"])
        wait_until(lambda: not process.alive)
        assert "No such file or directory: '/not/there'" in Path(process.log).read_text()
        process.stop()
        assert not Path(process.scratch).exists()

    def test_scratch_is_short_enough_for_a_unix_socket(self) -> None:
        folder = make_scratch("prefill")
        folder.rmdir()
        assert len(f"{folder}/{'x' * 40}") < 107


class TestStop:
    def test_ends_all_of_it(self, start: Spawn) -> None:
        process = runs(start())
        pids = process.pids()
        process.stop()
        assert all(map(gone, pids))
        assert not process.alive
        assert process.pids() == []
        assert process.server_pid() is None
        assert process.why_ended() == f"told to end (exit code {-signal.SIGTERM})"
        assert not Path(process.scratch).exists()
        process.stop()  # no error

    def test_cleans_up_after_a_killed_nanny(self, start: Spawn) -> None:
        process = runs(start())
        server = process.server_pid()
        assert server is not None
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: not process.alive)
        assert process.why_ended() == "killed"
        process.stop()
        assert not Path(process.scratch).exists()
        wait_until(lambda: gone(server))

    def test_how_an_earlier_one_ended_is_forgotten(self, start: Spawn) -> None:
        start([sys.executable, "-I", "-S", "-c", ""]).wait()
        process = runs(start())
        server = process.server_pid()
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: not process.alive and gone(server or 0))
        assert process.why_ended() == "killed"

    def test_touches_nobody_who_has_its_pid_by_now(self, start: Spawn, zoo: Zoo, tmp_path: Path) -> None:
        process = runs(start())
        stranger = zoo.run(SLEEP)
        reused = dataclasses.replace(process, pid=stranger.pid, scratch=str(tmp_path / "none"))
        assert not reused.alive
        assert reused.pids() == []
        reused.stop()
        assert stranger.poll() is None
        assert process.alive

    def test_by_another_process_than_its_starter(self, start: Spawn, zoo: Zoo) -> None:
        process = runs(start())
        read_back = f"Process(**{json.dumps(dataclasses.asdict(process))})"
        code = f"from pdlab.lab.process import Process; process = {read_back}; assert process.alive; process.stop()"
        assert zoo.python(code, isolated=False).wait() == 0
        assert not process.alive

    def test_wait_returns_when_it_has_ended(self, start: Spawn) -> None:
        process = start([sys.executable, "-I", "-S", "-c", "raise SystemExit(5)"])
        process.wait()
        assert process.why_ended() == "server ended (exit code 5)"


class TestStarter:
    def server_of(self, zoo: Zoo, folder: Path, then: str) -> Process:
        """A server whose starter is dead."""
        code = STARTER.format(folder=str(folder), then=then)
        starter = zoo.python(code, isolated=False)
        wait_until((folder / "process.json").exists, "the starter")
        process = Process(**json.loads((folder / "process.json").read_text()))
        for pid in process.pids():
            zoo.watch(pid)
        assert process.server_pid()
        starter.kill()
        starter.wait()
        return process

    def test_before_keep_it_goes_with_its_starter(self, zoo: Zoo, tmp_path: Path) -> None:
        process = self.server_of(zoo, tmp_path, "")
        wait_until(lambda: not process.alive, "its end")
        assert process.why_ended().startswith("owner ended")

    def test_kept_it_stays(self, zoo: Zoo, tmp_path: Path) -> None:
        process = self.server_of(zoo, tmp_path, "process.keep()")
        # It answers SIGTERM as told, not as an end of its owner: it has not noticed that, or it would have ended first.
        assert process.alive
        process.stop()
        assert process.why_ended().startswith("told to end")

    def test_kept_it_stays_though_its_nanny_learns_both_at_once(self, zoo: Zoo, tmp_path: Path) -> None:
        then = "import signal; os.kill(process.pid, signal.SIGSTOP); process.keep()"
        process = self.server_of(zoo, tmp_path, then)
        os.kill(process.pid, signal.SIGCONT)
        process.stop()
        assert process.why_ended().startswith("told to end")

    def test_keep_of_a_dead_one_is_no_error(self, start: Spawn) -> None:
        process = runs(start())
        process.stop()
        process.keep()


class TestOwner:
    def test_is_whom_the_variable_names(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PDLAB_OWNER", "1:2")
        assert owner_of_lab() == "1:2"
        for unset in ("", None):
            monkeypatch.delenv("PDLAB_OWNER") if unset is None else monkeypatch.setenv("PDLAB_OWNER", unset)
            assert owner_of_lab() is None

    def test_ends_it(self, start: Spawn, zoo: Zoo) -> None:
        owner = zoo.run(SLEEP)
        process = runs(start(owner=f"{owner.pid}:{processes.nanny.start_time(owner.pid)}"))
        process.keep()  # of no use against its owner
        owner.kill()
        wait_until(lambda: not process.alive, "its end")
        assert process.why_ended().startswith("owner ended")

    def test_myself_is_a_process_that_lives(self) -> None:
        pid, start = map(int, myself().split(":"))
        assert Process("me", pid, start, "", "", "").alive
        assert not Process("me", pid, start + 1, "", "", "").alive


def sockets(pid: int) -> list[str]:
    links = [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()]
    return [link for link in links if link.startswith("socket:")]


def test_stop_ends_what_a_killed_nanny_could_not(start: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE", 0.3)
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True)"
    process = runs(start([sys.executable, "-I", "-S", "-c", f"{stubborn}; time.sleep(600)"]))
    foreign = runs(start(name="foreign"))
    server = process.server_pid()
    assert server
    os.kill(process.pid, signal.SIGKILL)
    process.stop()
    assert gone(server)
    assert not Path(process.scratch).exists()
    assert foreign.alive
