"""Every claim of data/claims.toml, decided on live engines."""

import pytest

from pdlab.claims import checks
from pdlab.claims.bench import Bench
from pdlab.claims.run import Claim, claims, decide
from pdlab.lab.lab import Lab


@pytest.fixture(scope="module")
def bench(lab: Lab) -> Bench:
    return Bench(lab)


# 4e starts a prefill instance with two data-parallel ranks.
CASES = [pytest.param(claim, id=claim.id, marks=[pytest.mark.slow] if claim.id == "4e" else []) for claim in claims()]


@pytest.mark.parametrize("claim", CASES)
def test_claim(bench: Bench, claim: Claim) -> None:
    decided = decide(claim, bench)
    assert decided.confirmed, decided.evidence
    fields = decided.as_dict()
    assert fields["claim"] and fields["verdict"] == claim.verdict and fields["evidence"]
    assert (fields["anchor"] is None) == (claim.id in ("6", "8"))


def test_a_check_can_refute(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench.plain.step(20).facts, "num_computed_tokens_after", 143)
    claim = next(claim for claim in claims() if claim.id == "5b")
    decided = decide(claim, bench)
    assert not decided.confirmed
    assert decided.as_dict()["verdict"] == "not confirmed"
    assert "(143, 143)" in decided.evidence


def test_every_check_decides_a_claim() -> None:
    named = {claim.check for claim in claims()}
    written = {name for name, value in vars(checks).items() if callable(value) and value.__module__ == checks.__name__}
    assert named == written - {"Refuted", "must", "half"}
