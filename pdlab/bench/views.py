"""`python3 -m pdlab bench views`: how long views take, in Python and in a browser.

What is shown is copies of a recorded journey, beginning one after the other. In the browser: a bare page with a stub in
the place of Jupyter's model, so that what is timed is the view and not the connection to a kernel.
"""

import base64
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import anywidget

from pdlab.recorded.player import Run
from pdlab.recorded.scenes import whole
from pdlab.recorded.tape import path_of
from pdlab.trace.journey import Journey
from pdlab.trace.trace import Trace
from pdlab.views.blocks import blocks
from pdlab.views.sequence import sequence
from pdlab.views.timeline import Timeline, columns

SIZES = {"10k": 10_000, "100k": 100_000}
BLOCKS = 10_000
REDRAWS = 30
APART = 0.05  # seconds from one copy to the next: some tens of them overlap
CHROMIUM_ARGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]


def measure() -> dict[str, Any]:
    """Time each view-model once its input is there, and each drawing in a headless browser.

    Returns:
        sequence_ms: the sequence diagram of one journey. blocks_ms: the tables of one of 10,000 blocks.
        timelines: by size ("10k", "100k"), each with requests and items (stages and steps), columns_ms (shaping the
        trace, whose steps nobody has asked for yet), picture_ms (its form for where no kernel runs), payload_bytes; and
        in the browser: first_ms (from the values to what is on screen), redraw_ms (painting all of it after a
        zoom, the median) and redraw_worst_ms; None where there is no browser.
        browser: its version, or why there is none. load_before.
    """
    load = os.getloadavg()[0]
    journey = recorded()
    long = with_blocks(journey, BLOCKS)
    timelines = {name: _timeline(journey, items) for name, items in SIZES.items()}
    facts: dict[str, Any] = {
        "sequence_ms": _milliseconds(lambda: sequence(journey)),
        "blocks_ms": _milliseconds(lambda: blocks(long)),
        "timelines": {name: facts for name, (facts, _) in timelines.items()},
        "browser": "",
        "load_before": load,
    }
    try:
        with browser() as chromium:
            facts["browser"] = f"Chromium {chromium.version}"
            for of_size, shown in timelines.values():
                of_size.update(_drawn(chromium, shown))
    except NoBrowser as reason:
        facts["browser"] = f"no browser: {reason}"
    return facts


def recorded() -> Journey:
    """The journey that is copied."""
    return whole(Run("journey", path_of("journey")).play(None, "up", {}))


def many(journey: Journey, items: int) -> Trace:
    """A trace of copies of `journey`, of at least as many items on a timeline."""
    count = -(-items // len(columns([journey])))
    return Trace([_copy(journey, number) for number in range(count)], [])


def _copy(journey: Journey, number: int) -> Journey:
    """It, later and under another id. The facts are shared: they are only read."""
    events = [replace(event, time=event.time + number * APART) for event in journey.events]
    return Journey(f"{journey.request_id}-{number}", events, transfer_id=journey.transfer_id)


def _timeline(journey: Journey, items: int) -> tuple[dict[str, Any], Timeline]:
    trace = many(journey, items)
    facts: dict[str, Any] = {"requests": len(trace), "columns_ms": _milliseconds(lambda: columns(trace))}
    shown = Timeline(trace)
    return {
        **facts,
        "items": len(shown.columns),
        "picture_ms": _milliseconds(shown.png),
        "payload_bytes": sum(map(len, shown.columns.as_bytes().values())),
        "first_ms": None, "redraw_ms": None, "redraw_worst_ms": None,
    }, shown  # fmt: skip


def with_blocks(journey: Journey, count: int) -> Journey:
    """The journey, if its prompt had filled `count` blocks: what both schedulers noted of their tables is longer."""
    events = []
    for event in journey.events:
        facts = dict(event.facts)
        if facts.get("blocks"):
            first, references, hashed = facts["blocks"][0]
            facts["blocks"] = [[first + n, references, hashed] for n in range(count)]
        if event.name == "request.added":
            facts["num_prompt_tokens"] = count * facts["block_size"]
        events.append(replace(event, facts=facts))
    return Journey(journey.request_id, events, transfer_id=journey.transfer_id)


def _milliseconds(what: Callable[[], object]) -> float:
    began = time.perf_counter()
    what()
    return (time.perf_counter() - began) * 1e3


# In a browser ---------------------------------------------------------------------------------------------------------


class NoBrowser(Exception):
    """Why there is none."""


@contextmanager
def browser() -> Iterator[Any]:
    """A headless Chromium of this machine, driven by Playwright. NoBrowser where either is missing."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not found:
        raise NoBrowser("no chromium on the PATH (apt-get install chromium)")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise NoBrowser("no playwright (pip install playwright)") from None
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, headless=True, args=CHROMIUM_ARGS)
        try:
            yield chromium
        finally:
            chromium.close()


# What anywidget's model does for a view, without a kernel. `saves` counts what would have gone to Python.
PAGE = """<!doctype html><meta charset="utf-8"><style>%(css)s</style><body><div id="here"></div><script type="module">
const state = %(state)s;
for (const [name, text] of Object.entries(%(binary)s))
  state[name] = new DataView(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
const heard = {};
window.model = {
  saves: 0,
  get: (name) => state[name],
  set: (name, value) => {
    if (state[name] === value) return;
    state[name] = value;
    for (const hear of heard["change:" + name] ?? []) hear();
  },
  save_changes: () => { window.model.saves += 1; },
  on: (name, hear) => { (heard[name] ??= []).push(hear); },
  off: (name, hear) => { heard[name] = (heard[name] ?? []).filter((other) => other !== hear); },
  listening: () => Object.values(heard).flat().length,
};
const source = new Blob([%(module)s], { type: "text/javascript" });
const { default: view } = await import(URL.createObjectURL(source));
const frame = () => new Promise((done) => requestAnimationFrame(done));
await frame();
const began = performance.now();
window.end = view.render({ model: window.model, el: document.getElementById("here") });
await frame();
await frame();
window.first = performance.now() - began;
</script>"""


def bare_page(widget: anywidget.AnyWidget) -> str:
    """A page that shows `widget` with a stub in the place of its model: window.model; window.first once it is there."""
    state = {name: value for name, value in widget.get_state().items() if not hasattr(value, "comm")}
    binary = {name: bytes(value) for name, value in state.items() if isinstance(value, bytes | memoryview)}
    plain = {name: value for name, value in state.items() if name not in binary and name[0] != "_"}
    return PAGE % {
        "css": state["_css"],
        "module": _script(state["_esm"]),
        "state": _script({name: value for name, value in plain.items() if _is_json(value)}),
        "binary": _script({name: base64.b64encode(value).decode() for name, value in binary.items()}),
    }


def _is_json(value: Any) -> bool:
    return isinstance(value, str | int | float | bool | dict | list | None)


def _script(value: Any) -> str:
    """As JavaScript inside of a page."""
    return json.dumps(value).replace("</", "<\\/")


ZOOM = """(key) => {
  const root = document.querySelector(".pdlab-timeline");
  const before = root.dataset.drawn;
  root.dispatchEvent(new KeyboardEvent("keydown", { key }));
  return new Promise((done) => {
    const took = () => Number(root.dataset.milliseconds);
    const look = () => root.dataset.drawn === before ? requestAnimationFrame(look) : done(took());
    look();
  });
}"""


def _drawn(chromium: Any, shown: Timeline) -> dict[str, float]:
    page = chromium.new_page(viewport={"width": 1100, "height": 800})
    try:
        page.set_content(bare_page(shown.canvas))
        page.wait_for_function("window.first !== undefined")
        redraws = [page.evaluate(ZOOM, "-+"[turn % 2]) for turn in range(REDRAWS)]
        return {
            "first_ms": page.evaluate("window.first"),
            "redraw_ms": statistics.median(redraws),
            "redraw_worst_ms": max(redraws),
        }
    finally:
        page.close()


def render(facts: dict[str, Any]) -> str:
    """The milliseconds in words."""
    return "\n".join(
        [
            f"sequence diagram of a journey: {facts['sequence_ms']:.1f} ms",
            f"tables of {BLOCKS:,} blocks: {facts['blocks_ms']:.0f} ms",
            *(line for of_size in facts["timelines"].values() for line in _in_words(of_size)),
            facts["browser"],
        ]
    )


def _in_words(of_size: dict[str, Any]) -> Iterator[str]:
    yield f"timeline of {of_size['items']:,} items of {of_size['requests']:,} requests:"
    yield (
        f"  in Python: shaped in {of_size['columns_ms']:.0f} ms, {of_size['payload_bytes'] / 1e6:.1f} MB; "
        f"as a picture in {of_size['picture_ms']:.0f} ms"
    )
    if of_size["first_ms"] is not None:
        yield (
            f"  in the browser: on screen after {of_size['first_ms']:.0f} ms, painted again in "
            f"{of_size['redraw_ms']:.0f} ms (at most {of_size['redraw_worst_ms']:.0f})"
        )
