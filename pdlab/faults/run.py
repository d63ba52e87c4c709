"""`python3 -m pdlab faults`: produce them, one after the other, on a lab of their own."""

import json
import os
import sys
from collections.abc import Iterator, Sequence

from pdlab.errors import PdlabError, Refuted
from pdlab.faults.faults import FAULTS, keep
from pdlab.faults.outcome import Outcome
from pdlab.faults.table import into_readme
from pdlab.lab.lab import Lab, up
from pdlab.lab.process import myself
from pdlab.recorded.machine import about

NAME = "all-faults"  # of the lab: chapter 06 has one called "faults"
ABORT_TIMEOUT = 5  # seconds: most of what is seen is that somebody waits for it


def run(names: Sequence[str], keeps: bool, model: str | None, profile: str | None, as_json: bool) -> int:
    """Produce these faults, or all, and say what came of each; 1 if one did not go as described, else 0.

    Raises:
        PdlabError: there is no fault of such a name.
    """
    if unknown := [name for name in names if name not in FAULTS]:
        raise PdlabError(f"there is no fault {unknown[0]!r}", f"choose of {', '.join(FAULTS)}")
    os.environ["PDLAB_OWNER"] = myself()
    outcomes, refuted = [], 0
    with up(model, profile, name=NAME, abort_timeout=ABORT_TIMEOUT) as lab:
        for outcome in produced(lab, names or FAULTS):
            refuted += isinstance(outcome, str)
            if isinstance(outcome, Outcome):
                outcomes.append(outcome)
            print(outcome, file=sys.stderr if as_json else sys.stdout, flush=True)
        if keeps:
            print(keep(outcomes, about(lab)), file=sys.stderr)
            into_readme()
    if as_json:
        print(json.dumps([outcome.as_dict() for outcome in outcomes], indent=1))
    print(f"{len(outcomes)} of {len(outcomes) + refuted} faults went as described", file=sys.stderr)
    return int(refuted > 0)


def produced(lab: Lab, names: Sequence[str]) -> Iterator[Outcome | str]:
    """The outcome of each, or one line on how it went otherwise."""
    for name in names:
        try:
            yield lab.fault(name)
        except Refuted as refuted:
            yield f"{name}: NOT AS DESCRIBED: {refuted}"
        except PdlabError as error:
            yield f"{name}: NOT PRODUCED: {error.message}"
        except Exception as error:  # what engines do that misbehave: the others are produced all the same
            yield f"{name}: NOT PRODUCED: {error!r}"
