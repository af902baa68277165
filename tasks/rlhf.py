"""The instruction-tuned model, aligned by PPO against the reward model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from infra.run import Result, Run
from tasks.stage import Stage
from training.config import RlhfConfig


def build(config: RlhfConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    from training.rlhf import rlhf

    return rlhf(config, inputs, out_dir, run)


STAGE = Stage(
    "rlhf",
    version=4,
    config=RlhfConfig,
    build=build,
    inputs=("model", "reward_model", "prompts"),
    makes="model",
    shows=("aux/samples.jsonl",),
)
