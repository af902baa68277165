"""Documents on disk: a folder of Parquet parts, written and read as a stream; and the one split of them into text to
train on and held-out text.

A part holds its text, or selects documents of another part (`corpus.documents.selection`). To write the text of any
artifact to separate Parquet files, with the columns of SCHEMA:

python -m corpus.documents.parts ARTIFACT OUT
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from corpus.documents.selection import read_batches
from infra.errors import StageError, stage_error
from infra.io.files import link_or_copy

SCHEMA = pa.schema([(name, pa.string()) for name in ("id", "text", "source", "group", "language", "metadata")])
BATCH_BYTES = 4_000_000
BATCH_DOCUMENTS = 65_536
"""Texts may be empty."""
PART_BYTES = 16_000_000
"""Text and metadata in a part. A part is also a partition of the stages that follow: small enough for memory several
times over."""
READ_ROWS = 256


class Document(NamedTuple):
    """One text.

    id: the first 16 hex digits of the text's SHA-256.
    source: the name of its source and where in it, e.g. "books/austen-emma.txt" or
        "docstrings/numpy/linalg/_linalg.py:norm"; see `corpus.documents.sources.source_name`.
    group: documents of one group are on the same side of the held-out split.
    language: ISO 639-1 code, "" where neither given nor detected.
    metadata: the other fields of its record, as the text of a JSON object; "" for none.
    """

    id: str
    text: str
    source: str
    group: str
    language: str = ""
    metadata: str = ""


def make_document(text: str, source: str, group: str | None = None, language: str = "", metadata: str = "") -> Document:
    """A document with its id; a group of None or "" is the document by itself."""
    identity = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Document(identity, text, source, group or identity, language, metadata)


class DocumentWriter:
    """Writes `folder`/part-NNNNN.parquet; the same documents give the same bytes. Holds some 4 MB of text and metadata
    at a time, of at most BATCH_DOCUMENTS documents."""

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
        self._bytes_in_batch += size + len(document.metadata)
        if self._bytes_in_batch >= BATCH_BYTES or len(self._batch) == BATCH_DOCUMENTS:
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
    """The Parquet parts of a documents artifact, in order, each with one row per document; they are read by `read_part`
    and by `corpus.documents.selection`. Raises StageError `no_documents` if there are none."""
    parts = sorted((artifact / "documents").glob("part-*.parquet"))
    if not parts:
        raise stage_error("no_documents", str(artifact), "expected documents/part-*.parquet in this folder")
    return parts


def count_documents(artifact: Path) -> int:
    return sum(pq.read_metadata(part).num_rows for part in document_parts(artifact))


def read_documents(artifact: Path) -> Iterator[Document]:
    """All documents of an artifact in order, a few hundred in memory at a time."""
    for part in document_parts(artifact):
        yield from read_part(part)


def read_part(part: Path) -> Iterator[Document]:
    """The documents of one part in order, a few hundred in memory at a time."""
    for batch in read_batches(part, READ_ROWS, SCHEMA.names):
        yield from map(Document._make, zip(*(column.to_pylist() for column in batch.columns), strict=True))


def link_parts(folders: Iterable[Path], out_dir: Path) -> list[Path]:
    """Make out_dir/documents from the documents/ of partition folders, in their order, and renumber the parts.

    Parts without rows are left out. Files are hard-linked where the file system can, else copied.
    """
    (out_dir / "documents").mkdir(parents=True, exist_ok=True)
    linked: list[Path] = []
    for folder in folders:
        for part in sorted((folder / "documents").glob("part-*.parquet")):
            if pq.read_metadata(part).num_rows:
                linked.append(out_dir / "documents" / f"part-{len(linked):05}.parquet")
                link_or_copy(part, linked[-1])
    return linked


def concatenate(files: Iterable[Path], out: Path, schema: pa.Schema) -> int:
    """Join Parquet tables into one, a batch at a time; files that do not exist count as empty. Returns the rows."""
    rows = 0
    out.parent.mkdir(parents=True, exist_ok=True)
    with pq.ParquetWriter(out, schema, compression="zstd") as writer:
        for file in files:
            if file.exists():
                with pq.ParquetFile(file) as table:
                    for batch in table.iter_batches():
                        writer.write_batch(batch)
                        rows += batch.num_rows
    return rows


def is_heldout(group: str, share: float) -> bool:
    """Return True if a group is on the held-out side; `share` in (0, 1) is the expected part of all groups that is.

    It depends on nothing but the two, so that a group keeps its side as data is added, and a larger share only adds
    groups.
    """
    number = int.from_bytes(hashlib.sha256(f"stemma-heldout:{group}".encode()).digest()[:8], "big")
    return number < share * 2**64


def copy_documents(artifact: Path, folder: Path) -> None:
    """Write the documents of an artifact as parts that hold their text themselves."""
    with DocumentWriter(folder) as writer:
        for document in read_documents(artifact):
            writer.write(document)


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the documents of an artifact as Parquet files, text and all.")
    parser.add_argument("artifact", type=Path, help="a folder that holds documents/")
    parser.add_argument("out", type=Path, help="a folder for part-00000.parquet, …")
    options = parser.parse_args()
    try:
        copy_documents(options.artifact, options.out)
    except StageError as error:
        parser.exit(error.exit_code, f"{error}\n")


if __name__ == "__main__":
    main()
