"""Documents, each there once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from corpus.dedupe.config import DedupeConfig
from infra.run import Result, Run
from tasks.stage import Stage


def build(config: DedupeConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    from corpus.dedupe.stage import dedupe

    return dedupe(config, inputs, out_dir, run)


STAGE = Stage(
    "dedupe",
    version=1,
    config=DedupeConfig,
    build=build,
    inputs=("documents",),
)
