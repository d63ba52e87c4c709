"""Each chapter in JupyterLab, as a reader opens it: run all, look, click, light and dark. On recorded runs."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdlab.paths import repo_root
from tests.browser import ERRORS, IDLE, LabPage, chromium, jupyterlab, opened

CHAPTERS = sorted(path.name for path in (repo_root() / "notebooks").glob("[0-9]*.ipynb"))
GROUND = "getComputedStyle(document.querySelector('.pdlab-figure')).backgroundColor"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, scratch = (tmp_path_factory.mktemp(name) for name in ("chapters", "jupyter"))
    for name in CHAPTERS:
        shutil.copy(repo_root() / "notebooks" / name, folder)
    before = os.environ.get("PDLAB_RUN")
    os.environ["PDLAB_RUN"] = "recorded"  # the server's kernels have it from here
    try:
        with jupyterlab(folder, scratch) as url:
            yield url
    finally:
        os.environ.pop("PDLAB_RUN") if before is None else os.environ.update(PDLAB_RUN=before)


def run_all(lab: LabPage) -> list[str]:
    """Run all cells; the errors that stand in the notebook then."""
    lab.command("notebook:run-all-cells")
    lab.page.wait_for_function(IDLE, timeout=120_000)
    return list(lab.page.evaluate(ERRORS))


@pytest.mark.parametrize("name", CHAPTERS)
def test_a_reader_runs_it_all_and_sees_it_in_light_and_dark(browser: Any, address: str, name: str) -> None:
    with opened(browser, address, name) as lab:
        lab.theme("light")  # whatever the last one left
        errors = run_all(lab)
        assert all(error.startswith("RequestError: the proxy answered 400") for error in errors)  # meant to be seen
        lab.page.locator(".pdlab-figure svg").first.wait_for()
        assert lab.page.locator(".pdlab-figure svg text").count() > 10
        light = lab.page.evaluate(GROUND)
        lab.theme("dark")
        assert lab.page.evaluate(GROUND) != light
        assert "recorded 20" in lab.page.locator(".jp-Notebook").inner_text()


def test_the_bench_follows_one_cursor(browser: Any, address: str) -> None:
    with opened(browser, address, "00_the_lab.ipynb") as lab:
        run_all(lab)
        lab.page.locator(".pdlab-figure").first.locator('text[data-name="step 7"]').click()
        parts = "[bench.stepper.step, bench.source.step, bench.blocks.step, bench.memory.step]"
        lab.comes_to(parts, [7, 7, 7, 7])
        lab.page.keyboard.press("ArrowRight")
        lab.comes_to(parts, [8, 8, 8, 8])


@pytest.mark.parametrize("name", CHAPTERS)
def test_nothing_in_it_is_lost_on_a_page_without_kernel(name: str) -> None:
    """What is stored: a picture and a line for each view, no widget state, no address, nothing of vLLM's source."""
    text = Path(repo_root() / "notebooks" / name).read_text()
    assert "widget-view" not in text and '"widgets"' not in text
    assert "_free_request_blocks" not in text and "skip_request(" not in text
