"""`.venv` and `.venv-cuda`: made once, gone on with where it stopped, brought up to a lock that changed."""

import fcntl
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pdlab.paths import repo_root
from pdlab.setup import environment, pins, runner
from pdlab.setup.console import SetupError
from pdlab.setup.environment import Environment
from pdlab.setup.runner import Result
from tests.helpers import PATIENCE, wait_for_words

LOCK = "jupyterlab==4.0\nnumpy==2.1\ntorch==2.13.0+cpu\nvllm-cpu==0.32.0\n"
CUDA_LOCK = "numpy==2.1\ntorch==2.13.0\nvllm==0.32.0\n"


def record(site: Path, name: str, version: str, whole: bool = True) -> Path:
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if whole:
        (folder / "RECORD").touch()
    return folder


class Machine:
    """A checkout in a scratch folder whose pip only writes records, and notes what it was asked."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.repo = folder / "repo"
        self.repo.mkdir()
        shutil.copy(repo_root() / "pyproject.toml", self.repo)
        self.own = Environment(self.repo, "cpu")
        self.asked: list[str] = []
        self.before: Callable[[str], None] = lambda word: None
        for profile, text in (("cpu", LOCK), ("cuda", CUDA_LOCK)):
            (folder / f"{profile}.lock").write_text(text)
        monkeypatch.setattr(pins, "lock_path", lambda profile: folder / f"{profile}.lock")
        monkeypatch.setattr(pins, "repo_root", lambda: self.repo)
        monkeypatch.setattr(environment.Pip, "run", self.pip)
        monkeypatch.setattr(Environment, "_create", lambda own, progress: self.create())
        self.lock = folder / "cpu.lock"

    @property
    def site(self) -> Path:
        return self.own.folder / "lib/python3.11/site-packages"

    def create(self) -> None:
        self.site.mkdir(parents=True, exist_ok=True)
        self.own.python.parent.mkdir(exist_ok=True)
        self.own.python.touch()

    def pip(self, *arguments: str, progress: object, note: object = None) -> Result:
        word = "-r" if "-r" in arguments else arguments[-1]
        self.asked.append(word)
        self.before(word)
        if word == str(self.repo):
            self.register(self.repo)
            return Result(0, "")
        for line in Path(arguments[-1]).read_text().splitlines() if word == "-r" else [word]:
            name, version = line.split("==")
            if getattr(pins.find(name, self.own.sites), "version", "") != version:  # else already satisfied
                record(self.site, name, version)
        return Result(0, "")

    def register(self, repo: Path) -> None:
        folder = record(self.site, "pdlab", pins.project()["version"])
        (folder / "direct_url.json").write_text(json.dumps({"url": repo.as_uri(), "dir_info": {"editable": True}}))
        groups: dict[str, list[str]] = {}
        for group, name, value in pins.declared():
            groups.setdefault(group, []).append(f"{name} = {value}")
        text = "\n".join(f"[{group}]\n" + "\n".join(points) for group, points in groups.items())
        (folder / "entry_points.txt").write_text(text)

    def run(self) -> list[str]:
        """What one run asks of pip."""
        self.asked = []
        self.own.ensure()
        return self.asked


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_a_bare_checkout_gets_torch_then_the_rest_then_pdlab(machine: Machine) -> None:
    assert machine.run() == ["torch==2.13.0+cpu", "-r", str(machine.repo)]
    assert machine.own.stands


def test_a_second_run_asks_pip_for_nothing(machine: Machine) -> None:
    machine.run()
    assert machine.run() == []


def test_a_lock_that_changed_is_installed_anew(machine: Machine) -> None:
    machine.run()
    machine.lock.write_text(LOCK.replace("numpy==2.1", "numpy==2.2"))
    assert not machine.own.stands
    assert machine.run() == ["torch==2.13.0+cpu", "-r", str(machine.repo)]
    assert machine.own.stands


def test_an_interrupted_run_goes_on_where_it_stopped(machine: Machine) -> None:
    def interrupt(word: str) -> None:
        if word == "-r":
            raise KeyboardInterrupt

    machine.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        machine.run()
    assert machine.asked == ["torch==2.13.0+cpu", "-r"]
    assert not machine.own.stands
    assert pins.find("torch", machine.own.sites), "what was installed is kept"
    machine.before = lambda word: None
    assert machine.run()[-2:] == ["-r", str(machine.repo)]
    assert machine.own.stands


def test_a_lock_that_changes_back_in_mid_install_is_not_taken_for_installed(machine: Machine) -> None:
    machine.run()
    machine.lock.write_text(LOCK.replace("numpy==2.1", "numpy==2.2"))
    machine.before = lambda word: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        machine.run()
    machine.lock.write_text(LOCK)
    assert not machine.own.stands


def test_a_package_that_pip_had_not_finished_is_installed_again(machine: Machine) -> None:
    machine.site.mkdir(parents=True)
    half = record(machine.site, "torch", "2.13.0+cpu", whole=False)
    assert machine.run()[0] == "torch==2.13.0+cpu"
    assert (half / "RECORD").is_file()


def test_new_entry_points_register_pdlab_again(machine: Machine) -> None:
    machine.run()
    project = machine.repo / "pyproject.toml"
    project.write_text(project.read_text().replace("pdlab.inside.plugin:register", "pdlab.inside.plugin:other"))
    assert machine.run()[-1] == str(machine.repo)
    assert machine.run() == []


def test_another_checkouts_pdlab_is_replaced(machine: Machine, tmp_path: Path) -> None:
    machine.run()
    machine.register(tmp_path / "elsewhere")
    assert machine.run()[-1] == str(machine.repo)
    assert machine.run() == []


def test_the_profiles_leave_each_others_environment_alone(machine: Machine) -> None:
    machine.run()
    cpu, before = machine.own, sorted(machine.own.folder.rglob("*"))
    machine.own = Environment(machine.repo, "cuda")
    assert machine.run() == ["torch==2.13.0", "-r", str(machine.repo)]
    assert machine.own.folder.name == ".venv-cuda" and machine.own.stands
    assert sorted(cpu.folder.rglob("*")) == before and cpu.stands


def test_git_ignores_every_profiles_environment() -> None:
    ignored = (repo_root() / ".gitignore").read_text().splitlines()
    assert {f"/{folder}/" for folder in environment.FOLDERS.values()} <= set(ignored)


def test_a_second_set_up_says_that_it_waits(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.own.notes.mkdir(parents=True)
    with (machine.own.notes / "lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        run = threading.Thread(target=machine.run)
        run.start()
        wait_for_words(capsys, "waiting for it")
        run.join(0.3)
        assert run.is_alive() and machine.asked == []
        fcntl.flock(held, fcntl.LOCK_UN)
        run.join(PATIENCE)
    assert machine.own.stands


def test_what_another_set_up_has_done_meanwhile_is_not_done_again(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.run()
    machine.own.stamp.rename(machine.repo / "stamp")
    with (machine.own.notes / "lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        run = threading.Thread(target=machine.run)
        run.start()
        wait_for_words(capsys, "waiting for it")
        (machine.repo / "stamp").rename(machine.own.stamp)
        fcntl.flock(held, fcntl.LOCK_UN)
        run.join(PATIENCE)
    assert not run.is_alive() and machine.asked == []


def test_a_python_without_ensurepip_is_told_the_debian_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SetupError, match="apt-get install python3-venv"):
        Environment(tmp_path, "cpu").ensure()


def test_other_platforms_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environment.platform, "machine", lambda: "riscv64")
    with pytest.raises(SetupError, match="riscv64"):
        Environment(tmp_path, "cpu").ensure()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_set_up_leaves_the_lock_to_the_pip_that_is_still_at_work(tmp_path: Path) -> None:
    script = f"""
import pathlib
from pdlab.setup.console import Progress
from pdlab.setup.runner import guard, run
folder = pathlib.Path({str(tmp_path)!r})
with guard(folder / "lock", "waiting"), Progress("step") as progress:
    run(["sh", "-c", f"touch {{folder}}/started; sleep 1; touch {{folder}}/ended"], folder / "log", progress)
"""
    process = subprocess.Popen([sys.executable, "-c", script], cwd=repo_root())
    while process.poll() is None and not (tmp_path / "started").exists():
        time.sleep(0.02)
    process.kill()
    process.wait()
    with runner.guard(tmp_path / "lock", "waiting for it"):
        assert (tmp_path / "ended").exists()
