"""One page about the whole pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from evaluation.config import ReportConfig
from infra.run import Result, Run
from tasks.stage import Stage


def build(config: ReportConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    from evaluation.report import report

    return report(config, inputs, out_dir, run)


STAGE = Stage(
    "report",
    version=1,
    config=ReportConfig,
    build=build,
    makes="report",
    shows=("report.html",),
)
