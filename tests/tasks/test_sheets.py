"""What every stage leaves in the Prefect page for a person to look at."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.pages.page import LINES, WINDOW_S, Throttle
from tasks.pages.sheet import drawings, read_curves
from tests.support.programs.command import Answer
from tests.support.services.prefect_page import sheets

BASELINES = {
    "pretrain": b">bigrams ",
    "sft": b">before tuning ",
    "reward-model": b">guessing 0.693</text>",
    "rlhf": b">SFT, held out ",
}
PICTURE = r"!\[([^\]]+)\]\(data:image/svg\+xml;base64,([^)]+)\)"


@pytest.fixture(scope="module")
def full_sheets(built_full: Path) -> tuple[set[str], dict[str, str]]:
    """The keys that are expected, and what there is."""
    answer = json.loads((built_full / "answer.json").read_text())
    keys = {f"stage-{row['stage'].replace('_', '-')}" for row in answer["stages"]}
    return keys, sheets(answer["flow_run_url"].partition("/runs/")[0], answer["flow_run_id"])


def test_every_stage_that_was_built_leaves_its_sheet(full_sheets: tuple[set[str], dict[str, str]]) -> None:
    expected, found = full_sheets
    assert expected <= set(found)
    for stage in ("pretrain", "sft", "reward-model", "rlhf"):
        pictures = dict(re.findall(PICTURE, found[f"stage-{stage}"]))
        assert {"Loss", "Learning rate"} <= set(pictures), stage
        loss = base64.b64decode(pictures["Loss"])
        assert b"<polyline" in loss and b">training, smoothed</text>" in loss
        assert b"prefers-color-scheme:dark" in loss, "a dark plate on a dark page"
        assert BASELINES[stage] in base64.b64decode(pictures["Reward" if stage == "rlhf" else "Loss"])
    assert "| holds | there are at least" in found["stage-validate"]
    assert "### Gates" in found["stage-register"]
    assert "### Model card" in found["stage-register"]
    assert "report.html" in found["stage-report"]


def test_a_failed_stage_says_what_where_and_what_to_do(
    run: Callable[..., Answer], prefect_url: str, data_pipeline: Path
) -> None:
    wanted = ["--set", "validate.documents.min_rows=1000000"]
    answer = run("run", data_pipeline / "config.yaml", "--root", data_pipeline / "store", *wanted)
    error = answer.document["errors"][0]
    sheet = sheets(prefect_url.removesuffix("/api"), answer.document["flow_run_id"])["stage-validate"]
    assert "# validate failed" in sheet
    assert error["code"] in sheet
    assert error["message"] in sheet
    assert "stemma logs validate" in sheet


def test_a_talkative_stage_does_not_flood_the_page() -> None:
    now = 0.0
    throttle = Throttle("stemma logs pretrain", lambda: now)
    shown = [line for number in range(1000) for line in throttle.let_through(f"line {number}")]
    assert len(shown) == LINES
    now = WINDOW_S
    assert throttle.let_through("again") == ["… 960 more lines: stemma logs pretrain", "again"]
    assert throttle.let_through("\r 1 %\r 50 %\r 99 %\r") == [" 99 %"]


@pytest.mark.parametrize("odd", ["inf", "-inf", "nan"])
def test_a_value_that_is_not_finite_takes_no_picture_from_a_sheet(odd: str) -> None:
    """Under fp16 the gradient norm of a batch whose loss scale was too high is infinite: there was no sheet at all."""
    values = [odd, *(str(1 + 1 / step) for step in range(1, 9))]
    lines = [
        json.dumps({"step": step, "values": {"train/loss": 4.0, "train/grad_norm": value}})
        for step, value in enumerate(values, 1)
    ]
    curves = read_curves(lines)
    assert len(curves["train/grad_norm"]) == 8
    pictures = {title: base64.b64decode(uri.partition(",")[2]).decode() for title, uri in drawings("sft", curves, {})}
    assert set(pictures) == {"Loss", "Gradient norm"} and "nan" not in pictures["Gradient norm"]
