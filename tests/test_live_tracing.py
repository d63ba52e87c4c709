"""Tracing changes no answer, and a probe that breaks breaks nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import pdlab
from pdlab.errors import PdlabError
from pdlab.lab.lab import Lab
from tests.live import ROOT
from tests.test_live_equality import PROMPTS


@pytest.fixture(scope="module")
def untraced() -> Iterator[Lab]:
    lab = pdlab.up(name="untraced", trace=False)
    yield lab
    lab.down()


def test_twenty_prompts_have_the_same_answers(lab: Lab, untraced: Lab) -> None:
    assert len(PROMPTS) == 20
    for prompt in PROMPTS:
        assert lab.send(prompt, 4, fresh=True).token_ids == untraced.send(prompt, 4, fresh=True).token_ids


def test_an_untraced_lab_says_what_it_cannot(untraced: Lab) -> None:
    journey = untraced.send("1, 2, 3,", 4)
    assert journey.text
    assert journey.events == []
    assert "P worker: no event" in journey.missing
    for asked in (untraced.trace, untraced.release, lambda: untraced.hold("before_write")):
        with pytest.raises(PdlabError, match="not traced"):
            asked()
    assert untraced.decode.kv(0, 0).block_len == 49152  # memory can be read all the same


@pytest.mark.slow
def test_a_broken_probe_is_counted_and_changes_nothing(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDLAB_PROBES", "tests.broken_probes:PROBES")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with pdlab.up(name="broken-probes") as broken:
        for prompt in PROMPTS[:5]:
            journey = broken.send(prompt, fresh=True)
            assert journey.token_ids == lab.send(prompt, fresh=True).token_ids
            assert journey.missing == []
        errors = broken.trace().probe_errors
        assert {"test.before", "test.after", "test.no such symbol"} <= set(errors)
        log = Path(str(broken.decode.log)).read_text()
        assert "pdlab's probe test.before failed (1 so far)" in log
