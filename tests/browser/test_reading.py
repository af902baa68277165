"""The pages as a reader sees them: nothing lies over another, nothing is cut, and every link leads somewhere.

Of Prefect's and MLflow's own pages this is asked of what we put into them: sheets with their charts and the card,
links, descriptions.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import sqlite3
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from evaluation.config import ReportConfig
from evaluation.pages.comparison import STYLES, comparison_page
from evaluation.report import render
from infra.servers.http import post
from tests.evaluation.pages.test_corpus_report import chain
from tests.evaluation.pages.test_corpus_report import report as corpus_page
from tests.evaluation.pipeline import write_pipeline
from tests.infra.lineage.conftest import MlflowServer
from tests.support.programs.processes import wait_until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DESKTOP, PHONE = 1300, 375
PATIENCE_MS = 90_000

__all__ = ["chain"]

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

UNSEEN = """() => [...document.querySelectorAll('figure:not(.wide) svg.chart')].filter(svg =>
  svg.getBoundingClientRect().right > svg.closest('figure').getBoundingClientRect().right
).map(svg => svg.getAttribute('aria-label'))"""
"""Charts of half a page that are to be scrolled to their end; those over a whole page may be, on a phone."""

PLATES = """() => {
  const bright = colour => { const [r, g, b] = colour.match(/[\\d.]+/g).map(Number); return (r + g + b) / 765; };
  return [...document.querySelectorAll('figure')].map(node => ({
    plate: bright(getComputedStyle(node).backgroundColor),
    ink: bright(getComputedStyle(node.querySelector('text')).fill),
  }));
}"""


SHEET_FAULTS = """() => {
  const sheet = document.querySelector('article'), found = [], blocks = [...sheet.children];
  if (document.documentElement.scrollWidth > innerWidth) found.push('the page is wider than the window');
  if (sheet.scrollWidth > sheet.clientWidth + 1 && getComputedStyle(sheet).overflowX === 'visible')
    found.push('the sheet is cut');
  for (const picture of sheet.querySelectorAll('img'))
    if (!picture.naturalWidth || picture.getBoundingClientRect().right > innerWidth) found.push(`cut: ${picture.alt}`);
  blocks.slice(1).forEach((block, place) => {
    if (block.getBoundingClientRect().top < blocks[place].getBoundingClientRect().bottom - 1)
      found.push(`overlap: ${block.textContent.trim().slice(0, 40)}`);
  });
  return found;
}"""

NARROW = """svg => `<style>body{margin:0} div{width:343px} svg{width:100%;height:auto}</style><div>${svg}</div>`"""


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


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_the_corpus_report_is_read_at_phone_width_too(
    browser: Browser, chain: dict[str, Path], tmp_path: Path, width: int
) -> None:
    corpus_page(chain, tmp_path / "out")
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto((tmp_path / "out" / "aux" / "corpus_report.html").as_uri())
    assert page.locator("summary").count() > 2
    assert page.evaluate(FAULTS) == []
    assert page.evaluate(SMALLEST) >= 8
    assert page.evaluate(UNSEEN) == []
    page.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_the_report_is_read_in_both_themes_and_at_phone_width(
    browser: Browser, report: Path, theme: Any, width: int
) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
    try:
        page = context.new_page()
        page.goto(report.as_uri())
        page.evaluate("document.querySelectorAll('details').forEach(node => node.open = true)")
        assert page.evaluate(FAULTS) == []
        assert page.evaluate(SMALLEST) >= 8
        assert page.evaluate(UNSEEN) == []
        for figure in page.evaluate(PLATES):
            assert (figure["plate"] < 0.25 < figure["ink"]) if theme == "dark" else (figure["plate"] > 0.9)
        dead = []
        for link in page.eval_on_selector_all("a", "nodes => nodes.map(node => node.getAttribute('href'))"):
            there = page.query_selector(link) if link.startswith("#") else (report.parent / link).exists()
            dead += [] if there else [link]
        assert dead == []
    finally:
        context.close()


UNDRAWN = """() => [...document.querySelectorAll('svg.chart .whisker')].filter(line =>
  getComputedStyle(line).stroke === 'none').length"""


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_a_comparison_shows_every_interval_and_whole_values_beside_long_names(
    browser: Browser, tmp_path: Path, width: int
) -> None:
    """Values stood outside of the drawing, where they are cut off, and intervals of some styles had no colour."""
    names = [
        "pretrain/5edd266c",
        *(f"sft/0761f4f{n}" for n in range(len(STYLES) - 2)),
        "a_step_with_quite_a_long_name" * 2,
    ]
    paired = [
        {
            "name": name,
            "figure": figure,
            "unit": "share",
            "difference": -0.125,
            "low": -0.41,
            "high": 0.19,
            "shown": False,
        }
        for figure in (
            "cloze accuracy",
            "expected maximum toxicity",
            "accuracy of " + "a task with a very long name " * 2,
        )
        for name in names[1:]
    ]
    compared = [{"name": name, "kind": "artifact", "headline": "", "evaluations": []} for name in names]
    document = {"compared": compared, "seeds": [], "differences": [], "figures": [], "paired": paired}
    (tmp_path / "page.html").write_text(comparison_page(document, names, [{} for _ in names]), encoding="utf-8")
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto((tmp_path / "page.html").as_uri())
    drawing = "svg.narrow" if width == PHONE else "svg:not(.narrow)"
    assert page.locator(f"{drawing}:visible .whisker").count() == 3 * (len(names) - 1)
    assert page.locator("svg.intervals:visible").count() == 1
    assert page.evaluate(UNDRAWN) == 0
    assert [fault for fault in page.evaluate(FAULTS) if "cut in" in fault or "overlap" in fault] == []
    assert all(text.endswith(" −12.5") for text in page.locator(".mark-label").all_text_contents())
    page.close()


@pytest.fixture(scope="module")
def sheets(built_full: Path) -> dict[str, tuple[str, str]]:
    """Key → (address in the Prefect page, markdown), of a pipeline that was built."""
    answer = json.loads((built_full / "answer.json").read_text())
    server = answer["flow_run_url"].partition("/runs/")[0]
    asked = {"flow_runs": {"id": {"any_": [answer["flow_run_id"]]}}, "artifacts": {"type": {"any_": ["markdown"]}}}
    found = post(f"{server}/api/artifacts/filter", asked)
    return {one["key"]: (f"{server}/artifacts/artifact/{one['id']}", one["data"]) for one in found}


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.parametrize(("theme", "width"), [("dark", DESKTOP), ("light", PHONE), ("light", DESKTOP), ("dark", PHONE)])
def test_a_sheet_on_the_prefect_page_is_read_in_both_themes_and_at_phone_width(
    browser: Browser, sheets: dict[str, tuple[str, str]], theme: Any, width: int
) -> None:
    """The sheets with the most in them: a training with its charts, and the card."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme="light")
    # Prefect's page has a theme of its own.
    context.add_init_script(f"localStorage.setItem('color-scheme', JSON.stringify('{theme}'))")
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    try:
        for key in ("stage-pretrain", "stage-register"):
            page.goto(sheets[key][0])
            page.locator("article table").last.wait_for()
            assert page.evaluate(SHEET_FAULTS) == []
        page.goto(sheets["stage-pretrain"][0])
        corner = Image.open(BytesIO(page.locator("article img").first.screenshot())).convert("L").getpixel((12, 30))
        assert isinstance(corner, int)
        assert corner < 64 if theme == "dark" else corner > 230
    finally:
        context.close()


@pytest.mark.cluster
def test_no_word_in_the_charts_of_the_sheets_lies_over_another(
    browser: Browser, sheets: dict[str, tuple[str, str]]
) -> None:
    page = browser.new_page(viewport={"width": PHONE, "height": 900})
    charts = 0
    for _, text in sheets.values():
        for encoded in re.findall(r"data:image/svg\+xml;base64,([^)]+)", text):
            page.set_content(page.evaluate(NARROW, base64.b64decode(encoded).decode()))
            assert page.evaluate(FAULTS) == []
            assert page.evaluate(SMALLEST) >= 8
            charts += 1
    page.close()
    assert charts > 10


@pytest.fixture(scope="module")
def mlflow(built_full: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """MLflow's page over the history of a pipeline that was built."""
    root = tmp_path_factory.mktemp("mlflow") / "store"
    with sqlite3.connect(built_full / "store" / "mlflow" / "mlflow.db") as database:
        asked = "select count(*) from tags where key = 'mlflow.note.content' and value like '%[report](%'"
        wait_until(lambda: database.execute(asked).fetchone()[0], timeout_s=180)
    shutil.copytree(built_full / "store" / "mlflow", root / "mlflow")
    server = MlflowServer(root)
    try:
        server.start()
        yield server.url
    finally:
        server.stop()


@pytest.mark.long
@pytest.mark.cluster
def test_mlflow_s_first_page_has_no_assistant_and_leaves_a_phone_to_the_experiments(
    browser: Browser, mlflow: str
) -> None:
    page = browser.new_page(viewport={"width": PHONE, "height": 800})
    page.set_default_timeout(PATIENCE_MS)
    page.goto(mlflow)
    page.get_by_text("Recent Experiments").wait_for()
    page.get_by_role("link", name="tiny").wait_for()
    assert page.evaluate("document.querySelector('main').getBoundingClientRect().width") > 0.8 * PHONE
    assistant = page.locator("[data-assistant-ui]")
    assert assistant.count(), "hidden by a name that the page does not use"
    assert not any(one.is_visible() for one in assistant.all()) and page.get_by_text("Start Demo").count() == 0
    page.close()


@pytest.mark.cluster
def test_what_mlflow_shows_of_a_pipeline_leads_to_what_is_there(browser: Browser, mlflow: str) -> None:
    found = post(f"{mlflow}/api/2.0/mlflow/runs/search", {"experiment_ids": ["1"], "max_results": 200})["runs"]
    runs = {one["info"]["run_id"]: {tag["key"]: tag["value"] for tag in one["data"]["tags"]} for one in found}
    (pipeline,) = [run for run, tags in runs.items() if tags.get("stemma.kind") == "pipeline"]
    note = runs[pipeline]["mlflow.note.content"]
    linked = re.findall(r"\]\(#/experiments/1/runs/(\w+)\?workflowType=machine_learning\)", note)
    assert len(linked) > 10 and set(linked) <= runs.keys()
    context = browser.new_context(viewport={"width": DESKTOP, "height": 900})
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    try:
        page.goto(f"{mlflow}/#/experiments/1/runs/{pipeline}?workflowType=machine_learning")
        for theme in ("light", "dark"):
            page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
            table = page.locator("table", has_text="key figure").first
            table.wait_for()
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert page.get_by_text("Share usage data").count() == 0
        page.goto("about:blank")  # else the page of the run, with links of the same names, stays for a moment
        page.goto(f"{mlflow}/#/models")
        for place in ("#/models/tiny", "#/models/tiny/versions/1"):
            page.locator(f"a[href$='{place}']").first.wait_for()
            page.goto("about:blank")
            page.goto(f"{mlflow}/{place}")
        for section in ("Use", "Data", "Results"):
            page.get_by_role("heading", name=section, exact=True).first.wait_for()
    finally:
        context.close()
