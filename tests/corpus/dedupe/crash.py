"""A reader of tables that crashes. The process that reads them imports it from here, so nothing heavy is imported."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

from corpus.readers.formats.table_batches import Bad, Rows, TableSource, read_table


def crash_after_reading(table: TableSource) -> Iterator[Rows | Bad]:
    """Reads all of a table, and then dies of it if it is named b.arrow."""
    yield from read_table(table)
    if table.file.name == "b.arrow":
        os.kill(os.getpid(), signal.SIGSEGV)
