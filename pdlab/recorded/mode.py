"""`pdlab.up()`, `attach()` and `join()`: live engines, live ones that are recorded, or a recorded run.

$PDLAB_RUN says which. Nothing of `pdlab.lab` is imported before it is known that engines are wanted.
"""

import os
from typing import TYPE_CHECKING, Any, cast

from pdlab.errors import PdlabError

if TYPE_CHECKING:
    from pdlab.lab.lab import Lab
    from pdlab.lab.startup import Report

LIVE, RECORDED, RECORD = MODES = ("live", "recorded", "record")


def mode() -> str:
    """What $PDLAB_RUN asks for; unset: "live".

    Raises:
        PdlabError: something that is none of the three.
    """
    chosen = os.environ.get("PDLAB_RUN") or LIVE
    if chosen not in MODES:
        raise PdlabError(
            f"PDLAB_RUN is {chosen!r}", f"choose one of {', '.join(MODES)}; unset it for engines that are live"
        )
    return chosen


def up(
    model: str | None = None,
    profile: str | None = None,
    *,
    name: str = "default",
    run: str | None = None,
    report: "Report | None" = None,
    **choices: Any,
) -> "Lab":
    """Attach to the running lab, or start one and return when it answers; or play a recorded one.

    Args:
        model: path of a checkpoint, or a hub name; None: SmolLM2-135M-Instruct.
        profile: "cpu" or "cuda"; None: what this machine has.
        name: labs of other names run beside each other.
        run: which run is recorded or played, data/RUN.json.gz; None: the one used last, at first "journey". Live
            engines do not ask.
        report: called with (server, stage, seconds) while waiting; None: shown where this runs.
        choices: further fields of `pdlab.lab.settings.Settings`: dtype, max_model_len, kv_cache_bytes …

    Raises:
        StartError: an engine did not start; nothing is left of it.
        MismatchError: the two engines are no pair (with a model folder that changed between their starts, say).
        PdlabError: the running or recorded lab has other settings than those asked for, a setting is impossible, or
            there is no such recorded run.
    """
    chosen = mode()
    if chosen == RECORDED:
        return _played(run, name, {"model": model, "profile": profile, **choices}, report)
    from pdlab.lab.lab import up as live

    return _noted(live(model, profile, name=name, report=report, **choices), run, name, chosen)


def attach(name: str = "default", *, run: str | None = None) -> "Lab":
    """The running lab of that name; or the recorded one, as `up` has it.

    Raises:
        PdlabError: there is none, or a server of it died.
    """
    chosen = mode()
    if chosen == RECORDED:
        return _played(run, name, {}, None)
    from pdlab.lab.lab import attach as live

    return _noted(live(name), run, name, chosen)


def join(*, prefill: str, decode: str, bootstrap: str) -> "Lab":
    """A lab of instances that run elsewhere; see `pdlab.lab.join.join`. Live only.

    Raises:
        PdlabError: a URL is none, an instance does not answer, or a run is played or recorded.
        MismatchError: the two must not be paired.
    """
    if (chosen := mode()) != LIVE:
        raise PdlabError(f"pdlab.join() is live only, and PDLAB_RUN is {chosen!r}", "unset PDLAB_RUN")
    from pdlab.lab.join import join as live

    return live(prefill=prefill, decode=decode, bootstrap=bootstrap)


def _played(run: str | None, name: str, asked: dict[str, Any], report: "Report | None") -> "Lab":
    from pdlab.recorded.player import play

    return cast("Lab", play(run, name, asked, report))  # it answers as a lab does


def _noted(lab: "Lab", run: str | None, name: str, chosen: str) -> "Lab":
    if chosen == LIVE:
        return lab
    from pdlab.recorded.recorder import record

    return cast("Lab", record(lab, run, name))
