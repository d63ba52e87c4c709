"""The views in a real browser: what they draw, that they can be used, and that Python hears of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdlab.trace.trace import Trace
from pdlab.views.figure import Figure
from pdlab.views.memory import memory
from pdlab.views.picture import THEME
from pdlab.views.sequence import sequence
from pdlab.views.timeline import LEFT, LOOKS, Timeline
from tests.browser import LabPage, bare, chromium, jupyterlab, opened, write_notebook
from tests.traces import EVERY, JOURNEYS, WHOLE, recorded_journey, recorded_trace

pytest.importorskip("playwright")
DRAWN = "document.querySelector('.pdlab-timeline').dataset.drawn"
# Values of a canvas's pixels, [red, green, blue], at CSS pixels of it.
PIXEL = """([x, y]) => {
  const canvas = document.querySelector("canvas");
  const dense = canvas.width / parseFloat(canvas.style.width);
  return [...canvas.getContext("2d").getImageData(x * dense, y * dense, 1, 1).data].slice(0, 3);
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


def rgb(role: str, dark: bool = False) -> list[int]:
    return [int(THEME[role][dark][i : i + 2], 16) for i in (1, 3, 5)]


def css(role: str, dark: bool = False) -> str:
    return f"rgb({', '.join(map(str, rgb(role, dark)))})"


class TestFigure:
    @pytest.fixture
    def figure(self) -> Figure:
        journey = recorded_journey(WHOLE)
        return Figure(sequence(journey), last=len(journey.steps) - 1)

    def shown_steps(self, page: Any) -> int:
        return int(page.locator("rect[data-name]:visible").count())

    def test_draws_every_shape_in_the_colour_of_its_role(self, browser: Any, figure: Figure) -> None:
        with bare(browser, figure) as page:
            assert page.locator(".pdlab-figure").get_attribute("aria-label") == figure.shown.line
            assert self.shown_steps(page) == figure.last + 1
            drawn = "rect, line, text"
            counts = page.locator(".pdlab-figure > div > svg").evaluate(
                f"(svg) => [...svg.children].filter((child) => child.matches('{drawn}')).length"
            )
            assert counts == len(figure.shown.shapes)
            for role, name in (("P", "P worker"), ("D", "D worker"), ("proxy", "proxy")):
                title = page.locator("text", has_text=name).first
                assert title.evaluate("(node) => getComputedStyle(node).fill") == css(role)

    def test_keys_move_the_step_and_hide_what_has_not_happened(self, browser: Any, figure: Figure) -> None:
        with bare(browser, figure) as page:
            page.locator(".pdlab-figure").focus()
            page.keyboard.press("ArrowLeft")
            page.keyboard.press("ArrowUp")
            assert page.evaluate("[model.get('step'), model.saves]") == [figure.last - 2, 2]
            assert self.shown_steps(page) == figure.last - 1
            page.keyboard.press("Home")
            page.keyboard.press("ArrowLeft")
            assert page.evaluate("model.get('step')") == 0
            assert self.shown_steps(page) == 1
            page.keyboard.press("End")
            page.keyboard.press("ArrowRight")
            assert page.evaluate("model.get('step')") == figure.last

    def test_keys_with_a_modifier_are_the_browsers(self, browser: Any, figure: Figure) -> None:
        with bare(browser, figure) as page:
            page.locator(".pdlab-figure").focus()
            for keys in ("Control+Home", "Alt+ArrowUp", "Control+n"):
                page.keyboard.press(keys)
            assert page.evaluate("[model.get('step'), model.get('chosen'), model.saves]") == [figure.last, "", 0]

    def test_n_and_p_choose_what_else_a_click_would(self, browser: Any) -> None:
        journey = recorded_journey(WHOLE)
        with bare(browser, Figure(memory(journey), last=len(journey.steps) - 1)) as page:
            page.locator(".pdlab-figure").focus()
            chosen = []
            for key in "nnpp":
                page.keyboard.press(key)
                chosen.append(page.evaluate("model.get('chosen')"))
            assert chosen == ["descriptor 0", "layer 0", "descriptor 0", "layer 29"]

    def test_who_hears_the_page_is_told_the_step_where_the_focus_is(self, browser: Any, figure: Figure) -> None:
        with bare(browser, figure) as page:
            said = page.locator(".pdlab-figure > output")
            page.evaluate("model.set('step', 3)")
            assert said.inner_text() == ""
            page.locator(".pdlab-figure").focus()
            page.keyboard.press("Home")
            assert said.inner_text().startswith("1 ")

    def test_a_click_on_a_step_goes_to_it_and_lights_it(self, browser: Any, figure: Figure) -> None:
        with bare(browser, figure) as page:
            page.locator("rect[data-name='step 7']").click(force=True)
            assert page.evaluate("model.get('step')") == 7
            lit = page.locator("rect.lit").evaluate_all("(nodes) => nodes.map((node) => node.dataset.name)")
            assert lit == ["step 7"]

    def test_follows_the_system_s_theme(self, browser: Any, figure: Figure) -> None:
        with bare(browser, figure, color_scheme="dark") as page:
            ground = "getComputedStyle(document.querySelector('.pdlab-figure')).backgroundColor"
            assert page.evaluate(ground) == css("ground", dark=True)
            page.emulate_media(color_scheme="light")
            assert page.evaluate(ground) == css("ground")

    def test_hears_nothing_once_it_is_removed(self, browser: Any, figure: Figure) -> None:
        with bare(browser, figure) as page:
            assert page.evaluate("model.listening()") == 3
            page.evaluate("window.end()")
            assert page.evaluate("model.listening()") == 0


def place_of(shown: Timeline, look: str, request: int, width: float | None = None) -> tuple[float, float]:
    """The middle of an item, in CSS pixels of a canvas of that width, where all of it is in sight."""
    columns, place = shown.columns, shown.canvas.place
    [item] = [
        item for item, kind in enumerate(columns.kinds)
        if LOOKS[kind].name == look and columns.requests[item] == request
    ]  # fmt: skip
    lane, kind = place["lanes"][columns.lanes[item]], LOOKS[columns.kinds[item]]
    scale = ((width or place["width"]) - LEFT) / (1.03 * columns.end)
    middle = (columns.starts[item] + columns.ends[item]) / 2
    x = LEFT + (middle + 0.01 * columns.end) * scale
    return x, lane["top"] + lane["row"] * (columns.rows[item] + kind.top + kind.height / 2)


def redrawn(page: Any, act: Any) -> dict[str, float]:
    """What is in sight once `act()` has had it painted again."""
    before = page.evaluate(DRAWN)
    act()
    page.wait_for_function(f"{DRAWN} !== '{before}'")
    of = page.evaluate("({...document.querySelector('.pdlab-timeline').dataset})")
    return {name: float(of[name]) for name in ("from", "to", "milliseconds")}


class TestTimeline:
    @pytest.fixture
    def shown(self) -> Timeline:
        return Timeline(recorded_trace())

    @pytest.fixture
    def page(self, browser: Any, shown: Timeline) -> Iterator[Any]:
        with bare(browser, shown.canvas) as page:
            page.wait_for_function(f"{DRAWN} >= 2")  # and once with the colours of its style sheet
            yield page

    def pointer(self, page: Any, x: float, y: float) -> None:
        box = page.locator("canvas").bounding_box()
        page.mouse.move(box["x"] + x, box["y"] + y)

    @pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
    def test_paints_stages_in_the_colour_of_their_actor(self, browser: Any, shown: Timeline, dark: bool) -> None:
        with bare(browser, shown.canvas, color_scheme="dark" if dark else "light") as page:
            page.wait_for_function(f"{DRAWN} >= 2")
            x, y = place_of(shown, "P computes the prompt", 0)
            assert page.evaluate(PIXEL, [x, y]) == rgb("P", dark)
            assert page.evaluate(PIXEL, [x, y + 12]) == rgb("ground", dark)
            assert page.evaluate(PIXEL, place_of(shown, "D decodes", 0)) == rgb("D", dark)

    def test_a_change_of_theme_paints_it_anew(self, page: Any, shown: Timeline) -> None:
        redrawn(page, lambda: page.emulate_media(color_scheme="dark"))
        assert page.evaluate(PIXEL, place_of(shown, "D decodes", 0)) == rgb("D", dark=True)
        redrawn(page, lambda: page.evaluate("document.body.dataset.jpThemeLight = 'true'"))
        assert page.evaluate(PIXEL, place_of(shown, "D decodes", 0)) == rgb("D")

    def test_a_pointer_over_an_item_reads_it(self, page: Any, shown: Timeline) -> None:
        said = page.locator("output")
        assert "zoom" in said.inner_text()
        for request in EVERY:
            self.pointer(page, *place_of(shown, "D decodes", request))
            assert said.inner_text().startswith("D decodes · D scheduler · at ")
            assert said.inner_text().endswith(f"request {shown.columns.names[request]}")
        self.pointer(page, *place_of(shown, "2 P takes its half into the queue", 0))
        [time] = [step.time for step in shown.trace[0].steps if step.title == "P takes its half into the queue"]
        assert said.inner_text() == (
            "2 P takes its half into the queue · P scheduler · "
            f"at {time * 1e3:,.1f} ms · request {shown.columns.names[0]}"
        )
        self.pointer(page, 20, 5)
        assert "zoom" in said.inner_text()

    def test_a_click_chooses_the_request(self, page: Any, shown: Timeline) -> None:
        self.pointer(page, *place_of(shown, "D decodes", 3))
        page.mouse.down()
        page.mouse.up()
        assert page.evaluate("[model.get('chosen'), model.saves]") == [3, 1]

    def test_the_wheel_zooms_around_the_pointer(self, page: Any, shown: Timeline) -> None:
        x, y = place_of(shown, "P computes the prompt", 3)
        self.pointer(page, x, y)
        page.mouse.wheel(0, -800)  # the page's
        page.keyboard.down("Control")
        of = redrawn(page, lambda: page.mouse.wheel(0, -800))
        page.keyboard.up("Control")
        whole = 1.03 * shown.columns.end
        assert of["to"] - of["from"] == pytest.approx(whole / 1.0015**800, rel=1e-6)
        under = of["from"] + (x - LEFT) / (shown.width - LEFT) * (of["to"] - of["from"])
        assert under == pytest.approx((x - LEFT) / (shown.width - LEFT) * whole - 0.01 * shown.columns.end, abs=0.01)
        assert page.locator("output").inner_text().startswith("P computes the prompt")
        again = redrawn(page, lambda: page.mouse.dblclick(*self.on_page(page, 300, 5)))
        assert again["to"] - again["from"] == pytest.approx(whole)

    def on_page(self, page: Any, x: float, y: float) -> tuple[float, float]:
        box = page.locator("canvas").bounding_box()
        return box["x"] + x, box["y"] + y

    def test_dragging_moves_and_chooses_nothing(self, page: Any, shown: Timeline) -> None:
        x, y = place_of(shown, "D decodes", 3)
        self.pointer(page, x, y)
        page.mouse.down()
        of = redrawn(page, lambda: self.pointer(page, x - 100, y))
        page.mouse.up()
        second = 1.03 * shown.columns.end / (shown.width - LEFT)
        assert of["from"] == pytest.approx(100 * second - 0.01 * shown.columns.end, rel=1e-6)
        assert page.evaluate("[model.get('chosen'), model.saves]") == [-1, 0]

    def test_keys_do_what_the_pointer_does(self, page: Any, shown: Timeline) -> None:
        page.locator(".pdlab-timeline").focus()
        whole = 1.03 * shown.columns.end
        closer = redrawn(page, lambda: page.keyboard.press("+"))
        assert closer["to"] - closer["from"] == pytest.approx(0.7 * whole)
        right = redrawn(page, lambda: page.keyboard.press("ArrowRight"))
        assert right["from"] > closer["from"]
        left = redrawn(page, lambda: page.keyboard.press("ArrowLeft"))
        assert left["from"] == pytest.approx(closer["from"])
        out = redrawn(page, lambda: page.keyboard.press("-"))
        assert out["to"] - out["from"] == pytest.approx(whole)
        redrawn(page, lambda: page.keyboard.press("+"))
        everything = redrawn(page, lambda: page.keyboard.press("0"))
        assert everything["from"] == pytest.approx(-0.01 * shown.columns.end)

    def test_a_narrower_page_has_all_of_it(self, page: Any, shown: Timeline) -> None:
        redrawn(page, lambda: page.set_viewport_size({"width": 700, "height": 1000}))
        width = page.locator("canvas").bounding_box()["width"]
        assert 600 < width < 700
        assert page.evaluate(PIXEL, place_of(shown, "D decodes", 0, width)) == rgb("D")

    def test_an_empty_trace_is_shown_as_one(self, browser: Any) -> None:
        with bare(browser, Timeline(Trace([], [])).canvas) as page:
            assert page.locator(".pdlab-timeline").get_attribute("aria-label") == "timeline of 0 requests, 0 actors"

    def test_hears_nothing_once_it_is_removed(self, page: Any) -> None:
        assert page.evaluate("model.listening()") == 2
        page.evaluate("window.end()")
        assert page.evaluate("model.listening()") == 0


# In JupyterLab --------------------------------------------------------------------------------------------------------

FIGURE = f"""
from pdlab.trace.journey import Journey
from pdlab.views.figure import Figure
from pdlab.views.sequence import sequence
journey = Journey.load({str(JOURNEYS / "plain.json.gz")!r})
figure = Figure(sequence(journey), last=len(journey.steps) - 1)
seen = []
figure.observe(lambda change: seen.append(change.new), "step")
figure"""
LOOK = "figure.step, seen"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, scratch = (tmp_path_factory.mktemp(name) for name in ("notebooks", "jupyter"))
    write_notebook(folder / "figure.ipynb", FIGURE, LOOK)
    write_notebook(folder / "timeline.ipynb", TIMELINE)
    with jupyterlab(folder, scratch) as url:
        yield url


@pytest.fixture
def figure_page(browser: Any, address: str) -> Iterator[LabPage]:
    with opened(browser, address, "figure.ipynb") as lab:
        lab.run_all()
        lab.cell(0).locator(".pdlab-figure svg").wait_for()
        yield lab


def test_python_hears_of_keys_and_clicks_and_the_page_of_python(figure_page: LabPage) -> None:
    lab, last = figure_page, figure_page.value("figure.last")
    figure = lab.cell(0).locator(".pdlab-figure")
    figure.focus()
    lab.page.keyboard.press("ArrowLeft")
    lab.comes_to("[figure.step, seen]", [last - 1, [last - 1]])
    figure.locator("rect[data-name='step 4']").click(force=True)
    lab.comes_to("seen", [last - 1, 4])
    lab.command("notebook:move-cursor-down")
    lab.command("notebook:run-cell")
    assert f"(4, [{last - 1}, 4])" in lab.output(1)
    assert lab.value("setattr(figure, 'step', 2) or figure.step") == 2
    figure.locator("rect[data-name='step 2'].lit").wait_for()
    assert figure.locator("rect[data-name]:visible").count() == 3


def test_it_has_jupyterlab_s_theme(figure_page: LabPage) -> None:
    figure = figure_page.cell(0).locator(".pdlab-figure")
    for name in ("dark", "light"):
        figure_page.theme(name)
        ground = figure.evaluate("(node) => getComputedStyle(node).backgroundColor")
        assert ground == css("ground", dark=name == "dark")


TIMELINE = f"""
from pathlib import Path
from pdlab.trace.trace import read
from pdlab.views.timeline import Timeline
shown = Timeline(read(Path({str(JOURNEYS.parent / "trace")!r})))
shown"""


def test_a_timeline_comes_through_the_kernel_s_connection(browser: Any, address: str, tmp_path: Path) -> None:
    with opened(browser, address, "timeline.ipynb") as lab:
        lab.run_all()
        lab.page.wait_for_function(f"document.querySelector('.pdlab-timeline') && {DRAWN} >= 2")
        here = Timeline(recorded_trace())
        canvas = lab.cell(0).locator(".pdlab-timeline canvas")
        width = canvas.bounding_box()["width"]
        assert width < here.width  # as wide as the page has room for
        x, y = place_of(here, "D decodes", 3, width)
        canvas.click(position={"x": x, "y": y})
        lab.comes_to("[shown.canvas.chosen, shown.journey.request_id]", [3, here.trace[3].request_id])
        before = lab.page.evaluate(DRAWN)
        assert lab.value("shown.show(read(Path()))") is None
        lab.page.wait_for_function(f"{DRAWN} !== '{before}'")
        assert lab.cell(0).locator(".pdlab-timeline").get_attribute("aria-label") == "timeline of 0 requests, 0 actors"
        path = tmp_path / "trace.json"
        lab.value(f"setattr(shown, 'path', Path({str(path)!r}))")
        lab.page.get_by_role("button", name="Perfetto").click()
        lab.cell(0).get_by_text(f"saved {path}").wait_for()
        assert path.exists()
