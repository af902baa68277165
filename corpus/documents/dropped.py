"""Documents that stages drop: the table aux/dropped.parquet with a reason for each document, and sources lost by it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from corpus.documents.sources import SourceCounts, SourceFacts, source_name
from infra.run import Run

SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("id", "source", "rule", "paper")),
        *((name, pa.float64()) for name in ("value", "low", "high")),
        ("text", pa.string()),
    ]
)
TEXT_CHARACTERS = 2_000
"""Longer texts are cut here: the whole text is in the stage's input."""


def dropped_rows(
    documents: pa.Table,
    rules: list[str],
    papers: list[str],
    values: NDArray[np.floating],
    low: float = float("-inf"),
    high: float = float("inf"),
) -> pa.Table:
    """Return rows for dropped documents (N): the rule of each, the measured value, and the limits of the rule."""
    rows = documents.num_rows
    columns = {
        "id": documents["id"],
        "source": documents["source"],
        "rule": pa.array(rules, pa.string()),
        "paper": pa.array(papers, pa.string()),
        "value": pa.array(values, pa.float64()),
        "low": pa.array(np.full(rows, low)),
        "high": pa.array(np.full(rows, high)),
        "text": pc.utf8_slice_codeunits(documents["text"], 0, TEXT_CHARACTERS),
    }
    return pa.table(columns, schema=SCHEMA)


LEAST_SHARE = 0.01
"""Less than this share of a source's documents counts as nearly nothing: rather a fault of a rule than its purpose."""


def tell_of_vanished(
    stage: str, before: Mapping[str, SourceFacts], after: SourceCounts, dropped: Path, run: Run
) -> dict[str, dict[str, int | str]]:
    """The sources of which less than LEAST_SHARE of the documents are left, each with an event that names the rule that
    took most of it.

    Args:
        before: the sources that came in; those without documents are not looked at.
        dropped: the stage's table of dropped documents, see `corpus.documents.dropped`.
    """
    lost = {
        name: facts.documents
        for name, facts in before.items()
        if facts.documents and after.documents[name] < LEAST_SHARE * facts.documents
    }
    if not lost:
        return {}
    rules: dict[str, Counter[str]] = {name: Counter() for name in lost}
    with pq.ParquetFile(dropped) as table:
        for batch in table.iter_batches(columns=["source", "rule"]):
            for source, rule in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                if (name := source_name(source)) in rules:
                    rules[name][rule] += 1
    vanished: dict[str, dict[str, int | str]] = {}
    for name, documents in lost.items():
        kept = after.documents[name]
        [(rule, count)] = rules[name].most_common(1) or [("", 0)]
        vanished[name] = {"documents": documents, "kept": kept, "rule": rule, "dropped": count}
        took = f": {rule} took {count:,}" if rule else ""
        message = f"{stage} keeps {kept:,} of the {documents:,} documents of the source {name}{took}"
        run.event("source_vanished", message, source=name, **vanished[name])
    return vanished


def warning(vanished: Mapping[str, Mapping[str, int | str]]) -> str:
    """Return the warning for a stage's headline; "" where no source vanished."""
    message = [
        f"{'nothing' if not row['kept'] else 'hardly anything'} left of {name}" for name, row in vanished.items()
    ]
    return f"; WARNING: {', '.join(message)}" if message else ""
