"""A journey in words, for a terminal and for a notebook's plain output."""

from typing import TYPE_CHECKING

from pdlab.trace.steps import NUMBERS

if TYPE_CHECKING:
    from pdlab.trace.journey import Journey


def line(journey: "Journey") -> str:
    """One line: how long the prompt was, how far it came, what moved, what was answered."""
    came = len({step.number for step in journey.steps})
    words = [f"{journey.prompt_tokens} prompt tokens", f"{came} of {len(NUMBERS)} steps"]
    if journey.bytes_moved:
        blocks = sum(len(write.source_blocks) for write in journey.writes if write.layer == 0)
        words.append(f"{'1 block' if blocks == 1 else f'{blocks} blocks'} moved, {journey.bytes_moved:,} bytes")
    if journey.held:
        words.append(f"held at {journey.held}")
    elif journey.error:
        words.append(f"failed: {str(journey.error).splitlines()[0]}")
    elif journey.has_text:
        words.append(repr(journey.text))
    elif journey.done:
        words.append("answered")
    else:
        words.append("under way")
    return f"<Journey: {', '.join(words)}{recorded(journey)}>"


def recorded(journey: "Journey") -> str:
    """What every display of a recorded journey says of it; "" for a live one."""
    about = journey.about
    return f"; recorded {about['when']} on {about['where']}" if about else ""


def told(journey: "Journey") -> str:
    """Its steps by time, each with its actor, its thread and what it did."""
    rows = [
        f"{step.time * 1e3:9.1f} ms  {step.number:>2}  {step.actor:<11}  {step.title}: {step.says}  [{step.thread}]"
        for step in journey.steps
    ]
    return "\n".join([line(journey), *rows, *_absent(journey)])


def outline(journey: "Journey") -> str:
    """The same by number, without what differs from run to run."""
    steps = sorted(
        journey.steps, key=lambda step: (step.number, step.actor != "P scheduler", str(step.facts.get("role")))
    )
    # Known from an earlier request, or asked now: that depends on what ran before.
    rows = [
        f"{s.number:>2}  {s.actor:<11}  {'D knows P' if s.number == 11 else s.title + ': ' + s.says}" for s in steps
    ]
    return "\n".join([*rows, *_absent(journey)])


def _absent(journey: "Journey") -> list[str]:
    return [f"    missing: {what}" for what in journey.missing] if journey.done else []
