"""The table of dropped documents, aux/dropped.parquet: a row a document with the reason, of every stage that drops."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("id", "source", "rule", "paper")),
        *((name, pa.float64()) for name in ("value", "low", "high")),
        ("text", pa.string()),
    ]
)
TEXT_CHARACTERS = 2_000
"""Longer texts are cut here: the whole text lies in the stage's input."""


def dropped_rows(
    documents: pa.Table,
    rules: list[str],
    papers: list[str],
    values: NDArray[np.floating],
    low: float = float("-inf"),
    high: float = float("inf"),
) -> pa.Table:
    """Rows for dropped documents (N): the rule of each, what was measured, and the limits that it had to keep."""
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
