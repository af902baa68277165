"""The report's sections on averaged weights, the needle test and rubrics: what the steps' figures and files say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evaluation.config import ReportConfig
from evaluation.pages.parts import Table
from evaluation.pages.report.benchmarks.needle_section import needle
from evaluation.pages.report.training.alignment_sections import alignment
from evaluation.pages.report.training.training_sections import averaging
from evaluation.report import render
from evaluation.results.pipeline import PipelineResults
from infra.store.manifest import Manifest
from tests.evaluation.pipeline import with_figures, write_pipeline


def with_step(folders: dict[str, Path], id: str, stage: str, like: str, figures: dict[str, float]) -> dict[str, Path]:
    """The pipeline with one more step, whose manifest is that of another one, with other figures."""
    folder = folders[like].parents[1] / stage / ("8" * 16)
    shutil.copytree(folders[like], folder)
    replace(Manifest.read(folder), stage=stage, step=id, fingerprint="8" * 16).write(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["result"] = {"figures": figures, "headline": id}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return {**folders, id: folder}


def cells(tables: Sequence[Table], title: str) -> list[list[str]]:
    (table,) = [table for table in tables if table.title == title]
    return [list(map(str, row)) for row in table.rows]


def test_an_average_is_compared_with_each_of_its_members(tmp_path: Path) -> None:
    figures = {
        "members": 3.0, "averaged": 2.0, "validation_loss_model": 3.2, "validation_loss_second": 3.1,
        "validation_loss_spoilt": 7.0, "validation_loss_best": 3.1, "validation_loss": 3.05,
    }  # fmt: skip
    folders = with_step(write_pipeline(tmp_path / "store"), "soup", "average", "pretrain", figures)
    section = averaging(PipelineResults(folders), "soup")
    assert "The mean of 2 of 3 models" in section.lead and "0.0500" in section.lead
    rows = cells(section.tables, "Averaged models")
    assert rows == [["model", "3.2000"], ["second", "3.1000"], ["spoilt", "7.0000"], ["the mean", "3.0500"]]
    assert "Weight averaging" in render(ReportConfig(), folders)[0]


def test_numbers_that_a_needle_test_found_are_listed_by_length_and_place(tmp_path: Path) -> None:
    def share(value: float, **depths: float) -> dict[str, Any]:
        inner = {name[1:]: {"value": each, "low": each, "high": each, "n": 10} for name, each in depths.items()}
        return {"value": value, "low": value - 0.1, "high": value + 0.1, "n": 20, "depths": inner}

    lengths = {"512": share(0.9, _0=0.8, _1=1.0), "2048": share(0.3, _0=0.2, _1=0.4)}
    folders = with_step(write_pipeline(tmp_path / "store"), "needle_long", "needle", "benchmarks_base", {"x": 1.0})
    (folders["needle_long"] / "results.json").write_text(
        json.dumps({"chance": 0.25, "positions": 1024, "lengths": lengths})
    )
    section = needle(PipelineResults(folders), "needle_long")
    first, second = cells(section.tables, "Numbers found by length and place")
    assert first[0] == "512" and second[0] == "2,048 *", "beyond the model's positions"
    assert "90" in first[1] and "80" in first[2] and "100" in first[3] and "20" in second[2]
    note = section.tables[0].note
    assert "4 choices" in note and "1,024 positions" in note
    assert "Needle test: needle_long" in render(ReportConfig(), folders)[0]


def test_each_criterion_of_a_rubric_has_both_models_scores_and_the_gain(tmp_path: Path) -> None:
    folders = write_pipeline(tmp_path / "store")
    bounds = {"": 0.0, "_low": -0.1, "_high": 0.1}
    scores = {
        "rubric_sft": 0.4, "rubric_rlhf": 0.6, "rubric_gain": 0.2,
        "rubric_polite_sft": 0.5, "rubric_polite_rlhf": 0.45, "rubric_polite_gain": -0.05,
    }  # fmt: skip
    assert "Rubric" not in [table.title for table in alignment(PipelineResults(folders), "rlhf").tables]
    with_figures(
        folders["rlhf"], **{f"{name}{end}": value + by for name, value in scores.items() for end, by in bounds.items()}
    )
    rows = cells(alignment(PipelineResults(folders), "rlhf").tables, "Rubric")
    assert [row[0] for row in rows] == ["all, weighted", "polite"]
    assert rows[0][1].startswith("0.40") and rows[0][2].startswith("0.60") and rows[0][3].startswith("+0.20")
    assert rows[1][3].startswith("-0.05") or rows[1][3].startswith("−0.05")
