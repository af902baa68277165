"""The base model, tuned to follow instructions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from infra.run import Result, Run
from tasks.stage import Stage
from training.config import SftConfig


def build(config: SftConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    from training.sft import sft

    return sft(config, inputs, out_dir, run)


STAGE = Stage(
    "sft",
    version=5,
    config=SftConfig,
    build=build,
    inputs=("model", "instructions"),
    makes="model",
    trains=True,
    shows=("aux/samples.jsonl", "aux/corrections.json"),
)
