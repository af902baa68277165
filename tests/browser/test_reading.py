"""The report as a reader sees it: nothing lies over another, nothing is cut, and every link leads somewhere."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

from evaluation.config import ReportConfig
from evaluation.report import render
from tests.evaluation.pipeline import write_pipeline

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DESKTOP, PHONE = 1300, 375

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")

FAULTS = """() => {
  const said = node => node.textContent.trim().slice(0, 40), found = [];
  for (const svg of document.querySelectorAll('svg.chart')) {
    const frame = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll('text')].map(node => {
      const name = said(node.cloneNode(true));
      return {name, box: node.getBoundingClientRect()};
    }).filter(text => text.box.width);
    texts.forEach((one, place) => {
      const {box} = one;
      const across = Math.max(frame.left - box.left, box.right - frame.right);
      if (Math.max(across, frame.top - box.top, box.bottom - frame.bottom) > 1)
        found.push(`cut in ${svg.getAttribute('aria-label')}: ${one.name}`);
      for (const other of texts.slice(place + 1)) {
        const across = Math.min(box.right, other.box.right) - Math.max(box.left, other.box.left);
        const down = Math.min(box.bottom, other.box.bottom) - Math.max(box.top, other.box.top);
        if (across > 1 && down > 0.25 * Math.min(box.height, other.box.height))
          found.push(`overlap in ${svg.getAttribute('aria-label')}: ${one.name} / ${other.name}`);
      }
    });
  }
  for (const node of document.querySelectorAll('body *:not(svg *)')) {
    const style = getComputedStyle(node);
    // The lineage is wider than the column of text, on purpose; whether the page holds it is looked at below.
    if (node.querySelector('svg.lineage') && !node.classList.contains('scroll')) continue;
    const scrolls = ['auto', 'scroll'].includes(style.overflowX) || style.display === 'inline';
    if (node.clientWidth && node.scrollWidth > node.clientWidth + 1 && !scrolls)
      found.push(`wider than its place: ${node.tagName} ${said(node)}`);
  }
  const width = document.documentElement.scrollWidth;
  if (width > innerWidth) found.push(`the page is ${width} px wide`);
  return found;
}"""

SMALLEST = """() => Math.min(...[...document.querySelectorAll('svg.chart:not(.lineage) text')].map(node =>
  parseFloat(getComputedStyle(node).fontSize) * node.getScreenCTM().a))"""

PLATES = """() => {
  const bright = colour => { const [r, g, b] = colour.match(/[\\d.]+/g).map(Number); return (r + g + b) / 765; };
  return [...document.querySelectorAll('figure')].map(node => ({
    plate: bright(getComputedStyle(node).backgroundColor),
    ink: bright(getComputedStyle(node.querySelector('text')).fill),
  }));
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a family of artifacts, in the place where the stage writes it."""
    root = tmp_path_factory.mktemp("reading") / "store"
    folders = write_pipeline(root)
    place = root / "report" / "0123456789abcdef"
    place.mkdir(parents=True)
    (place / "report.html").write_text(render(ReportConfig(title="reading"), folders)[0], encoding="utf-8")
    return place / "report.html"


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_the_report_is_read_in_both_themes_and_at_phone_width(
    browser: Browser, report: Path, theme: Any, width: int
) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
    try:
        page = context.new_page()
        page.goto(report.as_uri())
        assert page.evaluate(FAULTS) == []
        assert page.evaluate(SMALLEST) >= 8
        for figure in page.evaluate(PLATES):
            assert (figure["plate"] < 0.25 < figure["ink"]) if theme == "dark" else (figure["plate"] > 0.9)
        dead = []
        for link in page.eval_on_selector_all("a", "nodes => nodes.map(node => node.getAttribute('href'))"):
            there = page.query_selector(link) if link.startswith("#") else (report.parent / link).exists()
            dead += [] if there else [link]
        assert dead == []
    finally:
        context.close()
