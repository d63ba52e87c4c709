"""What came of a fault that was produced on purpose."""

from dataclasses import dataclass, field
from typing import Any

from pdlab.lab.healed import Healed
from pdlab.trace.journey import Journey


@dataclass(frozen=True)
class Seen:
    """What a fault's function saw.

    Attributes:
        stock: what stock engines do, asked directly, as by the proxy of vLLM's examples.
        pdlab: what a client of pdlab's proxy gets, and what becomes of the blocks.
        facts: numbers behind these sentences.
        journey: of the request that went through the proxy; None: none did.
    """

    stock: str
    pdlab: str
    facts: dict[str, Any] = field(default_factory=dict)
    journey: Journey | None = None


@dataclass(frozen=True)
class Outcome:
    """A fault, as it went on these engines.

    Attributes:
        fault: its name; title: what happens.
        stock, pdlab, facts, journey: as in `Seen`.
        upstream: what is known of it in vLLM after 0.32.0; "": nothing.
        healed: what `Lab.heal` had to do afterwards; the next request had the right answer.
    """

    fault: str
    title: str
    stock: str
    pdlab: str
    upstream: str
    facts: dict[str, Any]
    healed: Healed
    journey: Journey | None = None

    @property
    def after(self) -> str:
        """The lab, afterwards, in words."""
        again = [*self.healed.started, *(f"{role}, which kept its blocks," for role in self.healed.stuck)]
        again += ["prefill, whose writes failed,"] if self.healed.mute else []
        lab = f"healed: {' and '.join(again)} started again" if again else "all blocks came back by themselves"
        return f"{lab}; the next answer is right"

    def as_dict(self) -> dict[str, Any]:
        """What `data/faults.json` and `--json` say of it."""
        said = ("title", "stock", "pdlab", "after", "upstream", "facts")
        return {"fault": self.fault, **{name: getattr(self, name) for name in said}}

    def __repr__(self) -> str:
        rows = [("stock", self.stock), ("pdlab", self.pdlab), ("after", self.after), ("upstream", self.upstream)]
        return "\n".join([f"{self.fault}: {self.title}", *(f"  {name:<9} {text}" for name, text in rows if text)])
