"""Curves of a finished training and of two over each other: values under the pointer, and a drag that zooms."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect, sync_playwright

from flows.runs.journal import JournalRow, RunJournal
from infra.servers.http import answers
from infra.servers.ports import any_free_port
from infra.store.manifest import Manifest
from tests.support.programs.command import environment
from tests.support.programs.processes import running, wait_until

ADDRESS = {"fingerprint": "0" * 16, "digest": "0" * 64}

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE_MS = 90_000
pytestmark = [pytest.mark.cluster, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")]


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """The pages of a store with a finished run whose loss falls from 3 to 2 in 100 steps, and another model."""
    root = tmp_path / "store"
    for name, start in (("a", 3.0), ("b", 3.5)):
        aux = root / "pretrain" / (name * 16) / "aux"
        aux.mkdir(parents=True)
        lines = [{"time": 1.0, "step": step, "values": {"train/loss": start - step / 100}} for step in range(1, 101)]
        (aux / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        manifest = Manifest(
            stage="pretrain",
            version=1,
            fingerprint=name * 16,
            digest=name * 64,
            build_id=name,
            config={},
            identity={},
            inputs={},
            requires={},
            sources=(),
            files=(),
            result={},
            step="pretrain",
        )
        manifest.write(aux.parent)
    (root / "format").write_text("1\n")
    aux = root / "pretrain" / ("a" * 16) / "aux"
    journal = RunJournal(root / "runs", "20261128-000000-000000-aaaaaa")
    journal.begin(pipeline="tiny", config="tiny.yaml")
    journal.row(JournalRow("pretrain", "built", **ADDRESS, seconds=61.0, path=str(aux.parent)))
    journal.end({"status": "done", "errors": [], "stages": []})
    port = any_free_port()
    command = [sys.executable, "-m", "flows.dashboard.server", str(root), "--port", str(port)]
    with running(command, environment(), tmp_path / "page.log"):
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/health"))
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def browser_page() -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.set_default_timeout(PATIENCE_MS)
        yield page
        browser.close()


def hover(page: Page, chart: Locator) -> tuple[float, float, float]:
    """Move the pointer to the middle of a chart; return x of a quarter of its width, x and y of its middle."""
    expect(chart).to_be_visible()
    box = chart.bounding_box()
    assert box is not None
    middle, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(middle, y)
    return box["x"] + box["width"] / 4, middle, y


def zoom_and_return(page: Page, chart: Locator) -> None:
    """Drag over the second quarter of a chart of steps 1 to 100, which shows them alone, and go back to all."""
    everything = str(chart.get_attribute("data-plot"))
    quarter, middle, y = hover(page, chart)
    page.mouse.move(quarter, y)
    page.mouse.down()
    page.mouse.move(middle, y)
    page.mouse.up()
    expect(chart).not_to_have_attribute("data-plot", everything)
    first, last = map(float, str(chart.get_attribute("data-plot")).split(",")[2:])
    assert 1 < first < last < 60
    page.mouse.dblclick(middle, y)
    expect(chart).to_have_attribute("data-plot", everything)


def test_a_finished_curve_shows_values_and_zooms(address: str, browser_page: Page) -> None:
    page = browser_page
    expect.set_options(timeout=PATIENCE_MS)
    page.goto(f"{address}/run/20261128-000000-000000-aaaaaa")
    chart = page.locator("figure.zooms svg[data-plot]")
    hover(page, chart)
    expect(page.locator(".hover")).to_contain_text("now: 2.")
    expect(page.locator(".hover")).to_contain_text("step ")
    zoom_and_return(page, chart)
    page.mouse.move(1, 1)
    expect(page.locator(".hover")).to_have_count(0)


def test_compared_curves_show_values_and_zoom(address: str, browser_page: Page) -> None:
    page = browser_page
    expect.set_options(timeout=PATIENCE_MS)
    page.goto(f"{address}/compare?a=pretrain/{'a' * 16}&b=pretrain/{'b' * 16}")
    chart = page.locator("#curves svg[data-plot]")
    chart.scroll_into_view_if_needed()
    hover(page, chart)
    expect(page.locator(".hover")).to_contain_text("pretrain/aaaaaaaa: 2.")
    expect(page.locator(".hover")).to_contain_text("pretrain/bbbbbbbb: 3")
    zoom_and_return(page, chart)
    expect(chart.locator("polyline.line")).to_have_count(2)
