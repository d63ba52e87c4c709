"""What live tests take for left behind by this session: no leak is overlooked, and no other lab is taken for one."""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdlab.lab.process import myself
from tests.helpers import Zoo, wait_until
from tests.live import MARK, new_since, traces

# Maps a segment, as an engine does, is started with its scratch folder in its arguments, and has a title.
ENGINE = """
import mmap, sys, time
file = open(f"/dev/shm/{sys.argv[1]}", "w+b")
file.truncate(4096)
mapped = mmap.mmap(file.fileno(), 4096)
file.close()
print("here", flush=True)
time.sleep(600)
"""
STARTER = """
import subprocess, sys
title, *argv = sys.argv[1:]
engine = subprocess.Popen([title, *argv], executable=sys.executable)
print(engine.pid, flush=True)
engine.wait()
"""
TITLE = "VLLM::EngineCore of a test"


class Foot:
    """What an engine has of the machine: a segment, a scratch folder, processes."""

    def __init__(self, zoo: Zoo) -> None:
        self.zoo, self.before = zoo, traces()
        self.name = uuid.uuid4().hex[:8]
        self.segment, self.scratch = Path(f"/dev/shm/psm_test{self.name}"), Path(f"/tmp/pdlab-left-{self.name}")
        self.scratch.mkdir()

    def start(self, mark: str | None) -> tuple[subprocess.Popen[str], int]:
        """Its starter, and the pid of the engine; both of the session `mark`."""
        env = {key: value for key, value in os.environ.items() if key != MARK} | ({MARK: mark} if mark else {})
        engine = [TITLE, "-I", "-S", "-c", ENGINE, self.segment.name, str(self.scratch)]
        starter = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", STARTER, *engine], env=env, stdout=subprocess.PIPE, text=True
        )
        assert starter.stdout is not None
        said = [starter.stdout.readline().strip() for _ in range(2)]
        starter.stdout.close()
        assert "here" in said
        (pid,) = {int(word) for word in said if word != "here"}
        return starter, self.zoo.watch(pid)

    def clean(self) -> None:
        self.segment.unlink(missing_ok=True)
        self.scratch.rmdir()

    @property
    def seen(self) -> tuple[bool, bool, bool]:
        """Whether its segment, its folder, its engine count as ours."""
        new = new_since(self.before)
        engine = any(TITLE in line for line in new.get("processes", ()))
        return self.segment.name in new.get("shared memory", ()), self.scratch.name in new.get("scratch", ()), engine


@pytest.fixture
def foot(monkeypatch: pytest.MonkeyPatch) -> Iterator[Foot]:
    monkeypatch.setenv(MARK, myself())
    zoo = Zoo()
    foot = Foot(zoo)
    yield foot
    zoo.clean()
    foot.clean()


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def test_what_this_session_started_counts_and_what_it_leaked(foot: Foot) -> None:
    starter, _ = foot.start(os.environ[MARK])
    assert foot.seen == (True, True, True)
    foot.zoo.clean()
    end(starter)
    wait_until(lambda: foot.seen == (True, True, False))


@pytest.mark.parametrize("mark", [None, "1:2"])
def test_what_others_use_does_not_count(mark: str | None, foot: Foot) -> None:
    starter, _ = foot.start(mark)
    assert foot.seen == (False, False, False)
    foot.zoo.clean()
    end(starter)
    wait_until(lambda: foot.seen == (True, True, False))  # nobody uses it: whose it is nobody can tell


def test_an_orphan_counts_for_nobody_can_tell_whose_it_is(foot: Foot) -> None:
    starter, _ = foot.start(None)
    end(starter)
    wait_until(lambda: foot.seen == (True, True, True))
