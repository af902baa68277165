"""The text of every test item that a pipeline's models will be asked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from evaluation.config import BenchmarkTextConfig
from infra.run import Result, Run
from tasks.stage import Stage


def build(config: BenchmarkTextConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    from evaluation.benchmark_text import benchmark_text

    return benchmark_text(config, inputs, out_dir, run)


STAGE = Stage(
    "benchmark_text",
    version=1,
    config=BenchmarkTextConfig,
    build=build,
)
