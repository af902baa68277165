"""Rows of CSV and TSV files as records: the first row names the fields, and the dialect is seen from the first rows.

A file whose first row is one of its records has no names: its fields are column_1, column_2, …
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from corpus.documents.quarantine import EMPTY, Rejected
from corpus.readers.config import Header
from corpus.readers.encodings import decode, encoding_mark, likely_encoding
from corpus.readers.formats.header import first_row_is_data
from corpus.readers.formats.json_lines import wrong_encoding
from corpus.readers.record import Record, column_names
from corpus.readers.streams import in_utf8_lines, refuse_binary
from infra.errors import stage_error
from infra.io.bounded import TooLong, lines_of, opened
from infra.io.sources import Place

SAMPLE_BYTES, SAMPLE_ROWS = 1 << 17, 200
"""The part of a file from which its dialect is seen."""
DELIMITERS = (",", ";", "\t", "|")
_TABLE_SHARE = 0.9
"""Share of rows of one length from which on lines of comments before them are none of a text."""


@dataclass(frozen=True)
class Dialect:
    """Separators and quoting of a file's fields.

    escape: the character before a quote within quotes; "" where quotes are doubled.
    quote: the character around fields that hold separators or line breaks.
    """

    delimiter: str
    escape: str = ""
    has_quotes: bool = True
    quote: str = '"'

    def reader(self, lines: Iterator[str]) -> Iterator[list[str]]:
        return csv.reader(
            lines,
            delimiter=self.delimiter,
            quotechar=self.quote,
            escapechar=self.escape or None,
            doublequote=not self.escape,
            quoting=csv.QUOTE_MINIMAL if self.has_quotes else csv.QUOTE_NONE,
            strict=True,
        )


def read_delimited(
    file: Place, encoding: str, max_bytes: int, limit_key: str = "max_document_mb", header: Header = "auto"
) -> Iterator[Record | Rejected]:
    """The rows of a CSV or TSV file. A row with more or fewer fields than the first is put aside.

    Args:
        header: what the first row is, as `TextOptions.header`.
        max_bytes: the longest row.
        limit_key: the config key that sets it, for messages.

    Raises:
        StageError: `missing_source`, `binary_source`, `wrong_encoding`; `corrupt_file` for a quote that is never
            closed, which would make one field of all the rest, and for a first row that is no row of names.
    """
    with opened(file) as raw:
        refuse_binary(raw, file, encoding)
        stream, encoding = in_utf8_lines(raw, encoding)
        guessed_encoding = likely_encoding(stream, encoding)
        sample = stream.peek(SAMPLE_BYTES)[:SAMPLE_BYTES]
        sample_text = _decoded_sample(sample, encoding, guessed_encoding)
        skipped, delimiter = _preamble(sample_text, file.name)
        sample_text = "".join(_lines(sample_text)[skipped:])
        dialect = Dialect(delimiter) if delimiter else dialect_of(sample_text, file.name)
        has_names = header == "first_row" or not (header == "none" or _first_row_is_data(sample_text, dialect))
        lines = _Lines(file, stream, encoding, guessed_encoding, max_bytes)
        csv.field_size_limit(max(max_bytes, csv.field_size_limit()))
        text_lines = iter(lines)
        for _ in range(skipped):
            next(text_lines, None)
        rows = dialect.reader(text_lines)
        names: list[str] = []
        number = 0
        while True:
            first_line = lines.number + 1
            lines.row_bytes, lines.is_repaired = 0, False
            try:
                row = next(rows, None)
            except csv.Error as error:
                if "unexpected end of data" in str(error):
                    raise _never_closed(file, first_line) from None
                end = f" to {lines.number:,}" if lines.number > first_line else ""
                yield Rejected(str(file), first_line, f"not CSV: {error} (line {first_line:,}{end})")
                continue
            if row is None:
                break
            if lines.row_bytes > max_bytes:
                yield Rejected(str(file), first_line, str(TooLong(max_bytes, limit_key)))
                continue
            if not any(field.strip() for field in row):
                continue
            if not names:
                names = _names(row, file) if has_names else column_names(len(row))
                if has_names:
                    continue
            number += 1
            if len(row) != len(names):
                reason = f"a different number of fields: expected {len(names)}, found {len(row)}"
                yield Rejected(str(file), first_line, reason)
                continue
            texts = (field.replace("\r\n", "\n") for field in row)
            yield Record(file, first_line, dict(zip(names, texts, strict=True)), lines.is_repaired)
    if not number:
        yield Rejected(str(file), 0, EMPTY if not names else "the file is empty: it has only a row of names")


def dialect_of(sample: str, name: str) -> Dialect:
    """The dialect by which the rows of a sample agree best in their number of fields with the first.

    csv.Sniffer looks for regular patterns of characters, which prose in fields has none of.
    """
    is_tsv = ".tsv" in name.lower()
    delimiters = ("\t", *(delimiter for delimiter in DELIMITERS if delimiter != "\t")) if is_tsv else DELIMITERS
    options = [Dialect(*arguments) for arguments in product(delimiters, ("", "\\"), (True, False))]
    # A file without quotes has no escapes either; quotes within a TSV are often just text.
    options = [option for option in options if option.has_quotes or (option.escape == "" and option.delimiter == "\t")]
    options = [option for option in options if not option.escape or f'{option.escape}"' in sample]
    first_row = sample.partition("\n")[0].strip()
    options = [
        Dialect(delimiter, quote="'")
        for delimiter in delimiters
        if re.fullmatch(rf"'[^']*'(?:{re.escape(delimiter)}'[^']*')+", first_row)
    ] + options
    best, best_score = options[0], (0.0, 0, 0)
    for option in options:
        score = agreement(sample, option)
        if score > best_score:
            best, best_score = option, score
    return best


def _lines(text: str) -> list[str]:
    return io.StringIO(text, newline="").readlines()


def _preamble(sample: str, name: str) -> tuple[int, str]:
    """The number of lines before a table, and the separator that they give; "" for one that is to be seen.

    Excel's hint is `sep=;`. Lines of comments begin with # and have other fields than the rows below.
    """
    lines = _lines(sample)
    if lines and (hint := re.fullmatch(r"\"?sep=(.)\"?\s*", lines[0])):
        return 1, hint[1]
    skipped = next((number for number, line in enumerate(lines) if not line.startswith("#")), 0)
    if not skipped:
        return 0, ""
    for start in (skipped - 1, skipped):  # a row of names may begin with #
        table = "".join(lines[start:])
        share, columns, rows = agreement(table, dialect_of(table, name))
        if share >= _TABLE_SHARE and columns > 1 and rows > 1:
            return start, ""
    return 0, ""


def _first_row_is_data(sample: str, dialect: Dialect) -> bool:
    """Return True if the first row of a sample is like those below it, and not like names of their columns."""
    rows: list[list[str]] = []
    reader = dialect.reader(iter(io.StringIO(sample, newline="")))
    while len(rows) < SAMPLE_ROWS:
        try:
            row = next(reader, None)
        except csv.Error:  # a row that is no CSV, or is cut
            continue
        if row is None:
            break
        if any(field.strip() for field in row):
            rows.append(row)
    return first_row_is_data(rows)


def agreement(sample: str, dialect: Dialect) -> tuple[float, int, int]:
    """The share of rows with as many fields as the first, that number, and the number of such rows; a first row that is
    one field scores 0."""
    is_whole = len(sample.encode()) < SAMPLE_BYTES
    rows: Counter[int] = Counter()
    first = 0
    reader = dialect.reader(iter(io.StringIO(sample, newline="")))
    while sum(rows.values()) < SAMPLE_ROWS:
        try:
            row = next(reader, None)
        except csv.Error as error:
            # A sample may end within quotes.
            is_end = "unexpected end of data" in str(error)
            rows[-1] += is_whole or not is_end
            if not is_end:
                continue
            row = None
        if row is None:
            break
        if any(row):
            first = first or len(row)
            rows[len(row)] += 1
    if first < 2:
        return 0.0, 0, 0
    # The last row of a sample may be cut.
    counted = sum(rows.values()) - (not is_whole)
    return min(1.0, rows[first] / max(1, counted)), first, rows[first]


def _names(row: list[str], file: Place) -> list[str]:
    names = [field.strip().lstrip("\ufeff") for field in row]
    repeated = sorted({name for name in names if names.count(name) > 1 and name})
    if repeated:
        raise stage_error(
            "corrupt_file",
            f"{file}:1",
            f"expected a first row of unique names, found {', '.join(repeated)[:80]} more than once",
            "name the columns in the first row, or set `header: none` for a table without names",
        )
    # The index that pandas writes has no name.
    return [name or f"column_{number}" for number, name in enumerate(names)]


class _Lines:
    """The lines of a stream as text, counted."""

    def __init__(self, file: Place, stream: io.BufferedReader, encoding: str, likely: str, max_bytes: int) -> None:
        self._place, self._stream, self._encoding, self._likely = file, stream, encoding, likely
        self._max_bytes = max_bytes
        self.number, self.row_bytes, self.is_repaired = 0, 0, False

    def __iter__(self) -> Iterator[str]:
        for number, line in lines_of(self._stream, None, self._max_bytes):
            self.number = number
            if isinstance(line, TooLong):
                self.row_bytes += self._max_bytes + 1
                yield "\n"
                continue
            self.row_bytes += len(line)
            if self.row_bytes > 2 * self._max_bytes:
                raise _never_closed(self._place, number)
            try:
                text, is_repaired = decode(line, self._encoding, likely=self._likely)
            except UnicodeDecodeError:
                raise wrong_encoding(self._place, self._encoding) from None
            self.is_repaired |= is_repaired
            yield text.removeprefix("\ufeff") if number == 1 else text


def _decoded_sample(sample: bytes, encoding: str, guessed_encoding: str) -> str:
    try:
        text = decode(sample, encoding_mark(sample[:4]) or encoding, likely=guessed_encoding)[0]
    except UnicodeDecodeError:  # it may be cut within a character
        text = sample.decode("utf-8", "replace")
    return text.removeprefix("\ufeff")


def _never_closed(file: Place, line: int) -> Exception:
    return stage_error(
        "corrupt_file",
        f"{file}:{line}",
        "not CSV: a quote that opens here, or in a row before it, is never closed",
        "close the quote, or write the table as JSON Lines or Parquet",
    )
