"""The needle test: texts of exact length, the number at its place, and a reader of the end of a text found out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import evaluation.needle as module
from evaluation.config.needle import NeedleConfig
from evaluation.needle import needle
from infra.errors import StageError
from infra.launch.config import LaunchConfig
from infra.run import Run
from tests.evaluation.conftest import make_model

LAUNCH = LaunchConfig(device="cpu", threads=1)
SETTINGS: dict[str, Any] = {"lengths": (200, 400), "depths": (0.0, 0.5, 1.0), "items": 6}


def test_a_model_that_reads_the_end_alone_finds_the_number_there_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model(tmp_path / "model", seed=1)
    seen: list[int] = []

    def reader(lm: Any, sequences: Sequence[list[int]], run: Run, note: str) -> list[Any]:
        """Prefers the answer whose digits are among the last 160 tokens before it."""
        scores = []
        for ids in sequences:
            seen.append(len(ids))
            answer = lm.tokenizer.decode(ids).split()[-1]
            context = lm.tokenizer.decode(ids[-160:]).rpartition(answer)[0]
            scores.append((torch.full((len(ids) - 1,), float(answer in context)), None))
        return scores

    monkeypatch.setattr(module, "token_log_likelihoods", reader)
    config = NeedleConfig.model_validate(SETTINGS)
    figures = needle(config, {"model": folder}, tmp_path, Run(tmp_path / "work", LAUNCH)).figures
    assert set(seen) == {200, 400} and len(seen) == 2 * 3 * 6 * 4
    lengths = json.loads((tmp_path / "results.json").read_text())["lengths"]
    shares = {
        length: {depth: cell["value"] for depth, cell in entry["depths"].items()} for length, entry in lengths.items()
    }
    assert shares["400"] == {"0": 0.0, "0.5": 0.0, "1": 1.0} and shares["200"]["1"] == 1.0 and shares["200"]["0"] == 0.0
    assert figures["needle_400"] == pytest.approx(1 / 3) and figures["needle_chance"] == 0.25
    assert figures["needle_400_low"] < 1 / 3 < figures["needle_400_high"]


def test_an_untrained_model_is_measured_beyond_its_positions(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", seed=1)
    positions = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    settings = SETTINGS | {"lengths": (positions + 40,), "items": 2, "depths": (0.5,)}
    figures = needle(
        NeedleConfig.model_validate(settings), {"model": folder}, tmp_path, Run(tmp_path / "work", LAUNCH)
    ).figures
    assert 0 <= figures[f"needle_{positions + 40}"] <= 1
    with pytest.raises(StageError, match=r"needle\.lengths.*expected room"):
        tight = NeedleConfig.model_validate(SETTINGS | {"lengths": (64,), "needle": "x {number} " * 40})
        needle(tight, {"model": folder}, tmp_path, Run(tmp_path / "work", LAUNCH))
