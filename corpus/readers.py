"""Records of text, JSON, JSON Lines and Parquet files, gzipped or not, as a stream in bounded memory."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from corpus.config import FileDocuments
from corpus.quarantine import EMPTY, Rejected
from infra.errors import stage_error

PROBE_BYTES = 8192
PARQUET_ROWS = 256


@dataclass(frozen=True)
class Record:
    """One JSON object and where it stands: its line, or its place in a JSON list, from 1."""

    file: Path
    line: int
    value: dict[str, Any]

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Text:
    """One text and the file it comes from."""

    file: Path
    text: str


def by_name(paths: tuple[Path, ...]) -> list[Path]:
    """Files in an order that does not change when their folder moves."""
    return sorted(paths, key=lambda path: (path.name, path))


def read_texts(source: FileDocuments, path: Path, key: str) -> Iterator[Text | Rejected]:
    """All texts of one file.

    key: the dotted config key of the source, for messages.
    Raises StageError: `missing_source`, `binary_source` (NUL bytes), `wrong_encoding`, `corrupt_file` (gzip, Parquet),
    `wrong_field` (with the fields that are there).
    """
    kind = _format(path) if source.format == "auto" else source.format
    if kind == "parquet":
        yield from _parquet_texts(source, path, key)
    elif kind == "jsonl":
        for item in read_records(path, source.encoding, (source.text_field,), key, ("text_field",)):
            if isinstance(item, Rejected):
                yield item
            else:
                yield from _checked_text(path, item.line, item.value[source.text_field], source)
    else:
        yield from _plain_texts(source, path)


def read_records(
    path: Path, encoding: str, fields: tuple[str, ...], key: str, field_keys: tuple[str, ...]
) -> Iterator[Record | Rejected]:
    """All objects of a JSON Lines file or of a JSON file that holds one list, each with a string in all of `fields`.

    field_keys: the config keys that name the fields, for messages.
    Raises StageError as `read_texts` does; `wrong_field` where already the first object lacks a field.
    """
    looked = False
    for item in _json_items(path, encoding):
        if isinstance(item, Record):
            missing = [field for field in fields if field not in item.value]
            if missing and not looked:
                setting = field_keys[fields.index(missing[0])]
                raise stage_error(
                    "wrong_field",
                    item.place,
                    f"expected the field {missing[0]}, there are: {', '.join(sorted(item.value)) or 'none'}",
                    f"set {key}.{setting}",
                )
            looked = True
            wrong = [field for field in fields if not isinstance(item.value.get(field), str)]
            if missing or wrong:
                bad = (missing or wrong)[0]
                reason = f"no field {bad}" if missing else f"the field {bad} is not a string"
                yield Rejected(str(path), item.line, reason)
                continue
        yield item


def _format(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() != ".gz"]
    last = suffixes[-1] if suffixes else ""
    return {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl"}.get(last, "text")


@contextmanager
def _opened(path: Path, encoding: str) -> Iterator[BinaryIO]:
    """The bytes of a file, gunzipped if they are gzipped. Raises StageError for a missing, binary or truncated file."""
    try:
        with path.open("rb") as file:
            is_gzip = file.peek(2)[:2] == b"\x1f\x8b"
            with gzip.open(file) if is_gzip else file as stream:
                probe = stream.peek(PROBE_BYTES)[:PROBE_BYTES]
                if b"\0" in probe and not encoding.lower().replace("_", "-").startswith(("utf-16", "utf-32")):
                    raise stage_error(
                        "binary_source",
                        str(path),
                        f"expected text, found a binary file (NUL byte at byte {probe.index(0):,})",
                        "take it off the paths, or set the format or encoding",
                    )
                yield stream  # type: ignore[misc]
    except FileNotFoundError:
        raise stage_error("missing_source", str(path), "no such file", "correct the path in the config") from None
    except IsADirectoryError:
        raise stage_error("missing_source", str(path), "expected a file, found a folder") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise stage_error("corrupt_file", str(path), f"cannot be gunzipped: {error}", "fetch it again") from None


def _codec(encoding: str) -> str:
    """UTF-8 files that Windows programs wrote open with a byte order mark, which is no part of the text."""
    return "utf-8-sig" if encoding.lower().replace("_", "-") in ("utf-8", "utf8") else encoding


def _json_items(path: Path, encoding: str) -> Iterator[Record | Rejected]:
    with _opened(path, encoding) as stream:
        # Bytes that do not decode become surrogates, so that one bad line does not end the file.
        lines = io.TextIOWrapper(stream, encoding=_codec(encoding), errors="surrogateescape", newline="\n")
        is_first, is_empty = True, True
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            is_empty = False
            if is_first and line.lstrip().startswith("["):
                yield from _json_list(path, line + lines.read(), encoding)
                return
            is_first = False
            yield _json_line(path, number, line, encoding)
        if is_empty:
            yield Rejected(str(path), 0, EMPTY)


def _json_line(path: Path, number: int, line: str, encoding: str) -> Record | Rejected:
    try:
        value = json.loads(line)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return Rejected(str(path), number, f"not valid {encoding}")
    except (ValueError, RecursionError) as error:
        return Rejected(str(path), number, f"not JSON: {error}")
    if not isinstance(value, dict):
        return Rejected(str(path), number, f"expected a JSON object, found {_json_type(value)}")
    return Record(path, number, value)


def _json_list(path: Path, content: str, encoding: str) -> Iterator[Record | Rejected]:
    try:
        items = json.loads(content)
        content.encode()
    except UnicodeEncodeError:
        raise _wrong_encoding(path, encoding) from None
    except json.JSONDecodeError as error:
        raise stage_error("corrupt_file", f"{path}:{error.lineno}", f"not JSON: {error.msg}", "mend the file") from None
    if not items:
        yield Rejected(str(path), 0, EMPTY)
    for number, value in enumerate(items, 1):
        if isinstance(value, dict):
            yield Record(path, number, value)
        else:
            yield Rejected(str(path), number, f"expected a JSON object, found {_json_type(value)}")


def _json_type(value: object) -> str:
    names = {"list": "a list", "str": "a string", "NoneType": "null", "bool": "true or false"}
    return names.get(type(value).__name__, "a number")


def _wrong_encoding(path: Path, encoding: str) -> Exception:
    return stage_error("wrong_encoding", str(path), f"not valid {encoding}", "set encoding, e.g. latin-1")


def _checked_text(path: Path, line: int, text: object, source: FileDocuments) -> Iterator[Text | Rejected]:
    if not isinstance(text, str):
        yield Rejected(str(path), line, f"the field {source.text_field} is not a string")
        return
    yield from (Text(path, piece) for piece in _pieces(io.StringIO(text), source.cut_characters))


def _plain_texts(source: FileDocuments, path: Path) -> Iterator[Text | Rejected]:
    is_empty = True
    with _opened(path, source.encoding) as stream:
        lines = io.TextIOWrapper(stream, encoding=_codec(source.encoding))
        try:
            for text in _pieces(lines, source.cut_characters):
                if not text.strip():
                    continue
                if "\0" in text:
                    raise stage_error("binary_source", str(path), "expected text, found a binary file (NUL byte)")
                is_empty = False
                yield Text(path, text)
        except UnicodeDecodeError:
            raise _wrong_encoding(path, source.encoding) from None
    if is_empty:
        yield Rejected(str(path), 0, EMPTY)


def _pieces(lines: io.TextIOBase, cut_characters: int | None) -> Iterator[str]:
    """A text whole, or cut at the first blank line after `cut_characters` characters; a paragraph of twice that length
    is cut at a line end."""
    if cut_characters is None:
        yield lines.read()
        return
    piece: list[str] = []
    size = 0
    is_cut = False
    for line in lines:
        is_blank = not line.strip()
        if not is_blank or piece:
            piece.append(line)
            size += len(line)
        if (is_blank and size >= cut_characters) or size >= 2 * cut_characters:
            yield "".join(piece).strip()
            piece, size, is_cut = [], 0, True
    # An empty text is a document too: whoever validates the documents should see it.
    if size or not is_cut:
        yield "".join(piece).strip()


def _parquet_texts(source: FileDocuments, path: Path, key: str) -> Iterator[Text | Rejected]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        raise stage_error("missing_source", str(path), "no such file", "correct the path in the config")
    try:
        file = pq.ParquetFile(path)
        if source.text_field not in file.schema_arrow.names:
            raise stage_error(
                "wrong_field",
                str(path),
                f"expected the column {source.text_field}, there are: {', '.join(file.schema_arrow.names)}",
                f"set {key}.text_field",
            )
        row = 0
        for batch in file.iter_batches(PARQUET_ROWS, columns=[source.text_field]):
            for text in batch.column(0).to_pylist():
                row += 1
                yield from _checked_text(path, row, text, source)
        if row == 0:
            yield Rejected(str(path), 0, EMPTY)
    except (pa.ArrowInvalid, OSError) as error:
        reason = str(error).splitlines()[0]
        raise stage_error(
            "corrupt_file", str(path), f"not a readable Parquet file: {reason}", "fetch it again"
        ) from None
