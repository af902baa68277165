"""Text from outside becomes documents."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from corpus.config import IngestConfig
from infra.run import Result, Run
from tasks.stage import Stage


def build(config: IngestConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    from corpus.ingest import ingest

    return ingest(config, inputs, out_dir, run)


STAGE = Stage(
    "ingest",
    version=2,
    config=IngestConfig,
    build=build,
)
