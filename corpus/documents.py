"""Documents on disk: a folder of Parquet parts, written and read as a stream."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from infra.errors import stage_error

SCHEMA = pa.schema([(name, pa.string()) for name in ("id", "text", "source", "group")])
BATCH_BYTES = 4_000_000
PART_BYTES = 256_000_000
READ_ROWS = 256


class Document(NamedTuple):
    """One text.

    id: the first 16 hex digits of the text's SHA-256.
    source: where it comes from: a file's name, or e.g. "docstrings/numpy/linalg/_linalg.py:norm".
    group: documents of one group lie on the same side of the held-out split.
    """

    id: str
    text: str
    source: str
    group: str


def make_document(text: str, source: str, group: str | None = None) -> Document:
    """A document with its id; a group of None or "" is the document by itself."""
    identity = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Document(identity, text, source, group or identity)


class DocumentWriter:
    """Writes `folder`/part-NNNNN.parquet; the same documents give the same bytes. Holds some 4 MB of text at a time."""

    def __init__(self, folder: Path, part_bytes: int = PART_BYTES) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.documents = 0
        self.text_bytes = 0
        self._folder = folder
        self._part_bytes = part_bytes
        self._parts = 0
        self._bytes_in_part = 0
        self._batch: list[Document] = []
        self._bytes_in_batch = 0
        self._file: pq.ParquetWriter | None = None

    def write(self, document: Document) -> None:
        size = len(document.text.encode())
        self.documents += 1
        self.text_bytes += size
        self._batch.append(document)
        self._bytes_in_batch += size
        if self._bytes_in_batch >= BATCH_BYTES:
            self._flush()

    def __enter__(self) -> DocumentWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self._flush()
        if self._file is not None:
            self._file.close()

    def _flush(self) -> None:
        if not self._batch:
            return
        if self._file is None:
            self._file = pq.ParquetWriter(
                self._folder / f"part-{self._parts:05}.parquet", SCHEMA, compression="zstd", use_dictionary=False
            )
            self._parts += 1
        columns = [pa.array(column, pa.string()) for column in zip(*self._batch, strict=True)]
        self._file.write_table(pa.table(columns, schema=SCHEMA))
        self._bytes_in_part += self._bytes_in_batch
        self._batch, self._bytes_in_batch = [], 0
        if self._bytes_in_part >= self._part_bytes:
            self._file.close()
            self._file, self._bytes_in_part = None, 0


def document_parts(artifact: Path) -> list[Path]:
    """The Parquet parts of a documents artifact, in order. Raises StageError `no_documents` if there are none."""
    parts = sorted((artifact / "documents").glob("part-*.parquet"))
    if not parts:
        raise stage_error("no_documents", str(artifact), "expected documents/part-*.parquet in this folder")
    return parts


def count_documents(artifact: Path) -> int:
    return sum(pq.read_metadata(part).num_rows for part in document_parts(artifact))


def read_documents(artifact: Path) -> Iterator[Document]:
    """All documents of an artifact in order, a few hundred in memory at a time."""
    for part in document_parts(artifact):
        with pq.ParquetFile(part) as file:
            for batch in file.iter_batches(READ_ROWS, columns=SCHEMA.names):
                yield from map(Document._make, zip(*(column.to_pylist() for column in batch.columns), strict=True))
