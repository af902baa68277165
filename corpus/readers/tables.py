"""Rows of Parquet files, and of the Arrow files that Hugging Face datasets are saved as."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from corpus.quarantine import Rejected
from corpus.readers.record import Record
from corpus.readers.table_batches import Bad, Table
from corpus.readers.table_process import table_rows


def read_rows(table: Table) -> Iterator[Record | Rejected]:
    """The rows of a Parquet or Arrow file; those of which no Python values can be made are put aside.

    Raises StageError: `missing_source`, `corrupt_file`, `too_big`, `wrong_field` naming the columns that are there.
    """
    for item in table_rows(table):
        if isinstance(item, Bad):
            yield Rejected(str(table.place), item.row, item.reason)
            continue
        try:
            values = item.batch.to_pylist()
        except Exception:  # of some value: no UTF-8, a date past 9999, … The rows tell which.
            values = None
        for number in range(item.batch.num_rows):
            row = item.first + number + 1
            try:
                value = values[number] if values is not None else _only(item.batch.slice(number, 1))
            except Exception as error:
                yield Rejected(str(table.place), row, f"not readable: {error}")
            else:
                yield Record(table.place, row, value)


def _only(batch: Any) -> dict[str, Any]:
    [value] = batch.to_pylist()
    return dict(value)
