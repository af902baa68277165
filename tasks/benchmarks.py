"""Scores of one model on lm-eval tasks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from evaluation.config import BenchmarksConfig
from infra.run import Result, Run
from tasks.stage import Stage


def build(config: BenchmarksConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    from evaluation.benchmarks import benchmarks

    return benchmarks(config, inputs, out_dir, run)


STAGE = Stage(
    "benchmarks",
    version=1,
    config=BenchmarksConfig,
    build=build,
    inputs=("model",),
    shows=("results.json",),
)
