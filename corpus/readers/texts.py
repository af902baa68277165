"""The texts of one file or part of a file, whatever its format."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterator, Mapping
from typing import Any

from corpus.documents.quarantine import Rejected
from corpus.readers.config import TextOptions
from corpus.readers.contents import refuse_misnamed
from corpus.readers.encodings import decode, mend, no_text
from corpus.readers.formats.delimited import read_delimited
from corpus.readers.formats.documents import DOCUMENT_FORMATS, read_document
from corpus.readers.formats.json_lines import read_records, with_fields
from corpus.readers.formats.mail import mail_text
from corpus.readers.formats.plain import cut, read_lines, read_paragraphs, read_whole
from corpus.readers.formats.table_batches import TableSource
from corpus.readers.formats.table_process import read_rows
from corpus.readers.formats.web import main_text, read_html, read_warc
from corpus.readers.plan import BROKEN, FilePart, format_of, suffix_of
from corpus.readers.record import MISSING, Record, Text, Unreadable, pick, too_long
from corpus.readers.unread import MAGIC_BYTES, named_by_magic, refuse_format
from infra.errors import StageError


def read_texts(source: TextOptions, piece: FilePart, key: str) -> Iterator[Text | Rejected]:
    """All texts of a piece of a source, mended and cut as the source asks for; what cannot be read is put aside.

    Args:
        key: the dotted config key of the source, for messages.

    Raises StageError: `missing_source`, `wrong_field` (with the existing fields), what `infra.io.s3` raises, and,
    unless the source puts broken files aside, `binary_source`, `wrong_encoding`, `corrupt_file`, `too_big`.
    """
    try:
        for item in _read(source, piece, key):
            if isinstance(item, Rejected):
                yield item
            else:
                yield from _finished(item, source)
    except StageError as error:
        [problem] = error.problems
        if source.broken_files == "stop" or problem.code not in BROKEN:
            raise
        yield Rejected(str(piece.file), 0, f"broken file: {problem.message}")


def _read(source: TextOptions, piece: FilePart, key: str) -> Iterator[Text | Rejected]:
    file, encoding, max_bytes = piece.file, source.encoding, int(source.max_document_mb * 1e6)
    fields = (source.text_field, *source.metadata_fields)
    kind = format_of(source, file)
    if source.format == "auto" and not (piece.span and piece.span.start):
        refuse_misnamed(file, kind, encoding, key, source.text_field, source.content)
    match kind:
        case "jsonl":
            # Escapes and other fields may make a line longer than its text.
            records = read_records(
                file,
                encoding,
                (source.text_field,),
                key,
                ("text_field",),
                piece.span,
                4 * max_bytes,
                "max_document_mb",
            )
            yield from _texts_of(records, source)
        case "parquet" | "arrow" as kind:
            groups = None if piece.span is None else (piece.span.start, piece.span.end)
            yield from _texts_of(read_rows(TableSource(kind, file, fields, key, max_bytes, groups)), source)
        case "csv":
            rows = read_delimited(file, encoding, 4 * max_bytes, header=source.header)
            yield from _texts_of(with_fields(rows, (source.text_field,), key, ("text_field",)), source)
        case "html":
            yield from read_html(file, encoding, max_bytes)
        case kind if kind in DOCUMENT_FORMATS:
            yield from read_document(file, kind, encoding, max_bytes)
        case "unread":
            raise refuse_format(file, suffix_of(file))
        case "warc":
            yield from read_warc(file, encoding, max_bytes, source.error_pages)
        case _ if source.text_unit == "line":
            yield from read_lines(file, encoding, piece.span, max_bytes)
        case _ if source.text_unit == "paragraph" or (source.cut_characters and source.content == "plain"):
            cut_characters = (source.cut_characters or 0) if source.content == "plain" else 0
            yield from read_paragraphs(file, encoding, cut_characters, max_bytes)
        case _:
            yield from read_whole(file, encoding, max_bytes)


def _texts_of(records: Iterator[Record | Rejected], source: TextOptions) -> Iterator[Text | Rejected]:
    for record in records:
        if isinstance(record, Rejected):
            yield record
            continue
        value = pick(record.value, source.text_field)
        if isinstance(value, bytes | str) and (name := named_by_magic(value[:MAGIC_BYTES])):
            yield Rejected(str(record.file), record.line, f"the field {source.text_field} holds {name}, not text")
            continue
        text, repaired = value, record.is_repaired
        if isinstance(value, bytes):
            try:
                text, repaired = decode(value, source.encoding)
            except UnicodeDecodeError:
                yield Rejected(str(record.file), record.line, f"not valid {source.encoding}")
                continue
        if not isinstance(text, str):
            fault = "is null" if text is None or text is MISSING else "is not a string"
            yield Rejected(str(record.file), record.line, f"the field {source.text_field} {fault}")
            continue
        yield Text(record.file, record.line, text, record.value, repaired)


def _finished(item: Text, source: TextOptions) -> Iterator[Text | Rejected]:
    """The text in its final form: out of its HTML or e-mail, mended, and cut."""
    text, was_mended = mend(item.text)
    fault = no_text(text) if source.content == "html" else ""
    if source.content != "plain" and not fault:
        try:
            text = _CONTENTS[source.content](text)
        except Unreadable as error:
            yield Rejected(str(item.file), item.line, str(error))
            return
        # Only here are a mail's parts and a page's entities decoded.
        text, was_mended_inside = mend(text)
        was_mended |= was_mended_inside
    if fault := fault or no_text(text):
        yield Rejected(str(item.file), item.line, fault)
        return
    if len(text) > source.max_document_mb * 1e6:
        yield Rejected(str(item.file), item.line, too_long(int(source.max_document_mb * 1e6), "a text"))
        return
    metadata = _metadata(item.metadata, source.metadata_fields) if source.metadata_fields else None
    repaired = item.is_repaired or was_mended
    # A plain file is cut during reading; a page or an e-mail only once its text is extracted.
    is_cut_already = item.metadata is None and source.content == "plain"
    if source.cut_characters is None or is_cut_already:
        yield Text(item.file, item.line, text, metadata, repaired)
    else:
        for number, (_, piece) in enumerate(cut(io.StringIO(text), source.cut_characters)):
            assert isinstance(piece, str)
            yield Text(item.file, item.line, piece, metadata, repaired, number)


def _metadata(value: Mapping[str, Any] | None, fields: tuple[str, ...]) -> dict[str, Any]:
    values = {field: pick(value or {}, field) for field in fields}
    return {field: value for field, value in values.items() if value is not MISSING}


def _html_text(text: str) -> str:
    """The main text of a page; text without a tag is only unescaped."""
    return main_text(text) if _TAG.search(text) else html.unescape(text)


_TAG = re.compile(r"<[a-zA-Z!/][^>]*>")
_CONTENTS = {"html": _html_text, "email": mail_text}
