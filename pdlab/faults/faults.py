"""All faults by name; producing one; and what came of each, kept in `data/faults.json`."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdlab.errors import PdlabError, must
from pdlab.faults.outcome import Outcome, Seen
from pdlab.paths import repo_root

if TYPE_CHECKING:
    from pdlab.faults.hands import Hands
    from pdlab.lab.lab import Lab

OPEN = "open in 0.33"
# By module of this package; with each, what is known of it in vLLM after 0.32.0.
NAMES: dict[str, dict[str, str]] = {
    "halves": {
        "eos_on_prefill": f"{OPEN}; vllm-project/vllm#46008 would have P send all the same",
        "prefill_refuses": "",
        "decode_refuses": "",
        "decode_never_comes": "",
        "decode_comes_late": OPEN,
        "wrong_engine_id": "",
        "dead_bootstrap": "",
        "foreign_bootstrap": "",
        "one_transfer_two_prompts": "",
        "several_answers": "",
        "stalled_senders": "",
        "client_parameters": "",
        "short_prompts": "",
    },
    "processes": {
        "prefill_killed": "",
        "prefill_restarted": "",
        "decode_killed": "",
        "client_leaves": "0.33 settles every peer of a pull before D's blocks are freed",
        "swapped_roles": "",
        "incomplete_parameters": "",
    },
    "pairs": {
        "other_models": "",
        "other_layouts": "",
        "recompute_policy": "",
    },
    "pools": {"write_fails": "", "preemption": "", "queue_full": "", "chunked_prefill": ""},
}
FAULTS = tuple(name for names in NAMES.values() for name in names)


def produce(lab: "Lab", name: str) -> Outcome:
    """See `Lab.fault`.

    Raises:
        PdlabError: there is no such fault, the lab was joined, or requests are under way on it.
        Refuted: these engines do otherwise than pdlab says; or the next answer is wrong.
    """
    function, upstream = _function(name)
    from pdlab.faults.hands import Hands, quietly

    hands = Hands(lab)
    if busy := lab.heal(quietly).under_way:
        raise PdlabError(f"{busy} requests are under way", "let them end first")
    right = hands.right
    try:
        seen = function(hands)
    finally:
        healed = lab.heal(quietly)
    must(not healed.under_way, f"{healed.under_way} requests are still under way")
    title = str(function.__doc__).strip().removesuffix(".")
    after = hands.send()[0]
    must(after.token_ids == right, f"the next answer is wrong: {after}")
    return Outcome(name, title, seen.stock, seen.pdlab, upstream, seen.facts, healed, seen.journey)


def _function(name: str) -> tuple[Callable[["Hands"], Seen], str]:
    from importlib import import_module

    for module, names in NAMES.items():
        if name in names:
            return getattr(import_module(f"pdlab.faults.{module}"), name), names[name]
    raise PdlabError(f"there is no fault {name!r}", f"choose one of {', '.join(FAULTS)}")


# What came of each, kept ----------------------------------------------------------------------------------------------


def path() -> Path:
    return repo_root() / "data" / "faults.json"


def keep(outcomes: Iterable[Outcome], about: dict[str, Any]) -> Path:
    """Write what came of these faults; of the others what came last stays."""
    kept = stored()["faults"] if path().exists() else {}
    for outcome in outcomes:
        said = outcome.as_dict()
        kept[outcome.fault] = {key: said[key] for key in ("title", "stock", "pdlab", "after", "upstream")}
    ordered = {name: kept[name] for name in FAULTS if name in kept}
    path().write_text(json.dumps({"about": about, "faults": ordered}, indent=1, ensure_ascii=False) + "\n")
    return path()


def stored() -> dict[str, Any]:
    """{about, faults: {name: {title, stock, pdlab, after, upstream}}}: what came of them last.

    Raises:
        PdlabError: there is no such file.
    """
    try:
        return dict(json.loads(path().read_text()))
    except (OSError, ValueError):
        raise PdlabError(f"there is no {path()}", "python3 -m pdlab faults --keep makes it") from None
