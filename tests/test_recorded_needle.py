"""Which recorded call answers: in order; and a cell that is run again gets again what it got."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

from pdlab.errors import PdlabError
from pdlab.recorded import needle as needles
from pdlab.recorded.cell import running_cell
from pdlab.recorded.needle import Needle
from pdlab.recorded.recorder import Recorder
from pdlab.recorded.tape import Call
from tests.live import ROOT
from tests.recording import ABOUT, FakeLab

CALLS = [
    Call("up"), Call("metric", 0, {"name": "x"}), Call("status", 0, spare=True), Call("send", 0),
    Call("metric", 0, {"name": "x"}), Call("compare", 0), Call("rewritten", 5), Call("rewritten", 5), Call("metric", 0),
]  # fmt: skip


@pytest.fixture
def needle() -> Needle:
    return Needle(CALLS, "'run'")


def test_in_order_and_then_the_last(needle: Needle) -> None:
    assert [needle.find(0, "metric", {"name": "x"}) for _ in range(4)] == [1, 4, 4, 4]
    assert [needle.find(0, "metric", {}) for _ in range(2)] == [8, 8]


def test_one_that_nobody_made_answers_where_none_that_was_made_does(needle: Needle) -> None:
    assert [needle.find(0, "status", {}) for _ in range(2)] == [2, 2]
    made = Needle([*CALLS, Call("status", 0), Call("status", 0)], "'run'")
    assert [made.find(0, "status", {}) for _ in range(3)] == [9, 10, 10]


def test_an_object_that_is_given_anew_begins_anew(needle: Needle) -> None:
    for _ in range(2):
        assert needle.find(0, "compare", {}) == 5
        assert [needle.find(5, "rewritten", {}) for _ in range(3)] == [6, 7, 7]


def test_none(needle: Needle) -> None:
    for of, path, arguments in ((0, "metric", {"name": "y"}), (5, "metric", {}), (0, "sned", {}), (None, "send", {})):
        with pytest.raises(PdlabError, match="not in the recorded run 'run'"):
            needle.find(of, path, arguments)


def test_similar_calls_are_those_of_the_same_object() -> None:
    calls = [Call("up"), Call("send", 0, {"prompt": "a"}), Call("up"), Call("send", 2, {"prompt": "b"})]
    with pytest.raises(PdlabError) as caught:
        Needle(calls, "'run'").find(2, "send", {"prompt": "c"})
    assert "'b'" in str(caught.value.hint) and "'a'" not in str(caught.value.hint)


class TestCells:
    """By what a front end says of the cell that runs."""

    @pytest.fixture
    def run(self, monkeypatch: pytest.MonkeyPatch, needle: Needle) -> Iterator[Any]:
        runs = iter(range(100))

        def run(cell: str, calls: int = 1) -> list[int]:
            number = next(runs)
            monkeypatch.setattr(needles, "running_cell", lambda: (cell, f"run {number}"))
            return [needle.find(0, "metric", {"name": "x"}) for _ in range(calls)]

        yield run

    def test_a_cell_that_is_run_again_gets_the_same(self, run: Any) -> None:
        assert [run("before"), run("after")] == [[1], [4]]
        assert [run("before"), run("after"), run("after"), run("before")] == [[1], [4], [4], [1]]

    def test_a_new_cell_goes_on(self, run: Any) -> None:
        assert [run("before"), run("new"), run("before"), run("newer")] == [[1], [4], [1], [4]]

    def test_calls_within_a_cell_are_in_order(self, run: Any) -> None:
        assert [run("both", 2), run("later"), run("both", 3)] == [[1, 4], [4], [1, 4, 4]]


def test_where_there_is_no_front_end() -> None:
    assert running_cell() is None


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Runs code as a front end does that says which cell it is of; gives what x is then."""
    for name, value in {"PDLAB_RUN": "recorded", "PDLAB_DATA": str(tmp_path), "PYTHONPATH": str(ROOT)}.items():
        monkeypatch.setenv(name, value)
    manager, client = start_new_kernel(kernel_name="python3")

    def run(cell: str | None, code: str) -> str:
        content = {"code": code, "silent": False, "store_history": False, "user_expressions": {"x": "x"}}
        message = client.session.msg("execute_request", content, metadata={"cellId": cell} if cell else {})
        client.shell_channel.send(message)
        while (reply := client.get_shell_msg(timeout=60))["parent_header"]["msg_id"] != message["header"]["msg_id"]:
            pass
        return str(reply["content"]["user_expressions"]["x"]["data"]["text/plain"])

    yield run
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def test_in_a_kernel(tmp_path: Path, kernel: Any) -> None:
    """JupyterLab says which cell it runs; nbclient and nbval do not."""
    lab: Any = Recorder(tmp_path / "run.json.gz", ABOUT).take(FakeLab(tmp_path / "trace"))  # type: ignore[arg-type]
    assert [lab.prefill.metric("x") for _ in range(3)] == [1, 2, 3]
    up, metric = "import pdlab; x = lab = pdlab.up(run='run')", "x = lab.prefill.metric('x')"
    assert "; recorded 2026" in kernel("up", up)
    assert [kernel("a", metric), kernel("b", metric)] == ["1.0", "2.0"]
    assert [kernel("b", metric), kernel("a", metric), kernel("b", metric)] == ["2.0", "1.0", "2.0"]
    assert [kernel(None, metric), kernel(None, metric)] == ["3.0", "3.0"]
    assert "; recorded 2026" in kernel("up", up) and kernel("b", metric) == "2.0"
