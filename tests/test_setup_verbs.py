"""libibverbs: what is done about it, for each kind of machine."""

from pathlib import Path

import pytest

from pdlab.setup import verbs
from pdlab.setup.console import SetupError
from pdlab.setup.runner import Result
from pdlab.setup.verbs import Remedy, remedy

APT = "apt-get install -y libibverbs1"


@pytest.mark.parametrize(
    ("root", "conda", "programs", "expected"),
    [
        (True, False, {"apt-get"}, Remedy(APT, automatic=True)),
        (False, False, {"apt-get", "sudo"}, Remedy(f"sudo {APT}")),
        (False, False, {"apt-get"}, Remedy(f"{APT} (as root)")),
        (True, False, {"dnf", "yum"}, Remedy("dnf install -y libibverbs")),
        (False, False, {"zypper", "sudo"}, Remedy("sudo zypper install -y libibverbs1")),
        (True, False, {"pacman"}, Remedy("pacman -S rdma-core")),
        (True, True, {"apt-get"}, Remedy("conda install -c conda-forge rdma-core")),
        (True, False, set(), Remedy("")),
    ],
)
def test_remedy(root: bool, conda: bool, programs: set[str], expected: Remedy) -> None:
    assert remedy(root, conda, programs.__contains__) == expected


def machine(monkeypatch: pytest.MonkeyPatch, loads: list[bool], root: bool) -> list[list[str]]:
    """A machine with apt-get; `loads` says, look by look, whether the library is there. Gives what is run."""
    ran: list[list[str]] = []

    def run(command: list[str], *_: object, **__: object) -> Result:
        ran.append(command)
        return Result(0, "")

    monkeypatch.setattr(verbs, "loads", lambda: loads.pop(0))
    monkeypatch.setattr(verbs, "run", run)
    monkeypatch.setattr(verbs.os, "geteuid", lambda: 0 if root else 1000)
    monkeypatch.setattr(verbs.shutil, "which", lambda name: name in ("apt-get", "sudo") or None)
    monkeypatch.setattr(verbs.sys, "base_prefix", "/usr")
    return ran


def test_where_it_loads_nothing_is_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran = machine(monkeypatch, [True], root=True)
    verbs.ensure(tmp_path / "log")
    assert ran == []


def test_root_with_apt_gets_it_installed_and_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = machine(monkeypatch, [False, True], root=True)
    verbs.ensure(tmp_path / "log")
    assert [command[2] for command in ran] == ["update", "install"]
    assert ran[1][-2:] == ["--no-install-recommends", "libibverbs1"]
    assert "installing Debian's libibverbs1" in capsys.readouterr().err


def test_others_get_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran = machine(monkeypatch, [False, False], root=False)
    with pytest.raises(SetupError, match=f"sudo {APT}") as caught:
        verbs.ensure(tmp_path / "log")
    assert ran == [] and "\n" not in str(caught.value)


def test_an_apt_that_fails_ends_in_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(monkeypatch, [False, False], root=True)
    with pytest.raises(SetupError, match=APT):
        verbs.ensure(tmp_path / "log")


def test_condas_library_is_put_on_the_engines_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / verbs.LIBRARY).touch()
    monkeypatch.setattr(verbs.sys, "base_prefix", str(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/other")
    monkeypatch.setattr(verbs.ctypes, "CDLL", no_library)
    assert verbs.loads()
    assert verbs.os.environ["LD_LIBRARY_PATH"] == f"{tmp_path}/lib:/other"


def no_library(name: str) -> None:
    raise OSError(f"{name}: cannot open shared object file")
