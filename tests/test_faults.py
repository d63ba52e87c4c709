"""The list of faults and its table; no engines (see tests/test_06_when_it_breaks.py)."""

import json
from importlib import import_module
from pathlib import Path

import pytest

from pdlab.errors import PdlabError
from pdlab.faults import FAULTS, Outcome, Table, faults, produce, stored
from pdlab.faults.faults import NAMES
from pdlab.faults.table import BEGIN, END, into_readme
from pdlab.lab.healed import Healed
from pdlab.lab.lab import Lab
from tests.recording import FakeLab

HEALED = Healed(("prefill",), ("decode",))
OUTCOME = Outcome("eos_on_prefill", "P stops", "500 | after 5 s", "200", "open", {"seconds": 5.0}, HEALED, True)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `data/faults.json` of the test's own."""
    monkeypatch.setattr(faults, "path", lambda: tmp_path / "faults.json")
    return tmp_path / "faults.json"


@pytest.mark.parametrize("module", NAMES)
def test_each_is_a_function_that_says_in_a_line_what_happens(module: str) -> None:
    pytest.importorskip("psutil")
    for name in NAMES[module]:
        says = getattr(import_module(f"pdlab.faults.{module}"), name).__doc__
        assert says and says.endswith(".") and "\n" not in says


def test_what_came_of_each_is_kept_in_their_order() -> None:
    assert tuple(stored()["faults"]) == FAULTS
    assert stored()["about"]["versions"]["vllm"] == "0.32.0"
    assert all("right" in row["after"] for row in stored()["faults"].values())


def test_keeping_one_leaves_the_others(data: Path) -> None:
    about = {"versions": {"vllm": "0.32.0"}}
    later = Outcome("queue_full", "full", "waits", "waits", "", {}, Healed(), True)
    for outcome in (later, OUTCOME):
        faults.keep([outcome], about)
    assert list(json.loads(data.read_text())["faults"]) == ["eos_on_prefill", "queue_full"]


def test_an_outcome_in_words() -> None:
    assert repr(OUTCOME).splitlines() == [
        "eos_on_prefill: P stops",
        "  stock     500 | after 5 s",
        "  pdlab     200",
        "  after     healed: prefill and decode, which kept its blocks, started again; the next answer is right",
        "  upstream  open",
    ]
    assert json.loads(json.dumps(OUTCOME.as_dict()))["facts"] == {"seconds": 5.0}


def test_the_table(data: Path) -> None:
    faults.keep([OUTCOME], {"versions": {"vllm": "0.32.0"}})
    table = Table()
    assert len(table) == 1 and "P stops" in repr(table)
    head, _, row = table.markdown().splitlines()
    assert "stock vLLM 0.32.0" in head
    assert row.startswith(r"| `eos_on_prefill`: P stops | 500 \| after 5 s (open) | 200 |")
    assert len(Table("queue_full")) == 0


def test_it_is_written_into_the_readme_and_nothing_else_is(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults.keep([OUTCOME], {"versions": {"vllm": "0.32.0"}})
    monkeypatch.setattr("pdlab.faults.table.repo_root", lambda: tmp_path)
    readme = tmp_path / "README.md"
    for text in (f"a\n{BEGIN}old{END}\nb", f"a\n{BEGIN}{END}\nb"):
        readme.write_text(text)
        into_readme()
        assert readme.read_text() == f"a\n{BEGIN}{Table().markdown()}{END}\nb"
    readme.write_text("no marks")
    into_readme()
    assert readme.read_text() == "no marks"


@pytest.mark.parametrize("name", ["", "nope", "eos_on_prefil", "hands", None, 3])
def test_one_that_does_not_exist(tmp_path: Path, name: str) -> None:
    lab: Lab = FakeLab(tmp_path)  # type: ignore[assignment]
    with pytest.raises(PdlabError, match=r"there is no fault .*\n  choose one of eos_on_prefill, "):
        produce(lab, name)


def test_of_instances_that_were_started_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("psutil")
    lab: Lab = FakeLab(tmp_path)  # type: ignore[assignment]
    lab.settings = None
    with pytest.raises(PdlabError, match="started elsewhere"):
        produce(lab, "eos_on_prefill")


def test_nothing_kept(data: Path) -> None:
    with pytest.raises(PdlabError, match="pdlab faults --keep makes it"):
        Table()
