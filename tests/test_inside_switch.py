"""Probes taken out and put in again: what is measured against is vLLM as it is."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from pdlab.inside import tracer
from pdlab.inside.endpoint import Refused, switch_argument


def test_off_is_as_it_was_and_on_is_wrapped_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Thing:
        def method(self) -> str:
            return "bare"

    monkeypatch.setattr(tracer, "_places", {})
    monkeypatch.setitem(sys.modules, "made_up", SimpleNamespace(Thing=Thing))  # type: ignore[arg-type]
    bare = Thing.method
    for word in ("once", "twice"):
        tracer.wrap("made_up:Thing.method", lambda there, word=word: lambda self: f"{there(self)}, {word}")  # type: ignore[misc]
    assert Thing().method() == "bare, once, twice"
    tracer.switch(False)
    assert Thing.method is bare and tracer.is_off()
    tracer.switch(True)
    assert Thing().method() == "bare, once, twice" and not tracer.is_off()


@pytest.mark.parametrize("body", [None, {}, {"on": 1}, {"on": "yes"}, {"on": True, "more": 1}, [True]])
def test_other_bodies_are_refused(body: Any) -> None:
    with pytest.raises(Refused):
        switch_argument(body)
    assert switch_argument({"on": False}) == (False,)
