"""One page about the corpus."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from evaluation.config import CorpusReportConfig
from infra.run import Result, Run
from tasks.stage import Stage

READS = (
    "ingest",
    "validate",
    "clean",
    "dedupe",
    "decontaminate",
    "mix",
    "validate_clean",
    "tokenizer",
    "shard",
    "validate_shards",
)
"""The nodes that it tells of, as far as the pipeline has them."""


def build(config: CorpusReportConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    from evaluation.corpus_report import corpus_report

    return corpus_report(config, inputs, out_dir, run)


STAGE = Stage(
    "corpus_report",
    version=1,
    config=CorpusReportConfig,
    build=build,
    inputs=READS,
    makes="report",
    shows=("aux/corpus_report.html",),
    compares=True,
)
