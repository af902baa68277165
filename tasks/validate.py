"""A Great Expectations suite that stops the flow when the data is not what it should be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from corpus.config import ValidateConfig
from infra.run import Result, Run
from tasks.stage import Stage


def build(config: ValidateConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    from corpus.validate import validate

    return validate(config, inputs, out_dir, run)


STAGE = Stage(
    "validate",
    version=2,
    config=ValidateConfig,
    build=build,
    inputs=("data",),
    shows=("aux/validation.html", "aux/failing_rows.jsonl"),
    compares=True,
)
