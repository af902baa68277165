"""Published benchmark and probe files are read as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evaluation.benchmarks import benchmarks
from evaluation.config import BenchmarksConfig, SafetyConfig
from evaluation.safety import safety
from infra.run import Run

DATA = Path(__file__).parents[3] / "shared" / "data"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="the shared data sets are not on this machine")

WORLD = "llm_foundry_eval/world_knowledge"
TASKS: dict[str, dict[str, Any]] = {
    "arc_easy": {"kind": "multiple_choice", "path": f"{WORLD}/arc_easy.jsonl"},
    "copa": {
        "kind": "multiple_choice",
        "path": "llm_foundry_eval/commonsense_reasoning/copa.jsonl",
        "query_suffix": "",
    },
    "jeopardy": {"kind": "cloze", "path": f"{WORLD}/jeopardy_small.jsonl"},
    "lambada": {"kind": "cloze", "path": "lambada/lambada_test.jsonl"},
}


def test_benchmarks_of_llm_foundry_and_lambada(model_dir: Path, tmp_path: Path, run: Run) -> None:
    tasks = [{"name": name, **task, "path": str(DATA / task["path"])} for name, task in TASKS.items()]
    result = benchmarks(
        BenchmarksConfig.model_validate({"tasks": tasks, "limit": 6}), {"model": model_dir}, tmp_path, run
    )
    assert result.figures["arc_easy_accuracy_chance"] == 0.25 and result.figures["copa_accuracy_chance"] == 0.5
    lambada = json.loads((tmp_path / "aux/samples_lambada.jsonl").read_text().splitlines()[0])
    assert lambada["doc"]["text"].endswith(lambada["target"]) and " " not in lambada["target"]
    jeopardy = json.loads((tmp_path / "aux/samples_jeopardy.jsonl").read_text().splitlines()[0])
    assert jeopardy["target"] == "Admiral Richard Byrd"


def test_crows_pairs(model_dir: Path, tmp_path: Path, run: Run) -> None:
    bias = {"pairs": str(DATA / "crows_pairs" / "crows_pairs_anonymized.csv"), "limit": 60}
    config = SafetyConfig.model_validate({"bias": bias, "toxicity": None, "memorisation": None})
    safety(config, {"model": model_dir}, tmp_path, run)
    found = json.loads((tmp_path / "results.json").read_text())["bias"]
    assert found["pairs"] == 60 and {"race-color", "gender"} <= set(found["by_category"])
    assert sum(cell["pairs"] for cell in found["by_category"].values()) == 60
