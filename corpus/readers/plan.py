"""Cuts the files of a source into pieces of work, the same on every machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from corpus.readers.config import PairOptions, TextOptions
from corpus.readers.formats.json_lines import is_list
from corpus.readers.formats.table_process import group_bytes
from corpus.readers.streams import wide_encoding
from corpus.readers.unread import UNREAD, reads_pdf
from infra.errors import StageError
from infra.io.bounded import Span, compression, opened
from infra.io.sources import Place, by_name, open_place, size_of

PARTITION_BYTES = 32_000_000
"""About what is read in one partition. A file that cannot be cut (compressed, HTML, WARC) is never shared out."""

COMPRESSION_SUFFIXES = {".gz", ".zst", ".bz2", ".xz"}
FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".arrows": "arrow",
    ".feather": "arrow",
    ".csv": "csv",
    ".tsv": "csv",
    ".html": "html",
    ".htm": "html",
    ".xhtml": "html",
    ".warc": "warc",
    ".wet": "warc",
    ".ipynb": "notebook",
    ".epub": "epub",
    ".docx": "docx",
    ".srt": "subtitles",
    ".vtt": "subtitles",
    ".mhtml": "mhtml",
    ".mht": "mhtml",
    ".eml": "email",
    ".tex": "tex",
    ".md": "markdown",
    ".markdown": "markdown",
    **dict.fromkeys(UNREAD, "unread"),
    ".pdf": "pdf",
}


BROKEN = {"misnamed_file", "corrupt_file", "binary_source", "unread_format", "wrong_encoding", "too_big"}
"""Faults of a whole file, which a source may choose to put aside."""


@dataclass(frozen=True)
class FilePart:
    """A file, or a part of one: bytes of a file of lines, row groups of a Parquet file. size: bytes on disk."""

    file: Place
    size: int
    span: Span | None = None


def format_of(source: TextOptions | PairOptions, file: Place) -> str:
    """Return the format that the source sets, or else that of the file's name; files without a known suffix are
    text."""
    if source.format != "auto":
        return source.format
    format_name = named_format(file)
    # What is read line by line, or said to be a page or an e-mail, is so in a file of text of any suffix.
    is_plain = isinstance(source, PairOptions) or (source.content == "plain" and source.text_unit == "file")
    return format_name if is_plain or format_name not in ("markdown", "tex", "email", "mhtml") else "text"


def named_format(file: Place) -> str:
    """Return the format of a file's name; files without a known suffix are text, and unread those that no reader
    reads."""
    name = FORMATS.get(suffix_of(file), "text")
    return "unread" if name == "pdf" and not reads_pdf() else name


def suffix_of(file: Place) -> str:
    """The suffix of a file's name in lower case, before that of a compression."""
    suffixes = [suffix.lower() for suffix in PurePosixPath(file.name).suffixes]
    while suffixes and suffixes[-1] in COMPRESSION_SUFFIXES:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def partitions_of(source: TextOptions, files: Iterable[Place]) -> list[list[FilePart]]:
    """The pieces of all files, in groups of about PARTITION_BYTES; depends on nothing but the files.

    Raises StageError `missing_source`, `corrupt_file` (Parquet).
    """
    groups: list[list[FilePart]] = []
    remaining = 0
    for file in by_name(files):
        for piece in _pieces(source, file):
            if not groups or piece.size > remaining:
                groups.append([])
                remaining = PARTITION_BYTES
            groups[-1].append(piece)
            remaining -= piece.size
    return groups


def _pieces(source: TextOptions, file: Place) -> Iterator[FilePart]:
    size = size_of(file)
    if size <= PARTITION_BYTES:
        yield FilePart(file, size)
        return
    kind = format_of(source, file)
    if kind == "parquet":
        yield from _row_groups(source, file, size)
    elif (kind == "jsonl" or (kind == "text" and source.text_unit == "line")) and _splits_at_bytes(source, file, kind):
        for start in range(0, size, PARTITION_BYTES):
            end = min(size, start + PARTITION_BYTES)
            yield FilePart(file, end - start, Span(start, end))
    else:
        yield FilePart(file, size)


def _splits_at_bytes(source: TextOptions, source_file: Place, kind: str) -> bool:
    with open_place(source_file) as file:
        if compression(file):
            return False
    with opened(source_file) as stream:
        if wide_encoding(stream, source.encoding):
            return False
    return not (kind == "jsonl" and is_list(source_file))


def _row_groups(source: TextOptions, file: Place, size_on_disk: int) -> Iterator[FilePart]:
    first, total = 0, 0
    try:
        sizes = group_bytes(file)
    except StageError as error:
        if source.broken_files == "stop" or error.problems[0].code not in BROKEN:
            raise
        # Who reads it finds the same fault, and puts the file aside.
        yield FilePart(file, size_on_disk)
        return
    for index, size in enumerate(sizes):
        if total and total + size > PARTITION_BYTES:
            yield FilePart(file, total, Span(first, index))
            first, total = index, 0
        total += size
    yield FilePart(file, total, Span(first, len(sizes)))
