"""Documents that are worth training on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from corpus.cleaning.config import CleanConfig
from infra.run import Result, Run
from tasks.stage import Stage


def build(config: CleanConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    from corpus.clean import clean

    return clean(config, inputs, out_dir, run)


STAGE = Stage(
    "clean",
    version=3,
    config=CleanConfig,
    build=build,
    inputs=("documents",),
)
