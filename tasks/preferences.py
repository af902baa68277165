"""Prompts with a better and a worse response, for the reward model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from corpus.config import PreferencesConfig
from infra.run import Result, Run
from tasks.stage import Stage


def build(config: PreferencesConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    from corpus.preferences import preferences

    return preferences(config, inputs, out_dir, run)


STAGE = Stage(
    "preferences",
    version=1,
    config=PreferencesConfig,
    build=build,
)
