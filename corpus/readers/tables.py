"""Rows of Parquet files, and of the Arrow files that Hugging Face datasets are saved as."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from corpus.quarantine import EMPTY, Rejected
from corpus.readers.record import Record
from infra.errors import StageError, stage_error
from infra.sources import Place, open_place

BATCH_ROWS = 256
BUFFER_BYTES = 1 << 20


def read_parquet(
    place: Place, fields: tuple[str, ...], key: str, groups: tuple[int, int] | None = None
) -> Iterator[Record | Rejected]:
    """The rows of a Parquet file, or of its row groups from the first of `groups` to before the second.

    fields: the dotted columns to read, the first of them the text; others may be missing.
    Raises StageError: `missing_source`, `corrupt_file`, `wrong_field` naming the columns that are there.
    """
    with _parquet(place) as file:
        columns = _columns(file.schema_arrow, fields, place, key)
        first, last = groups or (0, file.num_row_groups)
        row = sum(file.metadata.row_group(index).num_rows for index in range(first))
        begun = row
        for batch in file.iter_batches(BATCH_ROWS, columns=columns, row_groups=range(first, last), use_threads=False):
            yield from _rows(batch, place, row)
            row += batch.num_rows
        if row == begun == 0 and groups is None:
            yield Rejected(str(place), 0, EMPTY)


def read_arrow(place: Place, fields: tuple[str, ...], key: str) -> Iterator[Record | Rejected]:
    """The rows of an Arrow stream or file. Raises StageError as `read_parquet` does."""
    row = 0
    with _explained(place, "Arrow"), open_place(place) as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        reader = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
        columns = sorted({column.partition(".")[0] for column in _columns(reader.schema, fields, place, key)})
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else iter(reader)
        for batch in batches:
            for start in range(0, batch.num_rows, BATCH_ROWS):
                yield from _rows(batch.slice(start, BATCH_ROWS).select(columns), place, row + start)
            row += batch.num_rows
    if row == 0:
        yield Rejected(str(place), 0, EMPTY)


def row_group_bytes(place: Place) -> list[int]:
    """The size of each row group before compression."""
    with _parquet(place) as file:
        return [file.metadata.row_group(index).total_byte_size for index in range(file.num_row_groups)]


def _rows(batch: Any, place: Place, row: int) -> Iterator[Record]:
    for number, value in enumerate(batch.to_pylist(), row + 1):
        yield Record(place, number, value)


def _columns(schema: Any, fields: tuple[str, ...], place: Place, key: str) -> list[str]:
    """Those of the fields that are columns. Raises StageError `wrong_field` if the first is none, or holds no text."""
    found = {field: kind for field in fields if (kind := _type(schema, field)) is not None}
    if fields[0] not in found:
        raise stage_error(
            "wrong_field",
            str(place),
            f"expected the column {fields[0]}, there are: {', '.join(schema.names) or 'none'}",
            f"set {key}.text_field; files of another kind need a source of their own",
        )
    kind = found[fields[0]]
    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
    if not any(is_text(inner) for is_text in (*texts, pa.types.is_binary, pa.types.is_large_binary)):
        raise stage_error(
            "wrong_field",
            str(place),
            f"expected text in the column {fields[0]}, it holds {kind}; there are: {', '.join(schema.names)}",
            f"set {key}.text_field; files of another kind need a source of their own",
        )
    return list(found)


def _type(schema: Any, field: str) -> Any:
    """The type of a dotted column, None where there is none."""
    if field in schema.names:
        return schema.field(field).type
    head, _, rest = field.partition(".")
    if not rest or head not in schema.names:
        return None
    kind = schema.field(head).type
    for name in rest.split("."):
        if not pa.types.is_struct(kind) or kind.get_field_index(name) < 0:
            return None
        kind = kind.field(name).type
    return kind


@contextmanager
def _parquet(place: Place) -> Iterator[pq.ParquetFile]:
    with _explained(place, "Parquet"), open_place(place) as file:
        yield pq.ParquetFile(file, buffer_size=BUFFER_BYTES, pre_buffer=False)


@contextmanager
def _explained(place: Place, kind: str) -> Iterator[None]:
    try:
        yield
    except StageError:
        raise
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        message = f"not a readable {kind} file: {reason}"
        raise stage_error("corrupt_file", str(place), message, "fetch it again") from None
