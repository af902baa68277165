"""The actions of the page of a model in a real browser: it is exported, promoted and tried."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright")
from playwright.sync_api import Browser, expect

from infra.servers.http import answers
from infra.servers.ports import any_free_port
from tests.browser.test_reading import browser  # noqa: F401
from tests.support.programs.command import environment
from tests.support.programs.processes import running, wait_until

PATIENCE_MS = 240_000
pytestmark = [pytest.mark.cluster, pytest.mark.long]


@pytest.fixture
def address(built_full: Path, tmp_path: Path) -> Iterator[str]:
    """The pages of a copy of the tiny pipeline's store."""
    root = tmp_path / "store"
    shutil.copytree(built_full / "store", root, ignore=shutil.ignore_patterns("lineage", "mlflow", "servers"))
    port = any_free_port()
    command = [sys.executable, "-m", "flows.dashboard.server", str(root), "--port", str(port)]
    with running(command, environment(STEMMA_RELAY="off"), tmp_path / "page.log"):
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/health"))
        yield f"http://127.0.0.1:{port}"


def test_a_model_is_exported_promoted_and_tried_from_its_page(
    browser: Browser,  # noqa: F811
    address: str,
    tmp_path: Path,
) -> None:
    """The risk: a button of the page does otherwise than the command, whose own tests are in `make test`."""
    root, page = tmp_path / "store", browser.new_page(viewport={"width": 375, "height": 800})
    page.set_default_timeout(PATIENCE_MS)
    expect.set_options(timeout=PATIENCE_MS)
    page.goto(f"{address}/model/rlhf")
    page.get_by_role("button", name="Promote").click()
    expect(page.locator("#about-promote")).to_contain_text("It is already promoted as")
    assert json.loads((root / "promotions.json").read_text())
    page.get_by_role("button", name="Export").click()
    expect(page.locator("#about-export")).to_contain_text("It was exported to")
    (exported,) = (root / "exports").iterdir()
    assert {"README.md", "model.safetensors"} <= {path.name for path in exported.iterdir()}

    page.get_by_role("button", name="Try it").click()
    page.wait_for_url("**/chat/")
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    page.get_by_label("tokens at most").fill("8")
    page.get_by_label("prompt", exact=True).fill("What is a list?")
    page.keyboard.press("Enter")
    expect(page.locator("form button.primary")).to_be_enabled()
    turns = page.locator(".turn b").all_text_contents()
    assert [turn.partition("/")[0] for turn in turns] == ["you", "rlhf", "you", "sft"]
    expect(page.locator(".turn.error")).to_have_count(0)
    page.get_by_role("link", name="Back to the page").click()
    expect(page.locator("h1").first).to_contain_text("rlhf")
    page.goto(f"{address}/model/reward_model")
    expect(page.get_by_role("button", name="Try it")).to_be_disabled()
