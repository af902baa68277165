"""Tokenised, packed MDS shards, split into training and validation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from corpus.config import ShardConfig
from infra.run import Result, Run
from tasks.stage import Stage


def build(config: ShardConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    from corpus.shard import shard

    return shard(config, inputs, out_dir, run)


STAGE = Stage(
    "shard",
    version=2,
    config=ShardConfig,
    build=build,
    inputs=("documents", "tokenizer"),
)
