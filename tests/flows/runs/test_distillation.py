"""Distillation through the command: a student of another step's model, its page, and a teacher that is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.evaluation.conftest import make_model
from tests.support.programs.command import Answer, write_config

SETTINGS: dict[str, Any] = {
    "duration": "8 batches",
    "global_batch_examples": 8,
    "max_length": 64,
    "answer_max_tokens": 8,
    "heldout_prompts": 4,
    "optimizer": {"learning_rate": 3.0e-3, "weight_decay": 0.0},
}


def _config(folder: Path, teacher: Path, student: Path) -> dict[str, Any]:
    rows = [{"prompt": f"Say {n}.", "response": f"It is {n}."} for n in range(24)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"kind": "files", "paths": [str(folder / "pairs.jsonl")]}
    given = {"model": "base_model", "teacher": "teacher", "instructions": "instructions"}
    return {
        "name": "distilled",
        "base_model": {"path": str(student)},
        "instructions": {"read": [source], "heldout_share": 0.3},
        "report": {},
        "steps": {
            "teacher": {"uses": "base_model", "path": str(teacher)},
            "small": {"uses": "distill", "inputs": given, **SETTINGS},
        },
    }


def test_a_step_distils_and_the_report_shows_it(run: Callable[..., Answer], tmp_path: Path) -> None:
    models = [make_model(tmp_path / name, seed=seed) for seed, name in enumerate(("teacher", "student"))]
    config = write_config(tmp_path / "config.yaml", _config(tmp_path, *models))
    answer = run("run", config, "--root", tmp_path / "store", "--until", "small,report")
    assert answer.code == 0, answer.document["errors"]
    measured = json.loads((Path(answer.rows()["measure_small"]["path"]) / "manifest.json").read_text())
    assert measured["result"]["figures"]["divergence_fall_low"] > 0
    page = (Path(answer.rows()["report"]["path"]) / "report.html").read_text()
    assert "Held-out divergence" in page and "came closer to its teacher" in page


def test_check_refuses_a_teacher_of_another_vocabulary_by_name(run: Callable[..., Answer], tmp_path: Path) -> None:
    models = [make_model(tmp_path / name, seed) for seed, name in enumerate(("teacher", "student"))]
    tokenizer = json.loads((models[0] / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (models[0] / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = write_config(tmp_path / "config.yaml", _config(tmp_path, *models))
    answer = run("check", config, "--root", tmp_path / "store")
    (error,) = answer.document["errors"]
    assert answer.code == 2 and (error["code"], error["path"]) == ("other_vocabulary", "steps.small.inputs.teacher")
    assert "4 entries of that of teacher differ" in error["message"]
