"""JSON datasets without date conversion: a text that looks like a date stays a text."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.json


@contextlib.contextmanager
def dates_as_text() -> Iterator[None]:
    """Make `datasets` read "1900-12-31" in JSON as text inside the block.

    pyarrow turns a column of ISO dates into timestamps, which a template then writes as "1900-12-31 00:00:00".
    """
    from datasets.packaged_modules.json import json as reader

    parser, by_pandas = reader.paj, reader.pandas_read_json

    def read_json(file: Any, *, read_options: Any = None, parse_options: Any = None, **extra: Any) -> pa.Table:
        start = file.tell()
        table = parser.read_json(file, read_options=read_options, parse_options=parse_options, **extra)
        schema = pa.schema([field.with_type(_as_text(field.type)) for field in table.schema])
        if schema.equals(table.schema):
            return table
        file.seek(start)
        options = {
            name: getattr(parse_options, name)
            for name in ("newlines_in_values", "unexpected_field_behavior")
            if parse_options is not None
        }
        as_text = parser.ParseOptions(explicit_schema=schema, **options)
        return parser.read_json(file, read_options=read_options, parse_options=as_text, **extra)

    reader.paj = types.SimpleNamespace(**{**vars(parser), "read_json": read_json})
    reader.pandas_read_json = lambda file, **options: by_pandas(file, **{"convert_dates": False, **options})
    try:
        yield
    finally:
        reader.paj, reader.pandas_read_json = parser, by_pandas


def _as_text(kind: pa.DataType) -> pa.DataType:
    """Return a type with text in place of points in time, at any depth."""
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind) or pa.types.is_time(kind):
        return pa.string()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(_as_text(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct(
            [kind.field(index).with_type(_as_text(kind.field(index).type)) for index in range(kind.num_fields)]
        )
    return kind
