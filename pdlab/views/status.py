"""The status of both halves over the steps of a journey: who waits in which queue, and how far each has computed."""

from collections.abc import Sequence
from itertools import groupby

from pdlab.trace.journey import Journey
from pdlab.trace.side import Moment, Side
from pdlab.trace.steps import Step
from pdlab.views.failed import add_failure
from pdlab.views.picture import Picture

LEFT, COLUMN, TOP, LANE = 74, 36, 20, 216
BAND, CHART, DEEP = 48, 130, 44  # within a lane: where the band is, and the curve, and how deep that is
NARROW = 620
SMALL = 11
# These are noted a little after the step that they belong to, or before it: by time alone the parked step would show
# a request that is not parked yet, and the step of the first token one that is finished.
HOME = {"WAITING_FOR_REMOTE_KVS": 9, "FINISHED": 23}


def step_at(steps: Sequence[Step], time: float) -> int:
    """Index of the last step that had happened by then."""
    return max(0, sum(step.time <= time for step in steps) - 1)


def status(journey: Journey) -> Picture:
    """Two lanes, P and D: a band per status, its queue, the computed tokens as a stepped line."""
    steps = journey.steps
    width = max(NARROW, LEFT + COLUMN * len(steps) + 16)
    picture = Picture(width, TOP + 2 * LANE + 34, _line(journey))
    _axis(picture, steps)
    for lane, side in enumerate((journey.prefill, journey.decode)):
        _lane(picture, steps, side, TOP + LANE * lane)
    add_failure(picture, journey)
    return picture


def _axis(picture: Picture, steps: list[Step]) -> None:
    """The steps from left to right; a light column shows which is the current one."""
    bottom = TOP + 2 * LANE
    picture.text(8, bottom + 16, "step", role="muted", size=12)
    for index, step in enumerate(steps):
        x = _x(index)
        picture.add("rect", x, TOP - 8, COLUMN, bottom - TOP + 8, role="muted", fill="soft", since=index, until=index)
        picture.add(
            "rect", x + 3, bottom + 1, COLUMN - 6, 22, role=step.actor[0] if step.actor != "proxy" else "proxy",
            label=f"{step.number} {step.title}", step=index, name=f"step {index}",
        )  # fmt: skip
        picture.text(
            x + COLUMN / 2, bottom + 16, str(step.number), role="ground", size=12, bold=True, anchor="middle",
            name=f"step {index}",
        )  # fmt: skip


def _x(index: int) -> float:
    return LEFT + COLUMN * index


def _lane(picture: Picture, steps: list[Step], side: Side, y: float) -> None:
    picture.text(8, y + BAND + 18, side.name, role=side.name, size=20, bold=True)
    picture.text(8, y + CHART + 12, "computed", role="muted", size=SMALL)
    picture.text(8, y + CHART + 26, "tokens", role="muted", size=SMALL)
    picture.text(8, y + CHART + DEEP + 18, "scheduled", role="muted", size=SMALL)
    picture.add("line", 8, y + LANE - 16, picture.width - 8, y + LANE - 16, role="line")
    groups = _by_step(steps, side)
    if not groups:
        picture.text(LEFT, y + BAND + 18, "no event yet", role="muted")
        return
    _bands(picture, len(steps), side.name, groups, y)
    _curve(picture, len(steps), side.name, groups, y + CHART)


def _by_step(steps: list[Step], side: Side) -> list[tuple[int, list[Moment]]]:
    """The moments of each step that has any, by its index."""
    placed = [(_index(steps, side, moment), moment) for moment in side.moments]
    placed.sort(key=lambda pair: (pair[0], pair[1].time))
    return [(index, [moment for _, moment in pairs]) for index, pairs in groupby(placed, key=lambda pair: pair[0])]


def _index(steps: list[Step], side: Side, moment: Moment) -> int:
    number = HOME.get(moment.status.split("_")[0] if moment.status.startswith("FINISHED") else moment.status)
    home = next((i for i, s in enumerate(steps) if s.number == number and s.actor == f"{side.name} scheduler"), None)
    # The very moment of a step is that step's; P's FINISHED is step 5 itself.
    exact = any(step.time == moment.time for step in steps)
    return step_at(steps, moment.time) if home is None or exact else home


# The bands ------------------------------------------------------------------------------------------------------------


def fill_of(status: str) -> str:
    """Waiting is hatched, running solid, finished soft."""
    if status == "RUNNING":
        return "solid"
    return "soft" if status.startswith("FINISHED") else "hatch"


def _bands(picture: Picture, count: int, role: str, groups: list[tuple[int, list[Moment]]], y: float) -> None:
    """A cell a step, each there from its step on: what is to come is not given away."""
    ends = [index for index, _ in groups[1:]] + [count]
    for (start, moments), end in zip(groups, ends, strict=True):
        last = moments[-1]
        for index in range(start, max(end, start + 1)):
            picture.add(
                "rect", _x(index), y + BAND, COLUMN, 24, role=role, fill=fill_of(last.status), label=last.status,
                step=index, since=index, name=f"step {index}",
            )  # fmt: skip
    above, below = _Rows(picture, y + BAND - 6, -14), _Rows(picture, y + BAND + 38, 14)
    above.write([(index, moments[-1].status) for index, moments in groups], role, bold=True)
    below.write([(index, _queue(moments[-1])) for index, moments in groups], "muted")


def _queue(moment: Moment) -> str:
    return f"in {moment.queue}" if moment.queue else "in no queue"


class _Rows:
    """Texts over steps, in as many rows as it takes that none lies on another: the first is nearest to the band."""

    def __init__(self, picture: Picture, y: float, row: float) -> None:
        self.picture, self.rows = picture, (y, y + row, y + 2 * row)
        self.free = [0.0] * len(self.rows)

    def write(self, texts: list[tuple[int, str]], role: str, bold: bool = False) -> None:
        before = ""
        for index, text in texts:
            if text != before:
                self._place(index, text, role, bold)
            before = text

    def _place(self, index: int, text: str, role: str, bold: bool) -> None:
        wide = len(text) * SMALL * 0.74
        # At the right edge a text ends at its step instead of beginning there.
        x = min(_x(index) + 2, self.picture.width - 8 - wide)
        row = next((row for row, free in enumerate(self.free) if x >= free), len(self.rows) - 1)
        self.free[row] = x + wide + 8
        anchor, at = ("start", x) if x == _x(index) + 2 else ("end", self.picture.width - 8)
        self.picture.text(at, self.rows[row], text, role=role, size=SMALL, bold=bold, anchor=anchor, since=index)


# The tokens -----------------------------------------------------------------------------------------------------------


def _curve(picture: Picture, count: int, role: str, groups: list[tuple[int, list[Moment]]], y: float) -> None:
    """A level for each value, in order and not to scale: 142 of 143 would not be seen to be less."""
    values = [moments[-1].computed_tokens for _, moments in groups]
    levels = sorted(set(values))
    ends = [index for index, _ in groups[1:]] + [count]
    before: int | None = None
    for (start, moments), end in zip(groups, ends, strict=True):
        value = moments[-1].computed_tokens
        high = _level(levels, value, y)
        if before is not None and value != before:
            picture.add("line", _x(start), _level(levels, before, y), _x(start), high, role=role, size=2, since=start)
        for index in range(start, max(end, start + 1)):
            picture.add("line", _x(index), high, _x(index + 1), high, role=role, size=2, since=index)
        if value != before:
            picture.text(_x(start) + 3, high - 4, _values(moments), size=SMALL, bold=True, since=start)
        if given := sum(moment.scheduled_tokens for moment in moments):
            picture.text(_x(start) + 3, y + DEEP + 18, f"+{given}", role="muted", size=SMALL, since=start)
        before = value


def _level(levels: list[int], value: int, y: float) -> float:
    return y + DEEP - DEEP * levels.index(value) / max(len(levels) - 1, 1)


def _values(moments: list[Moment]) -> str:
    """Its last value; with dots, where it went through others on the way."""
    first, last = moments[0].computed_tokens, moments[-1].computed_tokens
    return str(last) if first == last else f"…{last}"


def _line(journey: Journey) -> str:
    halves = "; ".join(_half(side) for side in (journey.prefill, journey.decode))
    return f"status: {halves}"


def _half(side: Side) -> str:
    """What it went through; of the computed tokens only those of the prompt: how finely a decode is noted varies."""
    if not side.moments:
        return f"{side.name} no event"
    names = ", ".join(status for _, status in side.status)
    tokens = ", ".join(str(count) for _, count in side.computed_tokens if count <= side.prompt_tokens)
    return f"{side.name} {names}, computed tokens {tokens}"
