"""A journey in words, for a terminal and for a notebook's plain output."""

from typing import TYPE_CHECKING

from pdlab.trace.steps import NUMBERS

if TYPE_CHECKING:
    from pdlab.trace.journey import Journey

# Who comes first, and whether P is known already, depends on the moment and on what ran before: for an outline.
VARYING = {
    4: "P's worker expects a pull under the transfer_id",
    11: "D's worker knows P's address",
    13: "P's worker matches it by the transfer_id",
}


def line(journey: "Journey") -> str:
    """One line: how long the prompt was, how far it came, what moved, what was answered."""
    came = len({step.number for step in journey.steps})
    words = [f"{journey.prompt_tokens} prompt tokens"] if journey.prompt_tokens else []  # else no engine has it yet
    words.append(f"{came} of {len(NUMBERS)} steps")
    if journey.bytes_moved:
        blocks = sum(len(write.source_blocks) for write in journey.writes if write.layer == 0)
        words.append(f"{'1 block' if blocks == 1 else f'{blocks} blocks'} moved, {journey.bytes_moved:,} bytes")
    if journey.held:
        words.append(f"held at {journey.held}")
    elif failure := journey.failure:
        words.append(f"failed: {failure}")
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
        f"{s.time * 1e3:9.1f} ms  {s.number:>2}  {s.actor:<11}  {s.title}: {s.says}{_thread(s.thread)}"
        for s in journey.steps
    ]
    return "\n".join([line(journey), *rows, *_absent(journey)])


def outline(journey: "Journey") -> str:
    """The same by number, without what differs from run to run."""
    steps = sorted(
        journey.steps, key=lambda step: (step.number, step.actor != "P scheduler", str(step.facts.get("role")))
    )
    rows = [f"{s.number:>2}  {s.actor:<11}  {VARYING.get(s.number) or f'{s.title}: {s.says}'}" for s in steps]
    return "\n".join([*rows, *_absent(journey)])


def _absent(journey: "Journey") -> list[str]:
    return [f"    missing: {what}" for what in journey.missing] if journey.done else []


def _thread(name: str) -> str:
    """The thread, where it tells something: pools and servers have names."""
    return "" if name == "MainThread" or name.startswith("Thread-") else f"  [{name}]"
