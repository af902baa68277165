"""Curves of a finished training: values under the pointer, and a drag that zooms."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from flows.runs.journal import RunJournal, StageRow
from infra.servers.http import answers
from infra.servers.ports import any_free_port
from tests.support.programs.command import environment
from tests.support.programs.processes import running, wait_until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE_MS = 90_000
pytestmark = [pytest.mark.cluster, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")]


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """The page of a finished run whose loss falls from 3 to 2 in 100 steps."""
    root = tmp_path / "store"
    aux = root / "pretrain" / ("a" * 16) / "aux"
    aux.mkdir(parents=True)
    (root / "format").write_text("1\n")
    lines = [{"time": 1.0, "step": step, "values": {"train/loss": 3 - step / 100}} for step in range(1, 101)]
    (aux / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    journal = RunJournal(root / "runs", "20261128-000000-000000-aaaaaa")
    journal.begin(pipeline="tiny", config="tiny.yaml")
    journal.row(StageRow("pretrain", "built", seconds=61.0, path=str(aux.parent)))
    journal.end({"status": "done", "errors": [], "stages": []})
    port = any_free_port()
    command = [sys.executable, "-m", "flows.dashboard.server", str(root), "--port", str(port)]
    with running(command, environment(), tmp_path / "page.log"):
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/health"))
        yield f"http://127.0.0.1:{port}/run/{journal.run_id}"


@pytest.fixture
def browser_page() -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.set_default_timeout(PATIENCE_MS)
        yield page
        browser.close()


def test_a_finished_curve_shows_values_and_zooms(address: str, browser_page: Page) -> None:
    page = browser_page
    expect.set_options(timeout=PATIENCE_MS)
    page.goto(address)
    chart = page.locator("figure.zooms svg[data-plot]")
    box = chart.bounding_box()
    assert box is not None
    middle, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(middle, y)
    expect(page.locator(".hover")).to_contain_text("now: 2.")
    expect(page.locator(".hover")).to_contain_text("step ")
    page.mouse.move(box["x"] + box["width"] / 4, y)
    page.mouse.down()
    page.mouse.move(middle, y)
    page.mouse.up()
    expect(chart).not_to_have_attribute("data-plot", "52,628,1,100")
    first, last = map(float, str(chart.get_attribute("data-plot")).split(",")[2:])
    assert 1 < first < last < 60
    page.mouse.dblclick(middle, y)
    expect(chart).to_have_attribute("data-plot", "52,628,1,100")
    page.mouse.move(1, 1)
    expect(page.locator(".hover")).to_have_count(0)
