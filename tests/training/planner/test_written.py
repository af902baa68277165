"""What `stemma plan` leaves behind: a config that `check` takes, and a page whose sliders compute as the plan does."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

from evaluation.pages.planning import rows
from evaluation.pages.planning_page import planning_page
from flows.config.graph import graph
from flows.config.read import load
from flows.planning.needs import check_hardware, stage_needs
from flows.planning.plan import plan as would
from flows.planning.planned_config import write_config
from infra.errors import ConfigError
from infra.store.store import Store
from training.planner.laws.curves import curves
from training.planner.plan import plan, request

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.parametrize(
    "wishes",
    [
        {"preset": "gpt-1.3b", "tokens": 2e10, "gpu": "a100-80", "gpus": 16},
        {"money": 3000, "gpu": "h100", "gpus": 8},
        {"parameters": 5e6, "gpu": "l40s", "gpus": 1},
        {"parameters": 1.3e9, "tokens": 2e10, "gpu": "h100", "gpus": 16, "length": 65_536},
        {"preset": "llama-2-7b", "tokens": 1e11, "gpu": "l40s", "gpus": 16},
        {"preset": "olmoe-1b-7b", "tokens": 1e11, "gpu": "h100", "length": 4096, "batch_tokens": 32_768},
        {"preset": "llama-2-7b", "tokens": 1e11, "gpu": "v100", "gpus": 64},
        {"preset": "llama-2-7b", "tokens": 1e11, "gpu": "h100", "gpus": 64, "length": 131_072},
        {"preset": "gpt-1.3b", "tokens": 2e10, "gpu": "h100", "gpus": 12},
        {"preset": "llama-2-7b", "tokens": 1e11, "gpu": "h100", "gpus": 9},
    ],
    ids=["preset", "budget", "small", "context", "stages", "experts", "layers-stages", "layers-context", "12", "9"],
)
def test_the_config_is_taken_and_takes_the_time_that_was_planned(wishes: dict, tmp_path: Path) -> None:
    found = plan(request(**wishes))
    write_config(found, tmp_path / "planned.yaml")
    config = load(tmp_path / "planned.yaml")
    layout = found["runnable"]
    assert not check_hardware(config) and config.launch.context_parallel == layout["cp"]
    assert config.launch.ranks == found["gpus"], "no more than were planned, on nodes that are not full"
    assert config.launch.pipeline_parallel == layout["pp"]
    assert config.launch.tensor_parallel == layout["tp"]
    assert config.launch.expert_parallel == layout["ep"] == (8 if "olmoe" in found["model"] else 1)
    nodes = graph(config)
    needed = stage_needs(config, nodes, would(nodes, Store(tmp_path / "store", reading=True)))["pretrain"]
    hours = found["hours"] * layout["step_s"] / found["step_s"]
    assert needed.fits and needed.hours == pytest.approx(hours, rel=0.05)
    with pytest.raises(ConfigError):
        write_config(found, tmp_path / "planned.yaml")


def test_a_layout_that_launch_does_not_know_is_not_written(tmp_path: Path) -> None:
    found = {**plan(request(preset="gpt-125m")), "runnable": None}
    with pytest.raises(ConfigError, match="no layout of data, tensor"):
        write_config(found, tmp_path / "planned.yaml")


def test_the_page_has_curves_and_sliders() -> None:
    wanted = request(preset="gpt-1.3b", tokens=2e10)
    found = plan(wanted)
    page = planning_page(found, curves(wanted, found))
    assert page.count("<script>") == 1
    assert page.count('type="range"') == 5 and page.count('class="chart"') == 3
    assert "http://" not in page.replace("http://www.w3.org", "") and "Cost against devices" in page


def test_a_small_plan_has_no_loss_of_a_law_that_does_not_hold_and_sliders_that_begin_at_its_own_size() -> None:
    wanted = request(preset="qwen3-4m", tokens=8e5, gpus=1)
    document = plan(wanted)
    assert document["loss"] is None and not any("nats per token" in reason for reason in document["verdict"]["because"])
    figures = {name: (value, range_) for name, value, range_ in rows(document)}
    assert "loss" not in figures and figures["time"] == ("under 1 s", "under 1 s")
    assert figures["memory per device"][0].startswith("needs ") and " MB, has " in figures["memory per device"][0]
    assert figures["checkpoint"][0] == "at the end: failures are too rare for more"
    page = planning_page(document, curves(wanted, document))
    assert (
        f'value="{math.log10(document["tokens"]):.9f}"' in page
        and f'min="{math.log10(document["tokens"]):.9f}"' in page
    )


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt install chromium")
@pytest.mark.parametrize(
    "wishes",
    [
        pytest.param({"preset": "gpt-1.3b", "tokens": 2e10, "gpus": 16}, id="dense"),
        pytest.param({"preset": "olmoe-1b-7b", "tokens": 2e10, "gpus": 16}, id="mixture", marks=pytest.mark.long),
    ],
)
def test_sliders_compute_what_the_plan_does(wishes: dict, tmp_path: Path) -> None:
    wanted = request(**wishes)
    document = plan(wanted)
    (tmp_path / "plan.html").write_text(planning_page(document, curves(wanted, document)), encoding="utf8")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.goto((tmp_path / "plan.html").as_uri())
        assert page.inner_text("#plan-time") == f"{document['hours']:.1f} h"
        assert page.inner_text("#plan-cost") == f"{document['cost_usd']:,.0f} USD"
        assert page.inner_text("#plan-loss") == f"{document['loss']:.3f} nats per token"
        twice = "slider => { slider.value = Math.log10(32); slider.dispatchEvent(new Event('input', {bubbles: true})) }"
        page.eval_on_selector("input[name=gpus]", twice)
        assert page.inner_text("#plan-time") == f"{document['hours'] / 2:.1f} h"
        page.set_viewport_size({"width": 400, "height": 800})
        for said in page.locator("output").all():
            assert said.evaluate("one => one.getBoundingClientRect().left + one.scrollWidth") <= 400
        browser.close()
