"""The sequence diagram of a journey: five actors, what each did, and what went from one to another."""

from pdlab.trace.event import ACTORS
from pdlab.trace.journey import Journey
from pdlab.trace.steps import Step
from pdlab.views.failed import add_failure
from pdlab.views.picture import Picture

LEFT, COLUMN, TOP, ROW = 70, 190, 64, 30
ROLES = {"proxy": "proxy", "P scheduler": "P", "P worker": "P", "D scheduler": "D", "D worker": "D"}
# What arrives with a step, and from whom.
FROM = {
    (2, "P scheduler"): ("proxy", "do_remote_decode"),
    (2, "D scheduler"): ("proxy", "do_remote_prefill"),
    (4, "P worker"): ("P scheduler", "transfer_id, no blocks"),
    (6, "P worker"): ("P scheduler", "block ids"),
    (11, "D worker"): ("D scheduler", "blocks to fill"),
    (13, "P worker"): ("D worker", "addresses, block ids"),
    (15, "P worker"): ("D worker", "KV"),
    (17, "P scheduler"): ("P worker", "sent"),
    (18, "D worker"): ("P worker", "FINISH"),
    (19, "D scheduler"): ("D worker", "received"),
}
# Who waits: from one step to another, on whose line, for what.
WAITS = (
    (9, 20, "D scheduler", "parked: holds its blocks, computes nothing"),
    (5, 17, "P scheduler", "finished, and keeps the blocks until they are sent"),
    (13, 14, "P worker", "the pull waits until P is ready"),
)


def sequence(journey: Journey, to_scale: bool = False) -> Picture:
    """The diagram, a row a step; or with distances to scale, where time is what counts.

    Args:
        to_scale: whether distance from top to bottom is time.
    """
    steps = journey.steps
    rows = _rows(steps, to_scale)
    height = int(rows[-1] + 40) if rows else TOP + 40
    picture = Picture(LEFT + COLUMN * len(ACTORS), height, _line(journey, to_scale))
    for actor in ACTORS:
        x = _x(actor)
        picture.text(x, 24, actor, role=ROLES[actor], bold=True, size=14, anchor="middle")
        picture.add("line", x, 34, x, height - 12, role="line")
    _waits(picture, steps, rows)
    for index, (step, y) in enumerate(zip(steps, rows, strict=True)):
        _step(picture, index, step, y)
    add_failure(picture, journey)
    return picture


def _x(actor: str) -> float:
    return LEFT + COLUMN * (ACTORS.index(actor) + 0.5) - 20


def _rows(steps: list[Step], to_scale: bool) -> list[float]:
    """Where each step is, from the top: evenly, or by its time as far as its label leaves room."""
    if not to_scale or not steps:
        return [TOP + ROW * index for index in range(len(steps))]
    whole = max(steps[-1].time, 1e-6)
    rows: list[float] = []
    for step in steps:
        wanted = TOP + step.time / whole * ROW * len(steps) * 1.5
        rows.append(max(wanted, rows[-1] + 15) if rows else wanted)
    return rows


def _waits(picture: Picture, steps: list[Step], rows: list[float]) -> None:
    place = {(step.number, step.actor): y for step, y in zip(steps, rows, strict=True)}
    order = {(step.number, step.actor): index for index, step in enumerate(steps)}
    for first, last, actor, why in WAITS:
        began, ended = place.get((first, actor)), place.get((last, actor))
        if began is None or (ended is not None and ended < began):
            continue
        bottom = ended if ended is not None else picture.height - 14
        picture.add(
            "rect", _x(actor) - 6, began, 12, max(bottom - began, 4), role=ROLES[actor], fill="hatch", label=why,
            since=order[first, actor],
        )  # fmt: skip


def _step(picture: Picture, index: int, step: Step, y: float) -> None:
    role, x = ROLES[step.actor], _x(step.actor)
    if (step.number, step.actor) in FROM:
        sender, what = FROM[step.number, step.actor]
        # The write goes from P's worker to D's: the other way round than a message that arrives.
        start, end = (_x(step.actor), _x(sender)) if step.number == 15 else (_x(sender), _x(step.actor))
        way = 1 if end > start else -1
        picture.add(
            "arrow", start + 8 * way, y, end - 9 * way, y, role=ROLES[sender] if step.number != 15 else role,
            label=what, size=3 if step.number == 15 else 1.6, step=index, since=index,
        )  # fmt: skip
        # Near the sender: on its way an arrow may cross another actor's line.
        picture.text(
            start + 14 * way, y - 4, what, role="muted", size=11, anchor=("end", "start")[way > 0], since=index
        )
    picture.text(8, y + 4, f"{step.time * 1e3:,.1f} ms", role="muted", size=11, since=index)
    label = f"{step.number} {step.title}: {step.says}"
    picture.add("rect", x - 9, y - 9, 18, 18, role=role, label=label, step=index, since=index, name=f"step {index}")
    picture.text(
        x, y + 4, str(step.number), role="ground", size=11, bold=True, anchor="middle", since=index,
        name=f"step {index}",
    )  # fmt: skip


def _line(journey: Journey, to_scale: bool) -> str:
    how = "to scale" if to_scale else "by step"
    return f"sequence diagram {how}: {len(journey.steps)} steps by {len({s.actor for s in journey.steps})} actors"
