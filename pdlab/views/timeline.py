"""The timeline of many requests: a lane an actor, and in it as many rows as requests overlap there.

`columns` shapes a trace into one array an attribute, `placed` says where each lane is; timeline.js paints them. A list
of objects would take several times the bytes, and longer to make and to send. Standard library only: recorded runs have
no numpy.
"""

import base64
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets
import traitlets

from pdlab.errors import PdlabError
from pdlab.trace.event import ACTORS
from pdlab.trace.journey import Journey
from pdlab.trace.stages import STAGES
from pdlab.trace.steps import KINDS
from pdlab.trace.trace import Trace
from pdlab.views.figure import HERE, style
from pdlab.views.picture import Picture
from pdlab.views.sequence import ROLES

LANES = {actor: lane for lane, actor in enumerate(ACTORS)}
TYPES = {"starts": "d", "ends": "d", "lanes": "H", "rows": "H", "kinds": "B", "requests": "I"}
PERFETTO = Path("pdlab-trace.json")
# In CSS pixels: room for the names of lanes and for the axis; a row at its highest; all rows together at their highest.
LEFT, AXIS, ROW, ROWS, LANE, GAP = 108, 26, 26, 560, 20, 8


@dataclass(frozen=True)
class Look:
    """How items of one kind look.

    Attributes:
        name: the stage, or number and title of the step.
        role: a key of the theme.
        fill: "solid" (computing, writing), "soft", "hatch" (waiting), or "mark": a step, which has no length.
        top, height: its part of a row.
    """

    name: str
    role: str
    fill: str
    top: float = 0.04
    height: float = 0.64


FILLS = {
    "wait for P to schedule it": "hatch",
    "D waits for the KV": "hatch",
    "P keeps the blocks after its answer": "hatch",
    "P gets ready to send": "soft",
    "D hears of it": "soft",
    "time to first token": "soft",
}
# These two are at the same time: half a bar each.
HALVES = {"P gets ready to send": (0.04, 0.32), "P keeps the blocks after its answer": (0.36, 0.32)}


def _looks() -> Iterator[Look]:
    for stage, ((actor, _), _) in STAGES.items():
        yield Look(stage, actor[0] if actor != "proxy" else "proxy", FILLS.get(stage, "solid"), *HALVES.get(stage, ()))
    for kind in KINDS:
        yield Look(f"{kind.number} {kind.title}", ROLES[kind.actor], "mark", 0.72, 0.24)


LOOKS = tuple(_looks())
KIND_OF = {look.name: kind for kind, look in enumerate(LOOKS)}


@dataclass
class Columns:
    """The items of a timeline, a column an attribute; by kind, and within a kind by their start.

    Attributes:
        starts, ends: in seconds since the first request began; equal for a step.
        lanes, rows: whose it is (index in ACTORS), and which row of that lane.
        kinds: index in LOOKS. requests: index in names.
        names: the X-Request-Id of each request, or what else it is known by.
        depths: how many rows each lane has.
    """

    starts: "array[float]"
    ends: "array[float]"
    lanes: "array[int]"
    rows: "array[int]"
    kinds: "array[int]"
    requests: "array[int]"
    names: list[str]
    depths: list[int]

    def __len__(self) -> int:
        return len(self.starts)

    @cached_property
    def end(self) -> float:
        """When the last of it ended."""
        return max(self.ends, default=0.0)

    @property
    def line(self) -> str:
        actors = sum(depth > 0 for depth in self.depths)
        return f"timeline of {_of(len(self.names), 'request')}, {_of(actors, 'actor')}"

    def as_bytes(self) -> dict[str, bytes]:
        """For timeline.js; numbers as this machine has them, which is as a browser has them: little-endian."""
        return {name: getattr(self, name).tobytes() for name in TYPES}


def _of(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + "s" * (count != 1)


Item = tuple[float, float, int, int]  # start, end, lane, request


def columns(trace: Iterable[Journey]) -> Columns:
    """The steps and stages of all journeys in `trace`."""
    journeys = list(trace)
    began = min((journey.start for journey in journeys), default=0.0)
    items: list[list[Item]] = [[] for _ in LOOKS]
    for request, journey in enumerate(journeys):
        for kind, lane, start, end in _items(journey):
            items[kind].append((start - began, end - began, lane, request))
    rows, depths = _rows(items)
    names = [journey.request_id or str(journey.transfer_id) for journey in journeys]
    arrays: dict[str, Any] = {name: array(code) for name, code in TYPES.items()}
    made = Columns(**arrays, names=names, depths=depths)
    for kind, of_kind in enumerate(items):
        of_kind.sort()
        made.kinds.extend([kind] * len(of_kind))
        for start, end, lane, request in of_kind:
            made.starts.append(start)
            made.ends.append(end)
            made.lanes.append(lane)
            made.rows.append(rows[lane, request])
            made.requests.append(request)
    return made


def _items(journey: Journey) -> Iterator[tuple[int, int, float, float]]:
    for stage, began, ended in journey.stages():
        yield KIND_OF[stage], LANES[began.actor], began.time, ended.time
    for step in journey.steps:
        time = journey.start + step.time
        yield KIND_OF[f"{step.number} {step.title}"], LANES[step.actor], time, time


def _rows(items: list[list[Item]]) -> tuple[dict[tuple[int, int], int], list[int]]:
    """The row of each request in each lane, by (lane, request); and how many rows each lane has.

    A request takes the highest row that is free from its first item in the lane to its last.
    """
    spans: list[dict[int, tuple[float, float]]] = [{} for _ in ACTORS]
    for start, end, lane, request in (item for of_kind in items for item in of_kind):
        low, high = spans[lane].get(request, (start, end))
        spans[lane][request] = (min(low, start), max(high, end))
    rows: dict[tuple[int, int], int] = {}
    depths = []
    for lane, of_lane in enumerate(spans):
        busy: list[tuple[float, int]] = []
        free: list[int] = []
        depth = 0
        for request, (start, end) in sorted(of_lane.items(), key=lambda each: each[1]):
            while busy and busy[0][0] < start:
                heappush(free, heappop(busy)[1])
            if not free:
                free, depth = [depth], depth + 1
            row = rows[lane, request] = heappop(free)
            heappush(busy, (end, row))
        depths.append(depth)
    return rows, depths


@dataclass
class Place:
    """Where one lane is: `top` and `height`, and how high each of its `depth` rows is, in CSS pixels."""

    name: str
    role: str
    top: float
    height: float
    row: float
    depth: int


def placed(depths: list[int]) -> list[Place]:
    """The lanes below each other; of many rows each gets less, so that all of them fit on a screen."""
    row = min(ROW, ROWS / max(sum(depths), 1))
    places, top = [], float(AXIS + 6)
    for actor, depth in zip(ACTORS, depths, strict=True):
        height = max(LANE, row * depth)
        places.append(Place(actor, ROLES[actor], round(top, 2), round(height, 2), round(row, 4), depth))
        top += height + GAP
    return places


def layout(shown: Columns, width: int) -> dict[str, Any]:
    """What timeline.js needs beside the columns."""
    places = placed(shown.depths)
    return {
        "width": width,
        "height": round(places[-1].top + places[-1].height + GAP),
        "left": LEFT,
        "axis": AXIS,
        "end": shown.end,
        "line": shown.line,
        "lanes": [asdict(place) for place in places],
        "looks": [asdict(look) for look in LOOKS],
        "names": "\n".join(shown.names),  # one string: thousands of them are one value to send
    }


# Where no kernel runs -------------------------------------------------------------------------------------------------


def picture(shown: Columns, width: int = 1000) -> Picture:
    """All of it as a picture; what falls on the same pixel is there once."""
    places = placed(shown.depths)
    made = Picture(width, round(places[-1].top + places[-1].height + GAP + 4), shown.line)
    for place in places:
        made.text(8, place.top + 14, place.name, role=place.role, bold=True, size=12)
        made.add("line", LEFT, place.top - GAP / 2, width, place.top - GAP / 2, role="line", size=1)
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, anchor = LEFT + share * (width - LEFT - 10), "end" if share == 1 else "start" if share == 0 else "middle"
        made.text(x, 16, f"{share * shown.end:,.2f} s", role="muted", size=11, anchor=anchor)
    for kind, *box in _pixels(shown, places, (width - LEFT - 10) / max(shown.end, 1e-9)):
        look = LOOKS[kind]
        fill = look.fill if box[2] > 4 else "solid" if look.fill in ("mark", "solid") else "soft"
        made.add("rect", *box, role=look.role, fill=fill)
    return made


def _pixels(shown: Columns, places: list[Place], scale: float) -> Iterator[tuple[int, float, float, float, float]]:
    """(kind, x, y, width, height) of the items, but of those that begin and end on the same pixels only the first.

    Of very many, what is within a few pixels counts as on the same: a picture would take seconds.
    """
    grain = 1 + len(shown) // 40_000
    seen: set[tuple[int, ...]] = set()
    each = zip(shown.kinds, shown.lanes, shown.rows, shown.starts, shown.ends, strict=True)
    for kind, lane, row, start, end in each:
        place, look = places[lane], LOOKS[kind]
        x, right = LEFT + start * scale, LEFT + end * scale
        y = place.top + place.row * (row + look.top)
        if (cell := (lane, int(y), int(x / grain), int(right / grain))) not in seen:
            seen.add(cell)
            yield kind, x, y, max(right - x, grain), max(place.row * look.height, 1.0)


# The widget -----------------------------------------------------------------------------------------------------------


class Canvas(anywidget.AnyWidget):
    """The canvas of a timeline: one trait a column, and `revision`, which changes once all of them have.

    Attributes:
        chosen: index of the request that was clicked last; -1: none.
    """

    _esm = HERE / "timeline.js"
    _css = style() + (
        ".pdlab-timeline canvas{display:block;touch-action:pan-y;cursor:grab}"
        ".pdlab-timeline output{display:block;min-height:1.4em;padding:2px 8px;font-size:12px;color:var(--pdlab-text)}"
    )
    starts = traitlets.Bytes().tag(sync=True)
    ends = traitlets.Bytes().tag(sync=True)
    lanes = traitlets.Bytes().tag(sync=True)
    rows = traitlets.Bytes().tag(sync=True)
    kinds = traitlets.Bytes().tag(sync=True)
    requests = traitlets.Bytes().tag(sync=True)
    place = traitlets.Dict().tag(sync=True)
    revision = traitlets.Int(0).tag(sync=True)
    chosen = traitlets.Int(-1).tag(sync=True)


class Timeline(ipywidgets.VBox):
    """Attributes:
    trace: what is shown. columns: the same, shaped.
    canvas: the widget that draws it. button: saves it for Perfetto, at `path`. said: where it was saved.
    """

    def __init__(self, trace: Trace, width: int = 1000, path: str | Path = PERFETTO) -> None:
        self.trace, self.width, self.path = trace, width, Path(path)
        self.columns = columns(trace)
        self.canvas = Canvas(**self.columns.as_bytes(), place=layout(self.columns, width))
        self.button = ipywidgets.Button(description="Perfetto", tooltip="Save it for ui.perfetto.dev")
        self.said = ipywidgets.Label()
        self.button.on_click(self._save)
        super().__init__([self.canvas, ipywidgets.HBox([self.button, self.said])])

    def show(self, trace: Trace) -> None:
        """Show another trace in its place."""
        self.trace, self.columns = trace, columns(trace)
        with self.canvas.hold_sync():
            for name, column in self.columns.as_bytes().items():
                setattr(self.canvas, name, column)
            self.canvas.place = layout(self.columns, self.width)
            self.canvas.chosen = -1
            self.canvas.revision += 1  # what the browser looks at: by then it has the rest

    @property
    def journey(self) -> Journey | None:
        """The journey that was clicked last."""
        return self.trace[self.canvas.chosen] if self.canvas.chosen >= 0 else None

    def _save(self, _: Any) -> None:
        try:
            self.said.value = f"saved {self.trace.save_chrome_trace(self.path)}: open it at ui.perfetto.dev"
        except PdlabError as error:
            self.said.value = f"not saved: {error.message}"

    def png(self, dark: bool = False) -> bytes:
        """All of it as a PNG; of very many items without the finer pixels of a dense screen."""
        return picture(self.columns, self.width).png(dark=dark, scale=2 if len(self.columns) < 10_000 else 1)

    def __repr__(self) -> str:
        return f"<{self.columns.line}>"

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        bundle = super()._repr_mimebundle_(**kwargs)
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        png = base64.b64encode(self.png()).decode()
        return {**(data or {}), "text/plain": repr(self), "image/png": png}, metadata
