"""A model that scores answers, from preference pairs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from infra.run import Result, Run
from tasks.stage import Stage
from training.config import RewardModelConfig


def build(config: RewardModelConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    from training.reward_model import reward_model

    return reward_model(config, inputs, out_dir, run)


STAGE = Stage(
    "reward_model",
    version=4,
    config=RewardModelConfig,
    build=build,
    inputs=("model", "preferences"),
    makes="model",
    shows=("aux/corrections.json",),
    trains=True,
)
