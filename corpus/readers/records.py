"""Records of one file of pairs or test items, whatever its format."""

from __future__ import annotations

from collections.abc import Iterator

from corpus.documents.quarantine import Rejected
from corpus.readers.config import Header
from corpus.readers.formats.delimited import read_delimited
from corpus.readers.formats.json_lines import read_records
from corpus.readers.formats.table_batches import TableSource
from corpus.readers.formats.table_process import read_rows
from corpus.readers.plan import suffix_of
from corpus.readers.record import Record
from corpus.readers.unread import refuse_format
from infra.io.bounded import RECORD_BYTES
from infra.io.sources import Place


def records_in(file: Place, kind: str, encoding: str, key: str, header: Header = "auto") -> Iterator[Record | Rejected]:
    """All records of a file of the format `kind`: jsonl, parquet, arrow or csv; what is none of these is read as jsonl.

    Raises StageError as the readers of these formats do.
    """
    if kind in ("unread", "pdf"):
        raise refuse_format(file, suffix_of(file))
    if kind in ("parquet", "arrow"):
        return read_rows(TableSource(kind, file, (), key, RECORD_BYTES))
    if kind == "csv":
        return read_delimited(file, encoding, RECORD_BYTES, "", header)
    return read_records(file, encoding, (), key, ())
