"""`bench overhead` around its engines: what is left of its lab, and what is no measurement. No engines."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from pdlab.bench import overhead
from pdlab.errors import RequestError
from pdlab.lab import record as records

PROXY: Any = SimpleNamespace(proxy=SimpleNamespace(url="http://proxy"))
ERROR = {"error": {"message": "no engine has registered yet"}}


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where labs are kept; `up` makes one that answers nothing."""

    @contextmanager
    def up(_: str | None, *, name: str, trace: bool) -> Iterator[SimpleNamespace]:
        (records.folder(name) / "trace").mkdir(parents=True)
        yield SimpleNamespace(prefill="P", decode="D")

    monkeypatch.setenv("PDLAB_STATE", str(tmp_path))
    monkeypatch.setattr(overhead, "pdlab", SimpleNamespace(up=up))
    monkeypatch.setattr(overhead, "switch", lambda instance, on: None)
    monkeypatch.setattr(overhead, "throughput", lambda lab: 2.0)
    return tmp_path / "labs"


def test_its_lab_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "first_token", lambda lab: 1.0)
    assert overhead.measure(4)["ttft_ratio"] == 1.0
    assert list(folder.iterdir()) == []


def test_nor_does_one_that_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "first_token", lambda lab: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        overhead.measure(4)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("measured", [overhead.first_token, overhead.throughput])
def test_an_error_is_no_measurement(measured: Callable[[Any], float], monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [httpx.Response(200, content=iter([b"data: {}\n\n"])) for _ in range(overhead.TOGETHER)]
    client = httpx.Client(transport=httpx.MockTransport(lambda _: answers.pop()))
    for module in ("pdlab.bench.overhead", "pdlab.lab.answer"):
        monkeypatch.setattr(f"{module}.client", lambda: client)
    assert measured(PROXY) > 0
    answers[:] = [httpx.Response(503, json=ERROR) for _ in range(overhead.TOGETHER)]
    with pytest.raises(RequestError, match=r"the proxy answered 503: .*no engine has registered yet"):
        measured(PROXY)
