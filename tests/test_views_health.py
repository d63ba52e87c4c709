"""The health panel, without a front end: what it shows of a stand-in lab, and what its buttons do."""

import threading
from collections.abc import Iterator
from typing import Any

import ipywidgets
import pytest

from pdlab import views
from pdlab.errors import PdlabError
from pdlab.lab.heal import Healed
from pdlab.lab.usage import Usage
from pdlab.views.health import HealthPanel
from tests.helpers import wait_until
from tests.test_views_widgets import button, words_of

USED = Usage(blocks=348, used_blocks=87, running=1, waiting=2, parked=3, kept=4, sends=5)


class Engine:
    def __init__(self, usage: Usage) -> None:
        self.now: Usage | None = usage

    def usage(self) -> Usage:
        if self.now is None:
            raise PdlabError("the instance does not say what it holds <refused>", "see lab.status()")
        return self.now


class Lab:
    """What the panel asks of a lab. `heal` waits for `go`, and brings back what has ended."""

    def __init__(self) -> None:
        self.prefill, self.decode = Engine(USED), Engine(Usage(348, 0))
        self.ended: dict[str, str] = {}
        self.there: dict[str, str] = {}
        self.asked: list[str] = []
        self.go = threading.Event()
        self.go.set()

    def status(self) -> dict[str, Any]:
        servers = {key: {"url": "http://127.0.0.1:1", "up": True} for key in ("prefill", "decode", "proxy")}
        for key, why in self.ended.items():
            servers[key] |= {"up": False, "ended": why}
        return {"name": "default", "up": not self.ended, "servers": servers}

    def held(self) -> dict[str, str]:
        return dict(self.there)

    def heal(self, report: Any = None) -> Healed:
        died = tuple(self.ended)
        if report is not None:
            report("prefill", "loading", 3.2)
        assert self.go.wait(20)
        self.ended.clear()
        return Healed(started=died)

    def reset(self) -> None:
        self.asked.append("reset")

    def release(self) -> None:
        self.asked.append("release")
        self.there.clear()


made: list[HealthPanel] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while made:
        made.pop().close()
    wait_until(lambda: not watchers(), "the threads' end")
    ipywidgets.Widget.close_all()


def panel_of(lab: Any) -> HealthPanel:
    made.append(views.health_view(lab))
    return made[-1]


def row_of(panel: HealthPanel, server: str) -> str:
    return next(row for row in panel._table.value.split("<tr>") if f">{server}</b>" in row)


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pdlab-health-panel"]


def test_a_row_a_server_with_what_it_holds() -> None:
    panel = panel_of(Lab())
    prefill, decode, proxy = (row_of(panel, server) for server in ("prefill", "decode", "proxy"))
    assert all("✓ up" in row for row in (prefill, decode, proxy))
    assert "class='P'" in prefill and "class='D'" in decode and "class='proxy'" in proxy
    assert "width: 25%" in prefill and "87 of 348" in prefill and "width: 0%" in decode and "0 of 348" in decode
    assert "".join(f"<td>{count}</td>" for count in (1, 2, 3, 4, 5)) in prefill
    assert "of" not in proxy and "□ nothing is held" in words_of(panel)
    assert repr(panel) == "<health panel: 3 servers>"


def test_who_has_died_or_does_not_answer_is_down_and_no_error() -> None:
    lab = Lab()
    lab.ended = {"prefill": "killed <-9>"}
    lab.decode.now = None
    panel = panel_of(lab)
    assert "✗ down" in row_of(panel, "prefill") and "killed &lt;-9&gt;" in row_of(panel, "prefill")
    assert "✗ down" in row_of(panel, "decode") and "holds &lt;refused&gt;" in row_of(panel, "decode")
    assert "✓ up" in row_of(panel, "proxy") and "⚠" not in words_of(panel)


def test_it_sees_by_itself_what_changes_until_it_is_closed() -> None:
    lab = Lab()
    panel = panel_of(lab)
    lab.there, lab.ended = {"xfer-1": "before_pull"}, {"proxy": "killed"}
    wait_until(lambda: "■ holds 1" in words_of(panel) and "xfer-1 at before_pull" in words_of(panel))
    assert "✗ down" in row_of(panel, "proxy") and watchers()  # it goes on: that can be healed
    panel.close()
    wait_until(lambda: not watchers(), "the thread's end")


def test_heal_says_what_it_does_and_then_what_it_did() -> None:
    lab = Lab()
    lab.ended = {"prefill": "killed"}
    panel = panel_of(lab)
    lab.go.clear()
    click = threading.Thread(target=button(panel, "Heal").click)
    click.start()
    wait_until(lambda: "healing: prefill loading, 3 s" in words_of(panel))
    assert all(button(panel, words).disabled for words in ("Heal", "Reset", "Release"))
    lab.go.set()
    click.join(20)
    assert "&lt;healed: prefill had died: started again; prefix caches emptied&gt;" in words_of(panel)
    assert "✓ up" in row_of(panel, "prefill") and "healing" not in words_of(panel)
    assert not any(button(panel, words).disabled for words in ("Heal", "Reset", "Release"))


def test_a_heal_that_fails_says_why() -> None:
    class Lost(Lab):
        def heal(self, report: Any = None) -> Healed:
            raise PdlabError("no lab 'default' is running", "start it: pdlab.up()")

    panel = panel_of(Lost())
    button(panel, "Heal").click()
    assert "⚠ no lab &#x27;default&#x27; is running" in words_of(panel) and "healing" not in words_of(panel)
    assert not button(panel, "Heal").disabled


def test_reset_and_release() -> None:
    lab = Lab()
    lab.there = {"xfer-1": "before_pull"}
    panel = panel_of(lab)
    button(panel, "Release").click()
    assert lab.asked == ["release"] and "no hold stands" in words_of(panel) and "nothing is held" in words_of(panel)
    button(panel, "Reset").click()
    assert lab.asked == ["release", "reset"] and "both prefix caches are empty" in words_of(panel)


def test_when_all_is_down_it_looks_no_more_until_that_is_healed() -> None:
    lab = Lab()
    panel = panel_of(lab)
    lab.ended = {"prefill": "killed", "decode": "killed", "proxy": "killed"}
    wait_until(lambda: "the lab is down" in words_of(panel))
    wait_until(lambda: not watchers(), "the thread's end")
    button(panel, "Heal").click()
    assert "the lab is down" not in words_of(panel) and len(watchers()) == 1


def test_of_a_lab_that_is_not_traced_it_says_so_once() -> None:
    class Untraced(Lab):
        def held(self) -> dict[str, str]:
            raise PdlabError("this lab is not traced")

    panel = panel_of(Untraced())
    assert "this lab is not traced" in words_of(panel) and "⚠" not in words_of(panel) and watchers()


def test_a_fault_of_ours_is_shown() -> None:
    class Broken(Lab):
        def status(self) -> dict[str, Any]:
            raise KeyError("servers")

    panel = panel_of(Broken())
    assert "⚠ KeyError" in words_of(panel)


def test_a_recorded_lab_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    import pdlab

    monkeypatch.setenv("PDLAB_RUN", "recorded")
    panel = panel_of(pdlab.up(report=lambda *_: None))
    assert not watchers()
    # Whether somebody had asked what the engines held or not: they were up.
    assert all("✓ up" in row_of(panel, server) for server in ("prefill", "decode", "proxy"))
