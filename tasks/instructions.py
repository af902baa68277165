"""Prompts with their responses, for instruction tuning."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from corpus.config import InstructionsConfig
from infra.run import Result, Run
from tasks.stage import Stage


def build(config: InstructionsConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    from corpus.instructions import instructions

    return instructions(config, inputs, out_dir, run)


STAGE = Stage(
    "instructions",
    version=1,
    config=InstructionsConfig,
    build=build,
)
