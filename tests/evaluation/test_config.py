"""What the evaluation sections of a config accept, and what they say of what they don't."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from evaluation.config import BenchmarksConfig, Gate, RegisterConfig, SafetyConfig


def test_project_tasks_go_by_name() -> None:
    by_name = BenchmarksConfig.model_validate({"tasks": ["minimal_pairs", "cloze"]})
    assert by_name == BenchmarksConfig()
    assert all(path.is_file() for source in by_name.sources() for path in source.paths)


@pytest.mark.parametrize(
    ("tasks", "expected"),
    [
        (["hellaswag"], "expected minimal_pairs or cloze"),
        ([{"name": "mine", "kind": "multiple_choice"}], "needs `path`"),
        ([{"name": "cloze", "path": "x.jsonl"}], "needs `kind`"),
        ([{"name": "mine", "kind": "essay", "path": "x"}], "multiple_choice"),
        (["cloze", "cloze"], "given twice: cloze"),
        ([], "at least 1"),
        ([{"name": "a/b", "kind": "cloze", "path": "x"}], "pattern"),
    ],
)
def test_a_wrong_task_is_told(tasks: list, expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        BenchmarksConfig.model_validate({"tasks": tasks})


def test_the_schema_lets_editors_offer_the_names() -> None:
    items = BenchmarksConfig.model_json_schema()["properties"]["tasks"]["items"]
    assert {"enum": ["minimal_pairs", "cloze"], "type": "string"} in items["anyOf"]


def test_lm_eval_sources_hold_what_the_task_reads(tmp_path: Path) -> None:
    (tmp_path / "helpers.py").write_text("")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").write_text("{}\n")
    task = tmp_path / "task.yaml"
    task.write_text(
        "task: mine\ndataset_path: json\ndataset_kwargs:\n  data_files: {test: data/rows.jsonl}\n"
        "process_docs: !function helpers.process\n"
    )
    config = BenchmarksConfig.model_validate({"tasks": [{"name": "mine", "kind": "lm_eval", "path": str(task)}]})
    names = [path.relative_to(tmp_path).as_posix() for path in config.sources()[0].paths]
    assert names == ["data/rows.jsonl", "helpers.py", "task.yaml"]


def test_a_missing_file_stays_in_sources_for_the_caller_to_name(tmp_path: Path) -> None:
    gone = tmp_path / "gone.yaml"
    config = BenchmarksConfig.model_validate({"tasks": [{"name": "mine", "kind": "lm_eval", "path": str(gone)}]})
    assert config.sources()[0].paths == (gone,)


def test_safety_parts_can_be_left_out() -> None:
    assert SafetyConfig.model_validate({"toxicity": None, "bias": None, "memorisation": None}).sources() == []


@pytest.mark.parametrize(
    ("gate", "expected"),
    [
        ({"figure": "sft.loss"}, "`at_least` or `at_most`"),
        ({"figure": "loss", "at_most": 1}, "pattern"),
        ({"figure": "sft.loss", "at_least": 2, "at_most": 1}, "no figure is at least 2 and at most 1"),
    ],
)
def test_a_gate_without_sense_is_told(gate: dict, expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        RegisterConfig.model_validate({"gates": [gate]})


def test_a_gate_may_hold_both_bounds() -> None:
    assert Gate(figure="sft.loss", at_least=1, at_most=1)


def test_importing_the_config_loads_nothing_heavy() -> None:
    heavy = "{'torch', 'transformers', 'lm_eval', 'numpy', 'scipy', 'matplotlib', 'datasets', 'sklearn'}"
    code = f"import sys, evaluation.config; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
