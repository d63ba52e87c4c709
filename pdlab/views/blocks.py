"""The block tables of P and D side by side: where the request's blocks are, and which were written from P to D."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pdlab.trace.event import Event, by_time
from pdlab.trace.journey import Journey
from pdlab.trace.side import Block, Side
from pdlab.views.picture import ALWAYS, Picture
from pdlab.views.status import step_at

WIDTH, TOP, ROW = 1000, 92, 30
LEFT = {"P": 20, "D": 566}
ACROSS = 414  # width of a table
ID, BAR, COUNT, TAG, REF = 24, 98, 188, 256, 362  # its columns, from its left edge
FOLD = 24  # a longer table has its middle folded into one row
HEAD = 12  # rows before the fold
# Of P, the scheduling step ends after the allocation: the table appears with the step that the reader sees.
SCHEDULING = (3, 8, 20, 21)


def blocks(journey: Journey, compared: Any = None) -> Picture:
    """Both tables, a row a logical block, and a link for each block that was written.

    Args:
        compared: a `Comparison` of the blocks' bytes: each link says whether they are equal on both sides.
    """
    tables = {side.name: _Table(journey, side) for side in (journey.prefill, journey.decode)}
    rows = _Rows(max(table.length for table in tables.values()))
    picture = Picture(WIDTH, int(TOP + ROW * max(rows.drawn, 1) + 12), _line(journey, tables, compared))
    for table in tables.values():
        _head(picture, table)
        for logical in range(table.length):
            if rows.shown(logical):
                for state in table.states_of(logical):
                    _row(picture, table, state, rows.y(logical))
        _folded(picture, table, rows)
    _links(picture, journey, tables, rows, compared)
    return picture


@dataclass(frozen=True)
class _State:
    """A block as it is between two steps."""

    since: int
    until: int
    block: Block


class _Table:
    """One side's block table over the steps."""

    def __init__(self, journey: Journey, side: Side) -> None:
        self.name, self._journey = side.name, journey
        self._noted = sorted(
            [(self._scheduling(time), rows) for time, rows in side.tables] + list(self._freed(side)),
            key=lambda noted: noted[0],
        )
        self.length = max((len(rows) for _, rows in self._noted), default=0)
        self.since = self._noted[0][0] if self._noted else ALWAYS
        self.last = self._noted[-1][1] if self._noted else []
        self.size = _block_size(journey, self.last)

    def _scheduling(self, time: float) -> int:
        """Index of the step that took or hashed the blocks."""
        steps = self._journey.steps
        after = next((i for i, s in enumerate(steps) if s.time >= time and s.actor == f"{self.name} scheduler"), None)
        return after if after is not None and steps[after].number in SCHEDULING else step_at(steps, time)

    def _freed(self, side: Side) -> Iterator[tuple[int, list[Block]]]:
        for event in self._journey.of("blocks.freed", f"{side.name} scheduler"):
            tokens = {block.logical: block.tokens for block in side.blocks}
            yield (
                step_at(self._journey.steps, event.time - self._journey.start),
                [Block(i, b, tokens.get(i, 0), bool(h), refs) for i, (b, refs, h) in enumerate(event.facts["blocks"])],
            )

    def states_of(self, logical: int) -> list[_State]:
        """What the block was from step to step, each as long as it stayed so."""
        states: list[_State] = []
        ends = [since - 1 for since, _ in self._noted[1:]] + [ALWAYS]
        for (since, rows), until in zip(self._noted, ends, strict=True):
            if logical >= len(rows) or until < since:
                continue
            if states and states[-1].block == rows[logical]:
                since = states.pop().since
            states.append(_State(since, until, rows[logical]))
        return states

    def logical(self, block_id: int) -> int | None:
        """Where in the table the physical block is."""
        return next((block.logical for block in self.last if block.block_id == block_id), None)

    def free(self) -> list[tuple[int, int, int]]:
        """(step, free blocks before, after) whenever the request took blocks or gave them back."""
        whose = f"{self.name} scheduler"
        changes = by_time([e for name in ("blocks.allocated", "blocks.freed") for e in self._journey.of(name, whose)])
        return [
            (self._index(event), event.facts["free_before"], event.facts["free_after"])
            for event in changes
            if event.facts["free_before"] != event.facts["free_after"]
        ]

    def _index(self, event: Event) -> int:
        time = event.time - self._journey.start
        return step_at(self._journey.steps, time) if event.name == "blocks.freed" else self._scheduling(time)


def _block_size(journey: Journey, rows: Sequence[Block]) -> int:
    sizes = [event.facts["block_size"] for event in journey.of("request.added")]
    return sizes[0] if sizes else max((block.tokens for block in rows), default=1)


class _Rows:
    """Where each logical block is drawn: the same on both sides, the middle of a long table in one row."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.hidden = range(HEAD, length - (FOLD - HEAD - 1)) if length > FOLD else range(0)

    @property
    def drawn(self) -> int:
        return self.length - len(self.hidden) + bool(self.hidden)

    def shown(self, logical: int) -> bool:
        return logical not in self.hidden

    def y(self, logical: int) -> float:
        """Its top; of a hidden one: of the fold."""
        if logical in self.hidden:
            return TOP + ROW * HEAD
        return TOP + ROW * (logical - (len(self.hidden) - 1 if self.hidden and logical >= self.hidden.stop else 0))


# A table --------------------------------------------------------------------------------------------------------------


def _head(picture: Picture, table: _Table) -> None:
    x, role = LEFT[table.name], table.name
    picture.text(x, 28, f"{role}'s block table", role=role, size=16, bold=True)
    free = table.free()
    ends = [since - 1 for since, _, _ in free[1:]] + [ALWAYS]
    for (since, before, after), until in zip(free, ends, strict=False):
        says = f"free blocks {before:,} → {after:,}"
        picture.text(x + ACROSS, 28, says, anchor="end", since=since, until=until)
    for column, label in ((0, "#"), (ID, "block"), (BAR, "prompt tokens in it"), (TAG, "prefix cache"), (REF, "ref")):
        picture.text(x + column, TOP - 26, label, role="muted", size=12)
    picture.add("line", x, TOP - 16, x + ACROSS, TOP - 16, role="line")
    if table.since > 0:
        picture.text(x + ID, TOP + 15, "no blocks yet", role="muted", until=table.since - 1)


def _row(picture: Picture, table: _Table, state: _State, y: float) -> None:
    x, role, block = LEFT[table.name], table.name, state.block
    name = f"{role} block {block.logical}"
    there: dict[str, Any] = {"since": state.since, "until": state.until}
    held = block.ref_count > 0
    label = f"{role}'s logical block {block.logical} is physical block {block.block_id}" + ("" if held else ", freed")
    picture.text(x, y + 15, str(block.logical), role="muted", **there)
    picture.add(
        "rect", x + ID, y, 64, 22, role=role, fill="solid" if held else "soft", label=label, step=state.since,
        name=name, **there,
    )  # fmt: skip
    picture.text(
        x + ID + 32, y + 16, f"{block.block_id:,}", role="ground" if held else "text", bold=True, anchor="middle",
        name=name, **there,
    )  # fmt: skip
    _bar(picture, table, block, y, name, there)
    _tag(picture, x + TAG, y, role, block.hashed, state.since, there)
    picture.text(x + REF, y + 15, f"ref {block.ref_count}", role="text" if held else "muted", **there)


def _bar(picture: Picture, table: _Table, block: Block, y: float, name: str, there: dict[str, Any]) -> None:
    x = LEFT[table.name] + BAR
    says = f"{block.tokens} of {table.size} tokens"
    picture.add("rect", x, y + 4, 84, 14, role="line", fill="none", **there)
    if block.tokens:
        fill = "solid" if block.ref_count else "soft"
        wide = 84 * block.tokens / table.size
        picture.add("rect", x, y + 4, wide, 14, role=table.name, fill=fill, label=says, name=name, **there)
    picture.text(LEFT[table.name] + COUNT, y + 15, f"{block.tokens} of {table.size}", size=12, **there)


def _tag(picture: Picture, x: float, y: float, role: str, hashed: bool, since: int, there: dict[str, Any]) -> None:
    """Filled or outlined, and said in words: not told apart by colour alone."""
    fill, label, ink = ("solid", "hashed", "ground") if hashed else ("none", "not hashed", "text")
    picture.add("rect", x, y + 1, 92, 20, role=role, fill=fill, label=label, step=since, **there)
    picture.text(x + 46, y + 15, label, role=ink, size=12, anchor="middle", **there)


def _folded(picture: Picture, table: _Table, rows: _Rows) -> None:
    hidden = [logical for logical in rows.hidden if logical < table.length]
    if not hidden:
        return
    x, y = LEFT[table.name], rows.y(hidden[0])
    for since, until, hashed in _folds(table, hidden):
        says = f"… {len(hidden):,} more, {hashed:,} of them hashed"
        picture.text(x + ID, y + 15, says, role="muted", since=since, until=until)


def _folds(table: _Table, hidden: Sequence[int]) -> list[tuple[int, int, int]]:
    """(since, until, how many of the hidden blocks are hashed), as long as that stays so."""
    states = [table.states_of(logical) for logical in hidden]
    starts = sorted({state.since for row in states for state in row})
    return [
        (since, until - 1, sum(s.block.hashed for row in states for s in row if s.since <= since <= s.until))
        for since, until in pairwise([*starts, ALWAYS + 1])
    ]


# The links ------------------------------------------------------------------------------------------------------------


def _links(picture: Picture, journey: Journey, tables: dict[str, _Table], rows: _Rows, compared: Any) -> None:
    """From each block of P to the one of D that it was written to; what is folded shares one link."""
    written, verdicts = _written(journey), _verdicts(compared)
    since, until = _compared_between(journey, compared, written)
    between: dict[tuple[float, float], list[tuple[int, int]]] = {}
    where = [{block.block_id: block.logical for block in tables[name].last} for name in "PD"]
    for source, destination in linked(journey):
        if source in where[0] and destination in where[1]:
            ends = rows.y(where[0][source]) + 11, rows.y(where[1][destination]) + 11
            between.setdefault(ends, []).append((source, destination))
    for (y1, y2), pairs in between.items():
        x1, x2 = LEFT["P"] + ACROSS + 6, LEFT["D"] - 8
        many = f"{len(pairs):,} blocks" if len(pairs) > 1 else "1 block"
        if written < ALWAYS:
            picture.add("arrow", x1, y1, x2, y2, role="P", size=2, label=f"{many} written", step=written, since=written)
        known = [verdicts[pair] for pair in pairs if pair in verdicts]
        if known and since <= until:
            says, role = _verdict(known)
            picture.text(
                (x1 + x2) / 2, (y1 + y2) / 2 - 3, says, role=role, size=12, bold=True, anchor="middle", since=since,
                until=until,
            )  # fmt: skip


def linked(journey: Journey) -> list[tuple[int, int]]:
    """The pairs of blocks, of P and of D, that the transfer is of: they are the same in every layer."""
    return [
        pair
        for write in journey.writes
        if write.layer == 0
        for pair in zip(write.source_blocks, write.destination_blocks, strict=True)
    ]


def _written(journey: Journey) -> int:
    """Index of the step at which it was written; a step that no journey comes to, if it was not."""
    done = any(event.facts["result"] == 0 for event in journey.of("transfer.written"))
    return next((i for i, step in enumerate(journey.steps) if step.number == 15 and done), ALWAYS)


def _verdicts(compared: Any) -> dict[tuple[int, int], bool]:
    """Whether a pair of blocks is equal in every layer."""
    found: dict[tuple[int, int], bool] = {}
    for pair in compared.pairs if compared is not None else ():
        ids = pair.source_block, pair.destination_block
        found[ids] = found.get(ids, True) and pair.equal
    return found


def _compared_between(journey: Journey, compared: Any, written: int) -> tuple[int, int]:
    """From which step to which a comparison holds: what was compared before the write does not after it."""
    early = written == ALWAYS or getattr(compared, "held", None) == "before_write"
    planned = next((i for i, step in enumerate(journey.steps) if step.number == 14), 0)
    return (planned, written - 1) if early else (written, ALWAYS)


def _verdict(equal: list[bool]) -> tuple[str, str]:
    if len(equal) == 1:
        return ("= equal", "equal") if equal[0] else ("≠ differs", "unequal")
    differ = equal.count(False)
    return (f"≠ {differ:,} differ", "unequal") if differ else (f"= {len(equal):,} equal", "equal")


def _line(journey: Journey, tables: dict[str, _Table], compared: Any) -> str:
    halves = [_half(table) for table in tables.values()]
    written = len(linked(journey)) if _written(journey) < ALWAYS else 0
    verdicts = list(_verdicts(compared).values())
    says = f"; compared: {verdicts.count(True)} equal, {verdicts.count(False)} differ" if verdicts else ""
    return f"block tables: {'; '.join(halves)}; {written} written from P to D{says}"


def _half(table: _Table) -> str:
    if not table.last:
        return f"{table.name} no blocks"
    freed = ", freed" if not any(block.ref_count for block in table.last) else ""
    count = len(table.last)
    blocks = "1 block" if count == 1 else f"{count} blocks"
    return f"{table.name} {blocks}, {sum(block.hashed for block in table.last)} hashed{freed}"
