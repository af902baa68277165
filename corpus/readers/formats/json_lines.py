"""Objects in JSON Lines files, or in a JSON file that holds one list."""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import orjson

from corpus.documents.quarantine import EMPTY, Rejected
from corpus.readers.encodings import AUTO, decode, python_name, whole_characters
from corpus.readers.record import (
    MISSING,
    Record,
    field_fix,
    field_names,
    has_numbered_columns,
    longest_text,
    pick,
    text_fields,
)
from corpus.readers.streams import PROBE_BYTES, in_utf8_lines, is_wide, refuse_binary
from infra.errors import stage_error
from infra.io.bounded import RECORD_BYTES, Span, TooLong, lines_of, opened
from infra.io.sources import Place

_BLANK = re.compile(r"[ \t\r\n]*")
_OUTSIDE = re.compile(r'["\[\]{},]')
_INSIDE = re.compile(r'["\\]')


class TornList(Exception):
    """The text is no list, ends within it, or goes on behind it."""


def elements_of(texts: Iterable[str], max_characters: int, limit_key: str = "") -> Iterator[str | TooLong]:
    """The text of each item of the list that `texts` make up; a longer one than `max_characters` is passed over.

    Only brackets, commas and strings are looked at: an item may be wrong JSON in any other way. Raises TornList.
    """
    depth, in_string, is_escaped = 0, False, False
    parts: list[str] = []
    size, is_over, is_first = 0, False, True
    for text in texts:
        position, element_start = 0, 0
        while position < len(text):
            if is_over and text[position:].strip(" \t\r\n"):
                raise TornList("there is more after the list")
            if is_over:
                break
            if is_escaped:
                position, is_escaped = position + 1, False
                continue
            match = (_INSIDE if in_string else _OUTSIDE).search(text, position)
            if depth == 0:
                start = _BLANK.match(text, position)
                position = element_start = start.end() if start else position
                if position == len(text):
                    break
                if text[position] != "[":
                    raise TornList("expected a list")
                depth, position, element_start = 1, position + 1, position + 1
                continue
            if match is None:
                break
            position = match.end()
            mark = match.group()
            if in_string:
                in_string, is_escaped = mark != '"', mark == "\\"
            elif mark == '"':
                in_string = True
            elif mark in "[{":
                depth += 1
            elif mark in "]}" and depth > 1:
                depth -= 1
            elif depth == 1:
                parts.append(text[element_start : position - 1])
                size += position - 1 - element_start
                element = "".join(parts).strip(" \t\r\n")
                if size > max_characters:
                    yield TooLong(max_characters, limit_key)
                elif element or not (is_first and mark == "]"):
                    yield element
                parts, size, is_first, element_start = [], 0, False, position
                is_over = mark in "]}"
        if not is_over and depth:
            size += len(text) - element_start
            # What is over the limit is not held.
            parts = [*parts, text[element_start:]] if size <= max_characters else []
    if not is_over:
        raise TornList("it ends within the list")


LIST_AT_ONCE_BYTES = 16_000_000
"""The largest list that is parsed at once: each of its bytes may become a value of 20 and more."""
READ_BYTES = 1 << 20
_UTF8 = codecs.getincrementaldecoder("utf-8-sig")


def read_records(
    file: Place,
    encoding: str,
    fields: tuple[str, ...],
    key: str,
    field_keys: tuple[str, ...],
    span: Span | None = None,
    max_line_bytes: int = RECORD_BYTES,
    limit_key: str = "",
) -> Iterator[Record | Rejected]:
    """All objects of a file, each with a string in all of `fields` (dotted names).

    Args:
        key: the dotted config key of the source.
        field_keys: the keys in it that name the fields; for messages.
        span: the part of the file to read; all of it by default.
        max_line_bytes: the longest record; a longer one is put aside.
        limit_key: the config key that sets it.

    Raises StageError: `missing_source`, `binary_source`, `corrupt_file`; `wrong_encoding` for a list whose configured
    encoding does not fit; `wrong_field` where already the first object lacks a field.
    """
    items = _items(file, encoding, span, max_line_bytes, limit_key)
    yield from with_fields(items, fields, key, field_keys, is_start=span is None or not span.start)


def with_fields(
    items: Iterable[Record | Rejected],
    fields: tuple[str, ...],
    key: str,
    field_keys: tuple[str, ...],
    is_start: bool = True,
) -> Iterator[Record | Rejected]:
    """The records with a string in all of `fields`; others are put aside.

    Other arguments and what it raises: as `read_records`.

    Args:
        is_start: whether the first of the file is among them.
    """
    is_checked = not is_start
    for item in items:
        if isinstance(item, Record):
            values = [pick(item.value, field) for field in fields]
            if not is_checked and MISSING in values:
                index = values.index(MISSING)
                raise wrong_field(item, fields[index], f"{key}.{field_keys[index]}", fields)
            is_checked = True
            wrong = next((index for index, value in enumerate(values) if not isinstance(value, str)), None)
            if wrong is not None:
                yield Rejected(str(item.file), item.line, _fault(fields[wrong], values[wrong]))
                continue
        yield item


def wrong_field(record: Record, field: str, setting: str, fields: tuple[str, ...]) -> Exception:
    """Return the error to raise for a record that lacks a field.

    Args:
        setting: the dotted key that names it.
        fields: all that are read.
    """
    message, fix = f"expected the field {field}; the fields are: {field_names(record.value)}", ""
    if has_numbered_columns(record.value):
        message += "; its first row is read as a record, since it looks like the rows below it"
        fix = f"; or {setting.rpartition('.')[0]}.header: first_row, if it has the names of the columns"
    fix = _field_fix(setting, field, fields, record.value) + fix
    return stage_error("wrong_field", record.place, message, fix)


def is_list(file: Place) -> bool:
    """Return True if a file opens like a JSON list, or one object over several lines, which cannot be read in parts."""
    with opened(file) as stream:
        return _opens_list(stream) or _opens_object(stream)


def _opens_list(stream: io.BufferedReader) -> bool:
    return _start(stream)[:1] == b"["


def _opens_object(stream: io.BufferedReader) -> bool:
    """Return True if a file opens with an object whose first line is the bracket alone."""
    return re.match(rb"\{[ \t]*\r?\n", _start(stream)) is not None


def _start(stream: io.BufferedReader) -> bytes:
    return stream.peek(PROBE_BYTES)[:PROBE_BYTES].removeprefix(codecs.BOM_UTF8).lstrip()


def _field_fix(setting: str, field: str, fields: tuple[str, ...], value: Mapping[str, Any]) -> str:
    other_fields = [name for name in text_fields(value) if name not in fields]
    of_many = other_fields[0] if len(other_fields) == 1 else ""
    return field_fix(setting, field, other_fields, longest_text(value) if len(fields) == 1 else of_many)


def _fault(field: str, value: object) -> str:
    if value is MISSING:
        return f"no field {field}"
    return f"the field {field} is not a string: it is {_json_type(value)}"


def _items(
    file: Place, encoding: str, span: Span | None, max_bytes: int, limit_key: str
) -> Iterator[Record | Rejected]:
    with opened(file) as raw:
        refuse_binary(raw, file, encoding)
        stream, encoding = in_utf8_lines(raw, encoding)
        if not (span and span.start) and _opens_list(stream):
            yield from _list(file, stream, encoding, max_bytes, limit_key)
            return
        if not (span and span.start) and _opens_object(stream):
            yield from _objects(file, stream, encoding, max_bytes, limit_key)
            return
        is_empty = True
        for number, line in lines_of(stream, span, max_bytes, limit_key):
            if isinstance(line, TooLong):
                is_empty = False
                yield Rejected(str(file), number, str(line))
                continue
            if is_empty:
                line = line.removeprefix(b"\xef\xbb\xbf")
                if line.isspace() or not line:
                    continue
                is_empty = False
            elif line.isspace():
                continue
            yield _object(file, number, line, encoding)
        if is_empty and span is None:
            yield Rejected(str(file), 0, EMPTY)


def _object(file: Place, number: int, line: bytes, encoding: str) -> Record | Rejected:
    is_repaired = False
    try:
        # What is in another encoding may well be UTF-8 too, and mean something else.
        value = orjson.loads(line if _may_be_utf8(encoding) else line.decode(encoding))
    except ValueError:
        # orjson is stricter: no half surrogate pairs, NaN, or integers of over 64 bits.
        try:
            text, is_repaired = decode(line, encoding)
            read = json.loads(text)
            value = _join_surrogates(read)
            is_repaired |= value != read
        except UnicodeDecodeError:
            return Rejected(str(file), number, f"not valid {encoding}")
        except (ValueError, RecursionError) as error:
            return Rejected(str(file), number, f"not JSON: {error}")
    if not isinstance(value, dict):
        return Rejected(str(file), number, f"expected a JSON object: found {_json_type(value)}")
    return Record(file, number, value, is_repaired)


@lru_cache
def _may_be_utf8(encoding: str) -> bool:
    return encoding == AUTO or python_name(encoding) == "utf-8-sig"


def _join_surrogates(value: Any) -> Any:
    """The value with halves of surrogate pairs, which JSON can escape, joined or replaced in all of its texts."""
    if isinstance(value, str):
        return whole_characters(value)
    if isinstance(value, list):
        return [_join_surrogates(item) for item in value]
    return (
        {_join_surrogates(key): _join_surrogates(item) for key, item in value.items()}
        if isinstance(value, dict)
        else value
    )


def _list(
    file: Place, stream: io.BufferedReader, encoding: str, max_bytes: int, limit_key: str
) -> Iterator[Record | Rejected]:
    """The objects of one JSON list: read at once where it is small and whole, else one by one."""
    content = stream.read(LIST_AT_ONCE_BYTES)
    fault: Exception | None = None
    if len(content) < LIST_AT_ONCE_BYTES:
        try:
            text, is_repaired = decode(content, encoding)
            read = json.loads(text)
            items = _join_surrogates(read) if "\\ud" in text.lower() else read
        except UnicodeDecodeError:
            raise wrong_encoding(file, encoding) from None
        except (ValueError, RecursionError) as error:
            fault = error
        else:
            if not items:
                yield Rejected(str(file), 0, EMPTY)
            for number, value in enumerate(items, 1):
                if isinstance(value, dict):
                    yield Record(file, number, value, is_repaired or value != read[number - 1])
                else:
                    yield Rejected(str(file), number, f"expected a JSON object: found {_json_type(value)}")
            return
    number = 0
    # Its items are written out as UTF-8 again where their encoding is another.
    element_encoding = encoding if _may_be_utf8(encoding) else "utf-8"
    try:
        for element in elements_of(_texts(content, stream, encoding), max_bytes, limit_key):
            number += 1
            if isinstance(element, TooLong):
                yield Rejected(str(file), number, str(element))
            else:
                yield _object(file, number, element.encode("utf-8", "surrogateescape"), element_encoding)
    except UnicodeDecodeError:
        raise wrong_encoding(file, encoding) from None
    except TornList as torn:
        location = f"{file}:{fault.lineno}" if isinstance(fault, json.JSONDecodeError) else str(file)
        message = f"not JSON: {fault.msg}" if isinstance(fault, json.JSONDecodeError) else f"not JSON: {torn}"
        raise stage_error("corrupt_file", location, f"{message} (after item {number:,})", "correct the file") from None
    if not number:
        yield Rejected(str(file), 0, EMPTY)


def _objects(
    file: Place, stream: io.BufferedReader, encoding: str, max_bytes: int, limit_key: str
) -> Iterator[Record | Rejected]:
    """The one object of a file, or several one after the other, each over several lines, as `jq` and `indent=2` write
    them. An object ends with a line that begins with its bracket."""
    lines: list[bytes] = []
    size, first_line, is_over = 0, 1, False
    for number, line in lines_of(stream, None, max_bytes, limit_key):
        first_line = first_line if lines or is_over else number
        size += max_bytes + 1 if isinstance(line, TooLong) else len(line)
        is_over |= size > max_bytes
        content = b"" if isinstance(line, TooLong) else line
        lines = [] if is_over else [*lines, content] if lines else [content.removeprefix(codecs.BOM_UTF8)]
        if re.match(rb"\}\s*$", content):
            if is_over:
                yield Rejected(str(file), first_line, str(TooLong(max_bytes, limit_key)))
            else:
                yield _object(file, first_line, b"".join(lines), encoding)
            lines, size, is_over = [], 0, False
    if is_over:
        yield Rejected(str(file), first_line, str(TooLong(max_bytes, limit_key)))
    elif remainder := b"".join(lines).strip():
        yield _object(file, first_line, remainder, encoding)


def _texts(content: bytes, stream: io.BufferedReader, encoding: str) -> Iterator[str]:
    """A stream in pieces of text. Bytes that are no UTF-8 are escaped where each item is to be looked at by itself."""
    needs_decoder = not (_may_be_utf8(encoding) or is_wide(encoding))
    decoder = codecs.getincrementaldecoder(encoding)() if needs_decoder else _UTF8("surrogateescape")
    while content:
        yield decoder.decode(content)
        content = stream.read(READ_BYTES)
    yield decoder.decode(b"", True)


def wrong_encoding(file: Place, encoding: str) -> Exception:
    return stage_error("wrong_encoding", str(file), f"not valid {encoding}", "set encoding, e.g. latin-1 or auto")


def _json_type(value: Any) -> str:
    names = {"list": "a list", "str": "a string", "dict": "an object", "NoneType": "null", "bool": "true or false"}
    return names.get(type(value).__name__, "a number")
