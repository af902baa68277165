"""What `make upgrade` says of two environments: nothing where they are one, and what differs where something does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare_environments import Artifact, compare
from tests.support.programs.command import REPOSITORY


def artifact(folder: Path, files: dict[str, str], losses: list[float], **figures: float) -> Artifact:
    (folder / "aux").mkdir(parents=True)
    manifest: dict[str, Any] = {
        "files": [{"path": path, "sha256": digest} for path, digest in {**files, "aux/stage.log": str(folder)}.items()],
        "result": {"figures": figures},
        "seconds": 2.0,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    lines = [json.dumps({"values": {"train/loss": loss, "train/memory_gb": 1.5}}) for loss in losses]
    (folder / "aux" / "metrics.jsonl").write_text("\n".join(lines))
    return Artifact(folder)


def test_what_differs_between_two_artifacts_is_told(tmp_path: Path) -> None:
    same = {"config.json": "a", "model.safetensors": "b"}
    one = artifact(tmp_path / "one", same, [4.0, 2.0], validation_loss=2.0, tokens_per_s=100.0)
    two = artifact(tmp_path / "two", same, [4.0, 2.0], validation_loss=2.0, tokens_per_s=300.0)
    (row,) = compare({"pretrain": one}, {"pretrain": two})
    assert (row["files that differ"], row["losses apart"], row["figures apart"]) == ("none", "0", "0")
    assert row["tokens/s"] == "100 → 300" and row["GB"] == "1.5"

    moved = artifact(tmp_path / "moved", {**same, "model.safetensors": "c"}, [4.0, 2.5], validation_loss=2.2)
    (row,) = compare({"pretrain": one}, {"pretrain": moved})
    assert row["files that differ"] == "1 of 2: model.safetensors"
    assert (row["losses apart"], row["last loss"]) == ("2.0e-01", "2 → 2.5")
    assert row["figures apart"] == "validation_loss 2 → 2.2"
    shorter = artifact(tmp_path / "shorter", same, [4.0], validation_loss=2.0, ends_share=1.0)
    (row,) = compare({"pretrain": one}, {"pretrain": shorter})
    assert row["losses apart"] == "2 and 1 batches" and row["figures apart"] == "ends_share is in one alone"
    assert list(compare({"sft": one}, {})) == [{"stage": "sft", "files": "only in the first"}]


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_an_environment_equals_itself(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.compare_environments", sys.executable, sys.executable]
    command += ["--out", str(tmp_path / "upgrade.md"), "--tests", "tests/infra/test_seeds.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "upgrade.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "]
    stages = {row[0]: row[1:] for row in rows if len(row) == 8 and row[0] != "stage"}
    assert {"pretrain", "sft", "reward_model", "dpo", "rlhf", "safety_rlhf"} <= set(stages)
    # The registration and the report name the run that they belong to.
    assert {name for name, row in stages.items() if row[0] != "none"} <= {"register", "report"}
    assert {stages[name][1] for name in ("pretrain", "sft", "reward_model", "dpo", "rlhf")} == {"0"}
    assert "0 with another outcome" in text
