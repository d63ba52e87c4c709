"""`python3 -m pdlab claims`: every claim, decided on live engines."""

import textwrap
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pdlab.claims import checks
from pdlab.claims.bench import Bench
from pdlab.errors import PdlabError, Refuted
from pdlab.paths import repo_root
from pdlab.source.anchors import ANCHORS


@dataclass(frozen=True)
class Claim:
    """Attributes:
    id: as "1a"; claim: what is claimed, in our words.
    verdict: what holds in the installed version; note: with which limits.
    check: name of the function of pdlab.claims.checks that decides it.
    """

    id: str
    claim: str
    verdict: str
    check: str
    note: str = ""

    @property
    def anchor(self) -> str | None:
        """Where in the source it is decided, as file:line; None where it is no claim on code."""
        anchor = ANCHORS.get(f"claim.{self.id}")
        if anchor is None:
            return None
        place = anchor.resolve()
        return f"{place.file}:{place.marked_first}"


@dataclass(frozen=True)
class Decided:
    """A claim, and what its check found. `confirmed`: the verdict holds on these engines."""

    claim: Claim
    confirmed: bool
    evidence: str

    def as_dict(self) -> dict[str, Any]:
        claim = self.claim
        return {
            "id": claim.id, "claim": claim.claim, "verdict": claim.verdict if self.confirmed else "not confirmed",
            "note": claim.note, "anchor": claim.anchor, "check": claim.check, "evidence": self.evidence,
        }  # fmt: skip


def claims() -> list[Claim]:
    """The claims of data/claims.toml. PdlabError if they are not there."""
    path = repo_root() / "data" / "claims.toml"
    try:
        return [Claim(**fields) for fields in tomllib.loads(path.read_text())["claim"]]
    except OSError:
        raise PdlabError(f"there is no {path}", "run it from a clone of the repository") from None


def decide(claim: Claim, bench: Bench) -> Decided:
    """Run the check of one claim."""
    check: Callable[[Bench], str] = getattr(checks, claim.check)
    try:
        return Decided(claim, True, check(bench))
    except Refuted as refuted:
        return Decided(claim, False, str(refuted))


def decide_all(bench: Bench) -> Iterator[Decided]:
    """Decide claim after claim, in their order."""
    for claim in claims():
        yield decide(claim, bench)


def render(decided: Iterable[Decided]) -> Iterator[str]:
    """A block of lines for each claim, as it is decided."""
    for each in decided:
        fields = each.as_dict()
        yield f"{fields['id']:<4} {fields['verdict'].upper()}: {fields['claim']}"
        for key in ("note", "evidence", "anchor"):
            if fields[key]:
                yield from textwrap.wrap(
                    f"{key:<9} {fields[key]}", 116, initial_indent="     ", subsequent_indent=" " * 15
                )  # fmt: skip
