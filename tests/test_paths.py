"""Where pdlab keeps what it makes."""

from pathlib import Path

import pytest

from pdlab import paths


@pytest.mark.parametrize(
    ("folder", "own", "xdg", "default"),
    [
        (paths.cache_dir, "PDLAB_CACHE", "XDG_CACHE_HOME", ".cache/pdlab"),
        (paths.state_dir, "PDLAB_STATE", "XDG_STATE_HOME", ".local/state/pdlab"),
    ],
)
def test_own_variable_then_xdg_then_home(
    folder, own: str, xdg: str, default: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(own, raising=False)
    monkeypatch.delenv(xdg, raising=False)
    assert folder() == tmp_path / default
    monkeypatch.setenv(xdg, "relative/is/ignored")
    assert folder() == tmp_path / default
    monkeypatch.setenv(xdg, "/x")
    assert folder() == Path("/x/pdlab")
    monkeypatch.setenv(own, "~/mine")
    assert folder() == tmp_path / "mine"
    monkeypatch.setenv(own, "~nobody-of-that-name/mine")
    assert folder() == Path("~nobody-of-that-name/mine").absolute()
    assert not folder().exists()


def test_the_repository_root_holds_pyproject() -> None:
    assert (paths.repo_root() / "pyproject.toml").is_file()
