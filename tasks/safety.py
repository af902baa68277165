"""Toxicity, bias and memorisation of one model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from evaluation.config import SafetyConfig
from infra.run import Result, Run
from tasks.stage import Stage


def build(config: SafetyConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    from evaluation.safety import safety

    return safety(config, inputs, out_dir, run)


STAGE = Stage(
    "safety",
    version=2,
    config=SafetyConfig,
    build=build,
    inputs=("model", "shards"),
    shows=("results.json",),
)
