"""Documents in the proportions that a model is to read them in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from corpus.mix.config import MixConfig
from infra.run import Result, Run
from tasks.stage import Stage


def build(config: MixConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    from corpus.mix.stage import mix

    return mix(config, inputs, out_dir, run)


STAGE = Stage(
    "mix",
    version=1,
    config=MixConfig,
    build=build,
    inputs=("documents",),
)
