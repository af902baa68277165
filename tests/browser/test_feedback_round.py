"""A round of feedback on the real Prefect page: it waits there for people, goes on, and lineage names its labels."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.test_page import PATIENCE_MS, browser, browser_page, pytestmark  # noqa: F401
from tests.support.pipelines import full_config
from tests.support.programs.command import environment, stemma, write_config
from tests.support.programs.processes import COLD, wait_until
from tests.support.services.prefect_page import post, sheets


@pytest.fixture
def up(built_full: Path, tmp_path: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """A built pipeline with its servers up, without what only tells of it: its folder and the commands' environment."""
    folder = tmp_path / "full"
    shutil.copytree(built_full, folder, ignore=shutil.ignore_patterns("lineage", "mlflow", "servers"))
    config = {name: section for name, section in full_config().items() if name not in ("register", "report")}
    write_config(folder / "config.yaml", config)
    env = environment(STEMMA_RELAY="on", **COLD)
    try:
        assert stemma("up", "--root", folder / "store", env=env).code == 0
        yield folder, env
    finally:
        stemma("down", "--root", folder / "store", env=env)


@pytest.mark.long
def test_a_round_waits_for_people_in_the_page_and_its_labels_are_learnt(
    up: tuple[Path, dict[str, str]],
    browser_page: Page,  # noqa: F811
) -> None:
    """The risk: a round that Prefect resumes before labels are there, or never, or that learns other labels."""
    folder, env = up
    root, page = folder / "store", browser_page
    asked = ("feedback", "round", folder / "config.yaml", "--root", root, "--pairs", "6")
    draws = ("--max-new-tokens", "8", "--temperature", "1")

    def judged(begun: str, *options: str) -> tuple[Path, dict[str, Any]]:
        """Everybody prefers the first answer."""
        (round_,) = (root / "feedback").glob(f"*-{begun[:8]}")
        pairs = [json.loads(line) for line in (round_ / "pairs.jsonl").read_text().splitlines()]
        rows = [{"pair": pair["id"], "annotator": "ann", "choice": "a"} for pair in pairs]
        said = folder / f"{round_.name}.jsonl"
        said.write_text("".join(json.dumps(row) + "\n" for row in rows))
        answer = stemma("feedback", "import", round_, said, "--root", root, *options, env=env)
        assert answer.code == 0, answer.document["errors"]
        return round_, answer.document

    begun = stemma(*asked, *draws, env=env).document
    address = begun["url"].partition("/runs/")[0]
    run = begun["flow_run_id"]

    def read(run: str) -> dict[str, Any]:
        found = post(f"{address}/api/flow_runs/filter", {"flow_runs": {"id": {"any_": [run]}}}, 30.0)
        return dict(found[0]["state"])

    def state(run: str) -> str:
        return str(read(run)["name"])

    wait_until(lambda: state(run) == "Suspended", timeout_s=300)
    assert "judge" in sheets(address, run)
    page.goto(begun["url"])
    expect(page.get_by_text("Suspended").first).to_be_visible(timeout=PATIENCE_MS)

    round_, imported = judged(run, "--wait")
    assert (imported["resumed"], imported["preferences"], state(run)) == ("", 6, "Suspended")
    page.get_by_role("button", name="Resume").first.click()
    page.get_by_role("button", name="Submit").or_(page.get_by_role("button", name="Resume")).last.click()
    page.goto("about:blank")
    wait_until(lambda: state(run) in ("Completed", "Failed", "Crashed"), timeout_s=400)
    assert state(run) == "Completed", read(run)["message"]

    models = sorted((root / "rlhf").glob("*/manifest.json"), key=lambda path: path.stat().st_mtime)
    assert len(models) == 2
    lineage = stemma("lineage", models[-1].parent, "--root", root, env=env)
    assert str(round_ / "judged" / "preferences.jsonl") in json.dumps(lineage.document)

    second = stemma(*asked, *draws, env=env).document["flow_run_id"]
    wait_until(lambda: state(second) == "Suspended", timeout_s=300)
    _, imported = judged(second)
    assert second in str(imported["resumed"])
    assert wait_until(lambda: state(second) != "Suspended")
