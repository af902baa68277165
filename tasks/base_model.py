"""The base model, taken from a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from infra.run import Result, Run
from tasks.stage import Stage
from training.config import BaseModelConfig


def build(config: BaseModelConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    from training.adopt import import_model

    return import_model(config, inputs, out_dir, run)


STAGE = Stage(
    "base_model",
    version=1,
    config=BaseModelConfig,
    build=build,
    makes="model",
)
