"""Selections of documents: their rows, the cuts of their texts, and the epoch in which they are seen.

Stages that drop, cut and repeat documents write no text. Their artifacts hold

documents/part-00000.parquet   a row per document: its `row` in a text part, `cuts` in its text, `epoch`. The metadata
                               of the file name the text part.
text/part-00000.parquet        that text part: all columns of all documents, the dropped ones too. A hard link to where
                               the text was written first, so that it takes no space and outlives that artifact.

Readers of a part by `read_table` or `read_batches` get the selected documents, exactly as from a part that holds its
text itself. docs/decisions/0013 gives the reasons.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from corpus.documents.cuts import Cut, joined, with_column, without
from infra.errors import stage_error
from infra.io.files import link_or_copy
from infra.io.json import parse_own_json

SCHEMA = pa.schema(
    [
        ("row", pa.int32()),
        ("cuts", pa.list_(pa.struct([("begin", pa.int32()), ("end", pa.int32()), ("put", pa.string())]))),
        ("epoch", pa.int32()),
    ]
)
"""row: ascending, from 0. cuts: ascending, none where the text is whole. epoch: of what `mix` repeats, from 1 on, else
0."""
TEXT_PART = b"stemma.text_part"
"""Key of a file's metadata: the name of its text part in text/; in the files of a build, an absolute path."""


@dataclass(frozen=True)
class DocumentSelection:
    """Documents of one text part. rows: (N,), ascending; cuts: by place among the N; epochs: (N,)."""

    text_part: Path
    rows: NDArray[np.int32]
    cuts: Mapping[int, Sequence[Cut]]
    epochs: NDArray[np.int32]

    def between(self, first: int, last: int) -> DocumentSelection:
        """Return the documents whose row in the text part is at least `first` and below `last`, counted from there."""
        begin, end = np.searchsorted(self.rows, (first, last)).tolist()
        cuts = {row - begin: cuts for row, cuts in self.cuts.items() if begin <= row < end}
        return DocumentSelection(self.text_part, self.rows[begin:end] - np.int32(first), cuts, self.epochs[begin:end])

    def of(self, documents: pa.Table) -> pa.Table:
        """The selected ones of all documents of the text part, whatever columns of them there are."""
        if len(self.rows) < len(documents):
            documents = documents.take(pa.array(self.rows))
        if "text" in documents.column_names:
            documents = without(documents, self.cuts)
        if self.epochs.any() and "metadata" in documents.column_names:
            pairs = zip(documents["metadata"].to_pylist(), self.epochs.tolist(), strict=True)
            changed = [with_epoch(metadata, epoch) if epoch else metadata for metadata, epoch in pairs]
            documents = with_column(documents, "metadata", pa.array(changed, pa.string()))
        return documents


@contextmanager
def opened_part(part: Path) -> Iterator[pq.ParquetFile]:
    """A part of documents. Raises StageError `damaged` for a part that has changed since it was written."""
    try:
        with pq.ParquetFile(part) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        fix = "stemma verify ARTIFACT lists all differences; stemma run CONFIG --force STAGE rebuilds it"
        raise stage_error("damaged", str(part), f"this file is damaged: {reason}", fix) from error


def read_selection(part: Path) -> DocumentSelection | None:
    """The selection in a part; None for one that holds its text itself. Raises StageError `text_missing`, `damaged`."""
    with opened_part(part) as file:
        name = (file.schema_arrow.metadata or {}).get(TEXT_PART)
        if name is None:
            return None
        table = file.read()
    text_part = part.parent.parent / "text" / name.decode()
    if not text_part.is_file():
        raise stage_error(
            "text_missing",
            str(text_part),
            f"no such file; {part} lists which of its documents are kept, and has no text itself",
            "rebuild the artifact (stemma run CONFIG --force STAGE), or copy one with its folder text/",
        )
    cut_rows = np.flatnonzero(pc.fill_null(pc.list_value_length(table["cuts"]), 0).to_numpy())
    cut = zip(cut_rows.tolist(), table["cuts"].take(pa.array(cut_rows)).to_pylist(), strict=True)
    cuts = {row: [Cut(**fields) for fields in some] for row, some in cut}
    return DocumentSelection(text_part, table["row"].to_numpy(), cuts, table["epoch"].to_numpy())


def read_table(part: Path, columns: Sequence[str]) -> pa.Table:
    """Return these columns of the documents of a part. Raises StageError `text_missing`."""
    if (selection := read_selection(part)) is None:
        return pq.read_table(part, columns=list(columns))
    return selection.of(pq.read_table(selection.text_part, columns=list(columns)))


def read_batches(part: Path, rows: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The same, at most `rows` documents in memory at a time."""
    selection = read_selection(part)
    with opened_part(part if selection is None else selection.text_part) as file:
        begin = 0
        for batch in file.iter_batches(rows, columns=list(columns)):
            if selection is None:
                yield batch
                continue
            here = selection.between(begin, begin + len(batch))
            begin += len(batch)
            if len(here.rows):
                yield from here.of(pa.Table.from_batches([batch])).combine_chunks().to_batches()


def write_selection(
    part: Path,
    rows: NDArray[np.integer],
    folder: Path,
    cuts: Mapping[int, Sequence[Cut]] | None = None,
    epoch: int = 0,
) -> None:
    """Write documents of `part` as the one part of `folder`/documents, which is not to be kept: `link_selections` makes
    an artifact of such folders.

    Args:
        rows: of the documents that stay, ascending.
        cuts: by row, in the texts as `read_table` gives them. Where the part is a selection itself, the two become
            one.
    """
    rows = np.asarray(rows, np.int32)
    chosen = {int(row): list(some) for row, some in (cuts or {}).items()}
    inner = read_selection(part)
    if inner is None:
        cuts_of_rows = [chosen.get(row, []) for row in rows.tolist()] if chosen else [[]] * len(rows)
        kept_rows, epochs, text_part = rows, np.full(len(rows), epoch, np.int32), part
    else:
        cuts_of_rows = [joined(inner.cuts.get(row, ()), chosen.get(row, ())) for row in rows.tolist()]
        epochs = np.full(len(rows), epoch, np.int32) if epoch else inner.epochs[rows]
        kept_rows, text_part = inner.rows[rows], inner.text_part
    columns = {
        "row": pa.array(kept_rows, pa.int32()),
        "cuts": pa.array([[cut._asdict() for cut in some] for some in cuts_of_rows], SCHEMA.field("cuts").type),
        "epoch": pa.array(epochs, pa.int32()),
    }
    (folder / "documents").mkdir(parents=True, exist_ok=True)
    _write(pa.table(columns, schema=SCHEMA), str(text_part.absolute()), folder / "documents" / "part-00000.parquet")


def link_selections(folders: Iterable[Path], out_dir: Path) -> None:
    """Make out_dir/documents and out_dir/text from folders of `write_selection`, in their order, and renumber the
    parts.

    Parts without documents are left out. Text parts are hard-linked where the file system can, else copied.
    """
    for name in ("documents", "text"):
        (out_dir / name).mkdir(parents=True, exist_ok=True)
    names: dict[str, str] = {}
    parts = 0
    for folder in folders:
        with pq.ParquetFile(folder / "documents" / "part-00000.parquet") as file:
            table, text_part = file.read(), file.schema_arrow.metadata[TEXT_PART].decode()
        if not len(table):
            continue
        if text_part not in names:
            names[text_part] = f"part-{len(names):05}.parquet"
            link_or_copy(Path(text_part), out_dir / "text" / names[text_part])
        _write(table, names[text_part], out_dir / "documents" / f"part-{parts:05}.parquet")
        parts += 1


def _write(selection: pa.Table, text_part: str, file: Path) -> None:
    pq.write_table(
        selection.replace_schema_metadata({TEXT_PART: text_part}),
        file,
        compression="zstd",
        use_dictionary=False,
        column_encoding={"row": "DELTA_BINARY_PACKED", "epoch": "DELTA_BINARY_PACKED"},
    )


def with_epoch(metadata: str, epoch: int) -> str:
    """A document's metadata with the number of its repetition."""
    return json.dumps({**parse_own_json(metadata or "{}"), "epoch": epoch}, ensure_ascii=False)
