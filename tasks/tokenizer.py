"""A tokenizer, trained on the documents or taken over."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from corpus.config import TokenizerConfig
from infra.run import Result, Run
from tasks.stage import Stage


def build(config: TokenizerConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    from corpus.tokenizer import tokenizer

    return tokenizer(config, inputs, out_dir, run)


STAGE = Stage(
    "tokenizer",
    version=2,
    config=TokenizerConfig,
    build=build,
    inputs=("documents",),
)
