"""Code of the process that reads Parquet and Arrow files: batches of sound rows, of bounded size.

pyarrow checks little of what it reads, and a damaged file may crash it: see `corpus.readers.formats.table_process`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from corpus.documents.quarantine import EMPTY
from corpus.readers.record import field_fix, too_long
from corpus.readers.unread import MAGIC_BYTES, POINTER, refuse_format, suffix_by_magic
from infra.errors import StageError, stage_error
from infra.io.sources import Place, open_place, size_of

BATCH_ROWS = 1024
BATCH_BYTES = 4_000_000
BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class TableSource:
    """A table to read.

    fields: the dotted columns, the first of them the text; others may be missing. (): all columns, of any kind.
    key: the dotted config key of the source, for messages.
    max_bytes: of a text; a row may have four times that size.
    groups: the row groups of a Parquet file from the first to before the second; all by default.
    """

    kind: str
    file: Place
    fields: tuple[str, ...]
    key: str
    max_bytes: int
    groups: tuple[int, int] | None = None


class Rows(NamedTuple):
    """Rows that follow each other.

    first: the number of the first, from 0.
    end: the number of the one behind the last.
    batch: what holds them, an Arrow stream.
    """

    first: int
    end: int
    batch: Any


class Bad(NamedTuple):
    """A row that is put aside. row: from 1; 0 stands for the whole file."""

    row: int
    reason: str


def read_table(table: TableSource) -> Iterator[Rows | Bad]:
    """The rows of a Parquet or Arrow file in order, bad ones too. Raises StageError: `missing_source`, `wrong_field`
    naming the existing columns, `corrupt_file`, `too_big`."""
    with _named_errors(table):
        yield from (_parquet if table.kind == "parquet" else _arrow)(table)


def row_group_bytes(source: Place) -> list[int]:
    """The size of each row group of a Parquet file before compression. Raises StageError as `read_table` does."""
    with _named_errors(TableSource("parquet", source, (), "", 0)), _parquet_file(source) as file:
        return [file.metadata.row_group(index).total_byte_size for index in range(file.num_row_groups)]


def _parquet(table: TableSource) -> Iterator[Rows | Bad]:
    with _parquet_file(table.file) as file:
        columns = _columns(file.schema_arrow, table)
        sizes = [file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)]
    first, last = table.groups or (0, len(sizes))
    row = group_start = sum(sizes[:first])
    with suppress(MemoryError), _parquet_file(table.file) as file:
        for batch in file.iter_batches(BATCH_ROWS, columns=columns, row_groups=range(first, last), use_threads=False):
            for item in _sound(batch, row, table):
                yield item
                row = item.end if isinstance(item, Rows) else item.row
        if row == group_start == 0 and table.groups is None:
            yield Bad(0, EMPTY)
        return
    # Memory ran out, and what it held is free again.
    for group in range(first, last):
        end = sum(sizes[: group + 1])
        if row < end:
            yield from _row_by_row(table, columns, group, sum(sizes[:group]), row, end)
            row = end


def _row_by_row(
    table: TableSource, columns: list[str], group: int, next_row: int, row: int, end: int
) -> Iterator[Rows | Bad]:
    """Yield rows `row` to `end` (excluded) of a row group whose first row is `next_row`.

    A row too large for memory, and rows stored with or after it, cannot be read.
    """
    with suppress(MemoryError), _parquet_file(table.file) as file:
        for batch in file.iter_batches(1, columns=columns, row_groups=[group], use_threads=False):
            if next_row >= row:
                yield from _sound(batch, next_row, table)
            next_row += 1
    for lost in range(max(next_row, row), end):
        yield Bad(lost + 1, too_long(table.max_bytes, "this row, or one before it in its row group,"))


def _arrow(table: TableSource) -> Iterator[Rows | Bad]:
    row = 0
    with _bytes_of(table.file) as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        reader = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
        columns = sorted({column.partition(".")[0] for column in _columns(reader.schema, table)})
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else iter(reader)
        try:
            for batch in batches:
                chosen = batch.select(columns)
                for start in range(0, batch.num_rows, BATCH_ROWS):
                    yield from _sound(chosen.slice(start, BATCH_ROWS), row + start, table)
                row += batch.num_rows
        except MemoryError:
            raise stage_error(
                "too_big",
                str(table.file),
                f"the batch of rows after row {row:,} is too large for memory",
                f"write the file with smaller batches, or raise {table.key}.max_document_mb",
            ) from None
    if row == 0:
        yield Bad(0, EMPTY)


def _sound(batch: Any, row: int, table: TableSource) -> Iterator[Rows | Bad]:
    """A batch in parts that are valid through and through and hold no more than BATCH_BYTES or one row."""
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        if batch.num_rows > 1:
            for number in range(batch.num_rows):
                yield from _sound(batch.slice(number, 1), row + number, table)
        else:
            yield Bad(row + 1, f"not readable: {_first_line(error)}")
        return
    size = _size(batch)
    if size > BATCH_BYTES and batch.num_rows > 1:
        half = batch.num_rows // 2
        yield from _sound(batch.slice(0, half), row, table)
        yield from _sound(batch.slice(half), row + half, table)
    elif size > 4 * table.max_bytes + BATCH_BYTES:
        yield Bad(row + 1, too_long(table.max_bytes, "a row with a text or other fields"))
    else:
        yield Rows(row, row + batch.num_rows, _packed(_without_dictionaries(batch)))


def _size(batch: Any) -> int:
    """Bytes of the values of a valid batch, each counted where it occurs."""
    size = 0
    for column in batch.columns:
        if pa.types.is_dictionary(column.type):
            values, indices = column.dictionary, column.indices
            try:
                lengths = pc.binary_length(values)
            except pa.ArrowNotImplementedError:
                size += column.nbytes
            else:
                size += pc.sum(lengths.take(indices)).as_py() or 0
        else:
            size += column.nbytes
    return size


def _without_dictionaries(batch: Any) -> Any:
    if not any(pa.types.is_dictionary(kind) for kind in batch.schema.types):
        return batch.replace_schema_metadata(None)
    columns = [
        column.dictionary_decode() if pa.types.is_dictionary(column.type) else column for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _packed(batch: Any) -> Any:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def _columns(schema: Any, table: TableSource) -> list[str]:
    """Return the fields that are columns. Raises StageError: `wrong_field` if the first is none, or holds no text;
    `corrupt_file` for one that occurs twice."""
    for field in table.fields or schema.names:
        name = field if field in schema.names else field.partition(".")[0]
        if schema.names.count(name) > 1:
            raise stage_error(
                "corrupt_file",
                str(table.file),
                f"expected one column {name}, but it has {schema.names.count(name)} of that name",
                "write it with unique column names",
            )
    if not table.fields:
        return list(schema.names)
    types = {field: kind for field in table.fields if (kind := _type(schema, field)) is not None}
    if table.fields[0] not in types:
        raise stage_error(
            "wrong_field",
            str(table.file),
            f"expected the column {table.fields[0]}; the columns are: {', '.join(schema.names) or 'none'}",
            field_fix(f"{table.key}.text_field", table.fields[0], schema.names)
            + "; files of another kind need a separate source",
        )
    kind = types[table.fields[0]]
    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
    if not any(is_text(inner) for is_text in (*texts, pa.types.is_binary, pa.types.is_large_binary)):
        raise stage_error(
            "wrong_field",
            str(table.file),
            f"expected text in the column {table.fields[0]}, not {kind}; the columns are: {', '.join(schema.names)}",
            f"set {table.key}.text_field; files of another kind need a separate source",
        )
    return list(types)


def _type(schema: Any, field: str) -> Any:
    """The type of a dotted column, None where there is none."""
    if field in schema.names:
        return schema.field(field).type
    head, _, remainder = field.partition(".")
    if not remainder or head not in schema.names:
        return None
    kind = schema.field(head).type
    for name in remainder.split("."):
        if not pa.types.is_struct(kind) or kind.get_field_index(name) < 0:
            return None
        kind = kind.field(name).type
    return kind


@contextmanager
def _bytes_of(source: Place) -> Iterator[Any]:
    """A file on disk is mapped, so that its batches need no memory."""
    if isinstance(source, Path) and size_of(source):
        with pa.memory_map(str(source)) as file:
            yield file
    else:
        with open_place(source) as file:
            yield file


@contextmanager
def _parquet_file(source: Place) -> Iterator[pq.ParquetFile]:
    with open_place(source) as file:
        yield pq.ParquetFile(file, buffer_size=BUFFER_BYTES, pre_buffer=False)


@contextmanager
def _named_errors(table: TableSource) -> Iterator[None]:
    try:
        yield
    except StageError:
        raise
    except Exception as error:  # a damaged file gives errors of pyarrow, of its names, its sizes, its metadata, …
        start = b""
        with suppress(OSError, StageError), open_place(table.file) as stream:
            start = stream.read(MAGIC_BYTES)
        if suffix_by_magic(start) == POINTER:
            raise refuse_format(table.file, POINTER) from None
        message = f"not a readable {table.kind.capitalize()} file: {_first_line(error)}"
        raise stage_error("corrupt_file", str(table.file), message, "download it again") from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
