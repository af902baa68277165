"""The base model, trained from scratch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from infra.run import Result, Run
from tasks.stage import Stage
from training.config import PretrainConfig


def build(config: PretrainConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    from training.pretrain import pretrain

    return pretrain(config, inputs, out_dir, run)


STAGE = Stage(
    "pretrain",
    version=6,
    config=PretrainConfig,
    build=build,
    inputs=("shards", "tokenizer"),
    makes="model",
    shows=("aux/corrections.json",),
    trains=True,
)
