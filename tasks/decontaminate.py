"""Documents that hold no test item of the benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from corpus.decontaminate.config import DecontaminateConfig
from infra.run import Result, Run
from tasks.stage import Stage


def build(config: DecontaminateConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    from corpus.decontaminate.stage import decontaminate

    return decontaminate(config, inputs, out_dir, run)


STAGE = Stage(
    "decontaminate",
    version=1,
    config=DecontaminateConfig,
    build=build,
    inputs=("documents", "benchmark_text"),
)
