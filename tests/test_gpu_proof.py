"""`make gpu-proof` at toy size on a CPU: on a day with a GPU it works at the first call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_proof import Settings, _key
from tests.support.programs.command import REPOSITORY


def proof(out: Path, *parts: str) -> tuple[str, dict[str, Any]]:
    """What it prints, and its parts."""
    command = [sys.executable, "-m", "benchmarks.gpu_proof", "--device", "cpu", "--toy", "--out", str(out)]
    done = subprocess.run(
        [*command, *(("--only", *parts) if parts else ())],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads((out / "proof.json").read_text())["parts"]


def test_a_part_that_is_done_is_not_run_again(tmp_path: Path) -> None:
    done = {"key": _key(Settings(tmp_path, "cpu", is_toy=True)), "rows": [{"holds": True}], "seconds": 1.0}
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "losses.json").write_text(json.dumps(done))
    output, parts = proof(tmp_path, "losses", "machine")
    assert output.startswith("losses: done before\nmachine: ")
    assert (tmp_path / "proof.md").read_text() in output
    assert parts["losses"] == done and list(parts) == ["machine", "losses"]


@pytest.mark.long
def test_parts_leave_figures_and_are_not_run_again(tmp_path: Path) -> None:
    """The risk: what is left by a real part is not what the next call takes for done."""
    output, parts = proof(tmp_path, "losses", "sampling")
    assert [row["holds"] for row in parts["losses"]["rows"]] == [True, True]
    assert all(row["tokens_per_s"] > 0 for row in parts["sampling"]["rows"])
    assert (tmp_path / "proof.md").read_text() in output
    output, again = proof(tmp_path, "losses", "machine")
    assert output.startswith("losses: done before\nmachine: ")
    assert again["losses"] == parts["losses"] and list(again) == ["machine", "losses", "sampling"]


@pytest.mark.long
def test_all_parts_run_on_a_cpu(tmp_path: Path) -> None:
    _, parts = proof(tmp_path)
    assert set(parts) == {"machine", "tests", "losses", "loops", "stages", "options", "sampling"}
    assert [row["stage"] for row in parts["stages"]["rows"]] == ["pretrain", "sft", "reward_model", "rlhf"]
    assert all(row["memory_gb"] > 0 and row["planned_gb"] > 0 for row in parts["stages"]["rows"])
    assert {row[""] for row in parts["loops"]["rows"]} == {"composer", "native"}
    (tests,) = parts["tests"]["rows"]
    assert tests["failures"] == tests["ran"] == 0 < tests["skipped"], "they need a GPU"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.long
def test_tests_that_all_skip_are_no_proof_of_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_proof", "--out", str(tmp_path), "--only", "tests"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert done.returncode == 1 and "| False |" in done.stdout, done.stdout + done.stderr
