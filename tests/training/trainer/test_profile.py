"""`launch.profile` and what is left of plans: both beside the result, which stays the same to the bit."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from evaluation.pages.parts import render_page
from evaluation.pages.report.training.planned_section import planned, profiles
from evaluation.results.pipeline import PipelineResults
from infra.launch.config import LaunchConfig
from infra.run import Run
from training.config import PretrainConfig
from training.pretrain import pretrain


def test_profiled_steps_leave_a_trace_and_the_same_bits(shards_dir: Path, tokenizer_dir: Path, tmp_path: Path) -> None:
    config = PretrainConfig.model_validate(
        {
            "model": {"family": "llama", "layers": 2, "width": 32, "heads": 2, "positions": 64, "dropout": 0.1},
            "duration": "8 batches",
            "global_batch_tokens": 256,
            "evaluate_every": "4 batches",
        }
    )
    weights = {}
    for steps in (0, 3):
        launch = LaunchConfig(device="cpu", threads=1, precision="fp32", profile=steps)
        out = tmp_path / f"out{steps}"
        out.mkdir()
        run = Run(tmp_path / f"work{steps}", launch)
        pretrain(config, {"shards": shards_dir, "tokenizer": tokenizer_dir}, out, run)
        weights[steps] = (out / "model.safetensors").read_bytes()
    assert weights[0] == weights[3]
    assert not (tmp_path / "out0" / "aux" / "profile.json").exists()

    aux = tmp_path / "out3" / "aux"
    events = json.loads(gzip.decompress((aux / "profile_trace.json.gz").read_bytes()))["traceEvents"]
    steps = [event for event in events if event.get("name") == "Optimizer.step#AdamW.step"]
    assert len(steps) == 3, "three steps were asked for"
    found = json.loads((aux / "profile.json").read_text())
    assert found["steps"] == 3 and found["communication_share"] == 0
    names = [row["name"] for row in found["operators"]]
    assert {"aten::mm", "aten::addmm"} & set(names)
    assert found["operators"][0]["self_ms"] == max(row["self_ms"] for row in found["operators"])
    peak = max(held for _, held in found["memory"])
    # The logits of 256 tokens, and what the layers keep for the backward pass; not a step's worth three times.
    assert 0.1 < peak < 50
    assert names[0] in (aux / "profile_operators.txt").read_text()

    told = json.loads((aux / "planned.json").read_text())
    assert told["measured"]["step_s"] > 0 and told["planned"]["batches"] == 8
    assert told["planned"]["step_s_low"] < told["planned"]["step_s"] < told["planned"]["step_s_high"]
    results = PipelineResults({"pretrain": tmp_path / "out3"})
    page = render_page("tiny", "training report", [], [planned(results), profiles(results)])
    assert "measured / planned" in page and "memory of tensors" in page and "aten::" in page
