"""The system libraries under Mooncake: what is done about one that is missing, for each kind of machine."""

from pathlib import Path

import pytest

from pdlab.setup import libraries
from pdlab.setup.console import SetupError
from pdlab.setup.libraries import LIBRARIES, remedy
from pdlab.setup.runner import Result

VERBS, NUMA, CURL = LIBRARIES
APT = "apt-get install -y libibverbs1"


@pytest.mark.parametrize(
    ("root", "conda", "programs", "expected"),
    [
        (True, False, {"apt-get"}, APT),
        (False, False, {"apt-get", "sudo"}, f"sudo {APT}"),
        (False, False, {"apt-get"}, f"su -c '{APT}'"),
        (True, False, {"dnf", "conda"}, "dnf install -y libibverbs"),
        (False, False, {"zypper", "sudo"}, "sudo zypper install -y libibverbs1"),
        (True, False, {"pacman"}, "pacman -S rdma-core"),
        (True, True, {"apt-get"}, "conda install -c conda-forge rdma-core"),
        (False, True, {"apt-get", "sudo"}, "conda install -c conda-forge rdma-core"),
        (True, False, set(), ""),
    ],
)
def test_remedy(
    root: bool, conda: bool, programs: set[str], expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if conda:
        (tmp_path / "conda-meta").mkdir()
    monkeypatch.setattr(libraries, "PREFIX", tmp_path)
    monkeypatch.setattr(libraries.os, "geteuid", lambda: 0 if root else 1000)
    monkeypatch.setattr(libraries.shutil, "which", lambda name: name in programs or None)
    assert remedy([VERBS]) == expected


class Machine:
    """A machine with apt-get, where `missing` doesn't load; `cure`: apt-get helps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, missing: set[str], root: bool, cure: bool = True) -> None:
        self.missing = missing
        self.cure = cure
        self.ran: list[list[str]] = []
        monkeypatch.setattr(libraries.ctypes, "CDLL", self.load)
        monkeypatch.setattr(libraries, "run", self.run)
        monkeypatch.setattr(libraries.os, "geteuid", lambda: 0 if root else 1000)
        monkeypatch.setattr(libraries.shutil, "which", lambda name: name in ("apt-get", "sudo") or None)
        monkeypatch.setattr(libraries, "PREFIX", Path("/usr"))

    def load(self, name: str) -> None:
        if name in self.missing:
            raise OSError(f"{name}: cannot open shared object file")

    def run(self, command: list[str], *_: object, **__: object) -> Result:
        self.ran.append(command)
        if self.cure and "install" in command:
            self.missing.clear()
        return Result(0, "")


def test_where_all_load_nothing_is_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = Machine(monkeypatch, set(), root=True)
    libraries.ensure(tmp_path / "log")
    assert machine.ran == []


def test_root_with_apt_gets_them_installed_and_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(monkeypatch, {VERBS, NUMA}, root=True)
    libraries.ensure(tmp_path / "log")
    assert machine.ran == [
        ["apt-get", "-q", "update"],
        ["apt-get", "install", "-y", "libibverbs1", "libnuma1", "--no-install-recommends"],
    ]
    assert "installing libibverbs1 libnuma1 with apt-get" in capsys.readouterr().err


def test_others_get_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = Machine(monkeypatch, {VERBS}, root=False)
    with pytest.raises(SetupError, match=f"{VERBS}: run `sudo {APT}`") as caught:
        libraries.ensure(tmp_path / "log")
    assert machine.ran == [] and "\n" not in str(caught.value)


def test_an_apt_that_fails_ends_in_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Machine(monkeypatch, {VERBS}, root=True, cure=False)
    with pytest.raises(SetupError, match=APT):
        libraries.ensure(tmp_path / "log")


def test_condas_libraries_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Machine(monkeypatch, {VERBS, CURL}, root=True)
    monkeypatch.setattr(libraries, "PREFIX", tmp_path)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / VERBS).touch()
    assert libraries.absent() == [VERBS, CURL]  # not a conda environment: not looked at
    (tmp_path / "conda-meta").mkdir()
    assert libraries.absent() == [CURL]
