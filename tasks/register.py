"""Gates, model card and registration of the final model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from evaluation.config import RegisterConfig
from infra.run import Result, Run
from tasks.stage import Stage


def build(config: RegisterConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    from evaluation.register import register

    return register(config, inputs, out_dir, run)


STAGE = Stage(
    "register",
    version=1,
    config=RegisterConfig,
    build=build,
    inputs=("model",),
    makes="report",
    registers="model",
    shows=("MODEL_CARD.md",),
)
