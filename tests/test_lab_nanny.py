"""The supervisor of one server: what ends with what. Real processes, though no engines."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdlab.lab import nanny
from pdlab.lab.process import myself
from tests.helpers import Zoo, gone, identity, read_pid, wait_until

SLEEP = "import time; time.sleep(600)"
# `save(NAME)` writes this process's pid; `child(CODE)` starts a process in a session of its own.
TOOLS = """
import os, signal, subprocess, sys, time
def save(name):
    with open(f"{os.environ['HERE']}/{name}", "w") as file:
        file.write(f"{os.getpid()}\\n")
def child(code):
    argv = [sys.executable, "-I", "-S", "-c", os.environ["TOOLS"] + code]
    return subprocess.Popen(argv, start_new_session=True)
"""
GRANDCHILD = "save('grandchild'); time.sleep(600)"
CHILD = f"child({GRANDCHILD!r}); save('child'); time.sleep(600)"
FAMILY = f"child({CHILD!r}); save('server'); time.sleep(600)"
ALONE = "save('server'); time.sleep(600)"


class Nanny:
    """A nanny that runs `code` (with TOOLS) in `folder`, where servers write their pids."""

    def __init__(self, zoo: Zoo, folder: Path, code: str, *options: str, grace: float = 10.0):
        self.zoo, self.folder = zoo, folder
        self.scratch, self.ended = folder / "scratch", folder / "ended.json"
        self.scratch.mkdir()
        (self.scratch / "socket").touch()
        files = ["--scratch", str(self.scratch), "--ended", str(self.ended), "--grace", str(grace)]
        server = ["env", f"HERE={folder}", f"TOOLS={TOOLS}", sys.executable, "-I", "-S", "-c", TOOLS + code]
        self.process = zoo.run([sys.executable, "-I", "-S", nanny.__file__, *files, *options, "--", *server])

    def pid(self, name: str) -> int:
        return self.zoo.watch(read_pid(self.folder / name))

    def wait(self) -> dict[str, object]:
        """What it wrote when it ended."""
        self.process.wait(timeout=20)
        return dict(json.loads(self.ended.read_text()))


@pytest.fixture
def zoo() -> Iterator[Zoo]:
    zoo = Zoo()
    yield zoo
    zoo.clean()


Start = Callable[..., Nanny]


@pytest.fixture
def start(zoo: Zoo, tmp_path: Path) -> Start:
    return lambda code, *options, grace=10.0: Nanny(zoo, tmp_path, code, *options, grace=grace)


def family(started: Nanny) -> list[int]:
    return [started.pid(name) for name in ("grandchild", "child", "server")]


class TestEverythingGoes:
    def test_when_the_server_dies(self, start: Start) -> None:
        started = start(FAMILY)
        pids = family(started)
        assert len({os.getsid(pid) for pid in pids}) == 3
        os.kill(pids[-1], signal.SIGKILL)
        assert started.wait() == {"why": "server ended", "code": -signal.SIGKILL}
        assert all(map(gone, pids))
        assert not started.scratch.exists()

    def test_when_it_is_told_to_end(self, start: Start) -> None:
        started = start(FAMILY)
        pids = family(started)
        os.kill(started.process.pid, signal.SIGTERM)
        assert started.wait() == {"why": "told to end", "code": -signal.SIGTERM}
        assert all(map(gone, pids))
        assert not started.scratch.exists()

    @pytest.mark.parametrize("option", ["--owner", "--starter"])
    def test_when_the_owner_dies(self, option: str, start: Start, zoo: Zoo) -> None:
        owner = zoo.python(SLEEP)
        started = start(FAMILY, option, identity(owner.pid))
        pids = family(started)
        owner.kill()
        assert started.wait() == {"why": "owner ended", "code": -signal.SIGTERM}
        assert all(map(gone, pids))
        assert not started.scratch.exists()

    def test_an_orphan_that_a_dead_child_left_goes_too(self, start: Start) -> None:
        orphan = "save('orphan'); time.sleep(600)"
        started = start(f"child({f'child({orphan!r})'!r}); {ALONE}")
        pid = started.pid("orphan")
        wait_until(lambda: parent(pid) == started.process.pid, "the orphan's adoption")
        os.kill(started.process.pid, signal.SIGTERM)
        started.wait()
        assert gone(pid)

    def test_when_the_nanny_is_killed_the_server_is_told(self, start: Start) -> None:
        started = start("signal.signal(15, lambda *_: (save('told'), os._exit(0))); " + ALONE)
        server = started.pid("server")
        started.process.kill()
        assert read_pid(started.folder / "told") == server
        wait_until(lambda: gone(server))
        assert not started.ended.exists()


class TestGrace:
    def test_a_server_may_end_in_good_order(self, start: Start) -> None:
        started = start("signal.signal(15, lambda *_: (time.sleep(0.3), sys.exit(7))); " + ALONE)
        started.pid("server")
        os.kill(started.process.pid, signal.SIGTERM)
        assert started.wait()["code"] == 7

    def test_only_the_server_is_told_first(self, start: Start) -> None:
        # It ends its own children, in its order.
        child = "signal.signal(15, lambda *_: save('told')); save('child'); time.sleep(600)"
        server = (
            f"c = child({child!r}); signal.signal(15, lambda *_: (time.sleep(0.3), c.kill(), c.wait(), sys.exit(0)))"
        )
        started = start(f"{server}; {ALONE}")
        child_pid, _ = started.pid("child"), started.pid("server")
        os.kill(started.process.pid, signal.SIGTERM)
        assert started.wait()["code"] == 0
        assert gone(child_pid)
        assert not (started.folder / "told").exists()

    def test_who_ignores_sigterm_is_killed_after_it(self, start: Start) -> None:
        deaf = "signal.signal(15, signal.SIG_IGN)"
        child_code = f"{deaf}; save('child'); time.sleep(600)"
        started = start(f"{deaf}; child({child_code!r}); {ALONE}", grace=0.2)
        child, server = started.pid("child"), started.pid("server")
        os.kill(started.process.pid, signal.SIGTERM)
        assert started.wait()["code"] == -signal.SIGKILL
        assert gone(child)
        assert gone(server)


class TestStarterAndOwner:
    def test_up_it_outlives_its_starter(self, start: Start, zoo: Zoo) -> None:
        starter, owner = zoo.python(SLEEP), zoo.python(SLEEP)
        started = start(ALONE, "--starter", identity(starter.pid), "--owner", identity(owner.pid))
        server = started.pid("server")
        os.kill(started.process.pid, signal.SIGUSR1)
        wait_until(lambda: not watches(started.process.pid, starter.pid), "the starter's release")
        starter.kill()
        starter.wait()
        assert watches(started.process.pid, owner.pid)
        assert not gone(server)
        owner.kill()
        assert started.wait()["why"] == "owner ended"
        assert gone(server)

    def test_a_second_sigusr1_does_not_release_the_owner(self, start: Start, zoo: Zoo) -> None:
        owner = zoo.python(SLEEP)
        started = start(ALONE, "--owner", identity(owner.pid))
        started.pid("server")
        before = sleeps(started.process.pid)
        os.kill(started.process.pid, signal.SIGUSR1)
        wait_until(lambda: sleeps(started.process.pid) > before)
        assert watches(started.process.pid, owner.pid)
        owner.kill()
        assert started.wait()["why"] == "owner ended"

    @pytest.mark.parametrize("which", ["dead", "another process by now"])
    def test_who_is_gone_already_gets_no_server(self, which: str, start: Start, zoo: Zoo) -> None:
        owner = zoo.python(SLEEP)
        pid, begin = identity(owner.pid).split(":")
        if which == "dead":
            owner.kill()
            owner.wait()
        else:
            begin = str(int(begin) - 1)
        started = start(ALONE, "--owner", f"{pid}:{begin}")
        assert started.wait() == {"why": "owner ended", "code": None}
        assert not (started.folder / "server").exists()
        assert not started.scratch.exists()


class TestTheServer:
    def test_can_be_interrupted_though_the_nanny_cannot(self, start: Start) -> None:
        # What is ignored stays ignored in every process beneath: Ctrl-C would be dead in a terminal of JupyterLab.
        started = start(ALONE)
        server = started.pid("server")
        for ignored in (signal.SIGINT, signal.SIGHUP):
            assert ignores(started.process.pid, ignored)
            assert not ignores(server, ignored)
        os.kill(started.process.pid, signal.SIGINT)
        os.kill(server, signal.SIGINT)
        assert started.wait() == {"why": "server ended", "code": -signal.SIGINT}

    def test_runs_on_the_cores_it_was_given(self, start: Start) -> None:
        core = max(os.sched_getaffinity(0))
        assert os.sched_getaffinity(start(ALONE, "--cores", str(core)).pid("server")) == {core}

    def test_is_in_a_session_of_its_own(self, start: Start) -> None:
        server = start(ALONE).pid("server")
        assert os.getsid(server) == server

    def test_its_exit_code_is_kept(self, start: Start) -> None:
        assert start("sys.exit(3)").wait() == {"why": "server ended", "code": 3}


class TestSharedMemory:
    """The files in /dev/shm that a killed engine leaves."""

    MAP = """
import mmap
def keep(name):
    with open(f"/dev/shm/{name}", "w+b") as file:
        file.truncate(4096)
        return mmap.mmap(file.fileno(), 4096)
"""

    @pytest.fixture
    def name(self) -> Iterator[str]:
        name = f"psm_test{uuid.uuid4().hex[:8]}"
        yield name
        for path in Path("/dev/shm").glob(f"*{name}"):
            path.unlink()

    @pytest.mark.parametrize("killed", ["server", "child"])
    def test_goes_with_who_mapped_it(self, killed: str, start: Start, name: str) -> None:
        # The server dies first, as when the kernel or a reader kills it; a child that has it mapped may still live.
        mapping = f"{self.MAP}\nkept = keep({name!r}); save({killed!r}); time.sleep(600)"
        code = mapping if killed == "server" else f"child({mapping!r}); {ALONE}"
        started = start(code)
        server = started.pid("server")
        if killed == "child":
            started.pid("child")
        else:
            before = sleeps(started.process.pid)
            wait_until(lambda: sleeps(started.process.pid) > before + 1, "the nanny's look at it")
        assert Path("/dev/shm", name).exists()
        os.kill(server, signal.SIGKILL)
        started.wait()
        assert not Path("/dev/shm", name).exists()

    def test_made_late_in_a_start(self, start: Start, name: str) -> None:
        """An engine makes some when it has been starting for a quarter of a minute."""
        started = start(f"{self.MAP}\ntime.sleep(4); kept = keep({name!r}); {ALONE}")
        server = started.pid("server")
        before, began = sleeps(started.process.pid), time.monotonic()
        wait_until(lambda: sleeps(started.process.pid) > before + 1, "the nanny's look at it")
        # Two looks, a second apart. With pauses that go on doubling it were 12 s by now.
        assert time.monotonic() - began < 8
        os.kill(server, signal.SIGKILL)
        started.wait()
        assert not Path("/dev/shm", name).exists()

    def test_there_when_it_is_up(self, start: Start, name: str) -> None:
        started = start(f"{self.MAP}\nkept = keep({name!r}); {ALONE}", "--starter", myself())
        server = started.pid("server")
        before = sleeps(started.process.pid)
        os.kill(started.process.pid, signal.SIGUSR1)
        wait_until(lambda: sleeps(started.process.pid) > before, "the nanny's look at it")
        os.kill(server, signal.SIGKILL)
        started.wait()
        assert not Path("/dev/shm", name).exists()

    def test_of_a_deaf_server_too(self, start: Start, name: str) -> None:
        deaf = f"{self.MAP}\nkept = keep('{name}'); signal.signal(15, signal.SIG_IGN); {ALONE}"
        started = start(deaf, grace=0.1)
        started.pid("server")
        os.kill(started.process.pid, signal.SIGTERM)
        assert started.wait()["code"] == -signal.SIGKILL
        assert not Path("/dev/shm", name).exists()

    def test_of_others_stays(self, start: Start, name: str) -> None:
        started = start(f"{self.MAP}\nkept = keep('other_{name}'); {ALONE}")  # no name that an engine gives
        foreign = Path("/dev/shm", name)  # such a name, but nobody beneath the nanny maps it
        foreign.touch()
        started.pid("server")
        os.kill(started.process.pid, signal.SIGTERM)
        started.wait()
        assert foreign.exists()
        assert Path("/dev/shm", f"other_{name}").exists()


def test_foreign_processes_are_left_alone(start: Start, zoo: Zoo) -> None:
    foreign = [zoo.python(SLEEP), zoo.python("import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)")]
    started = start(FAMILY)
    family(started)
    os.kill(started.process.pid, signal.SIGTERM)
    started.wait()
    assert [process.poll() for process in foreign] == [None, None]


def test_start_time_tells_a_process_from_its_pid(zoo: Zoo) -> None:
    process = zoo.python(SLEEP)
    began = nanny.start_time(process.pid)
    assert began == nanny.start_time(process.pid)
    time.sleep(2 / os.sysconf("SC_CLK_TCK"))
    assert nanny.start_time(zoo.python(SLEEP).pid) != began
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert nanny.start_time(process.pid) is None  # a zombie
    process.wait()
    assert nanny.start_time(process.pid) is None


def test_start_time_of_a_process_with_a_nasty_name(zoo: Zoo, tmp_path: Path) -> None:
    program = tmp_path / ") Z 1 (x"
    program.symlink_to("/bin/sleep")
    process = zoo.run([str(program), "600"])
    wait_until(lambda: ") Z 1 (x" in Path(f"/proc/{process.pid}/comm").read_text())
    assert nanny.start_time(process.pid)
    assert process.pid in set(nanny.descendants(os.getpid()))


def test_the_nanny_needs_no_package() -> None:
    code = f"import runpy; runpy.run_path({nanny.__file__!r}, run_name='nanny')"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)


def status_of(pid: int, field: str) -> str:
    text = Path(f"/proc/{pid}/status").read_text()
    return next(line.split()[1] for line in text.splitlines() if line.startswith(f"{field}:"))


def parent(pid: int) -> int:
    return int(status_of(pid, "PPid"))


def ignores(pid: int, sig: int) -> bool:
    return bool(int(status_of(pid, "SigIgn"), 16) >> (sig - 1) & 1)


def sleeps(pid: int) -> int:
    """How often a process went to sleep: the nanny does after each look at what there is to do."""
    return int(status_of(pid, "voluntary_ctxt_switches"))


def watches(pid: int, owner: int) -> bool:
    """Whether the nanny still has this owner open; it opens and closes other files meanwhile."""
    for path in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(OSError):
            if f"Pid:\t{owner}\n" in path.read_text():
                return True
    return False
