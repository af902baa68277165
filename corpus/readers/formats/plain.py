"""Texts of plain files: the whole file, its paragraphs, its lines, or pieces of a given length."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator

from corpus.documents.quarantine import EMPTY, Rejected
from corpus.readers.encodings import decode, likely_encoding
from corpus.readers.formats.json_lines import wrong_encoding
from corpus.readers.record import Text, too_long
from corpus.readers.streams import in_utf8_lines, refuse_binary
from infra.io.bounded import Span, TooLong, lines_of, opened
from infra.io.sources import Place


def read_whole(file: Place, encoding: str, max_bytes: int) -> Iterator[Text | Rejected]:
    """A file as one text. Raises StageError: `missing_source`, `binary_source`, `wrong_encoding`, `corrupt_file`."""
    with opened(file) as stream:
        refuse_binary(stream, file, encoding)
        content = stream.read(max_bytes + 1)
    if len(content) > max_bytes:
        yield Rejected(str(file), 0, too_long(max_bytes, "the file; cut it by text_unit or cut_characters"))
        return
    try:
        text, repaired = decode(content, encoding)
    except UnicodeDecodeError:
        raise wrong_encoding(file, encoding) from None
    # As Python's text mode does.
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if text.strip():
        yield Text(file, 1, text, is_repaired=repaired)
    else:
        yield Rejected(str(file), 0, EMPTY)


def read_lines(file: Place, encoding: str, span: Span | None, max_bytes: int) -> Iterator[Text | Rejected]:
    """Each line that is not blank as a text. Lines that are not in the encoding are put aside."""
    is_empty = True
    with opened(file) as raw:
        refuse_binary(raw, file, encoding)
        stream, encoding = in_utf8_lines(raw, encoding)
        guessed_encoding = likely_encoding(stream, encoding)
        for number, line in lines_of(stream, span, max_bytes):
            if isinstance(line, TooLong):
                is_empty = False
                yield Rejected(str(file), number, str(line))
                continue
            try:
                text, repaired = decode(line, encoding, likely=guessed_encoding)
            except UnicodeDecodeError:
                yield Rejected(str(file), number, f"not valid {encoding}")
                continue
            if text := text.strip():
                is_empty = False
                yield Text(file, number, text, is_repaired=repaired)
    if is_empty and span is None:
        yield Rejected(str(file), 0, EMPTY)


def read_paragraphs(file: Place, encoding: str, cut_characters: int, max_characters: int) -> Iterator[Text | Rejected]:
    """A file cut at the first blank line after `cut_characters` characters; 0 gives every paragraph by itself."""
    is_empty = True
    with opened(file) as stream:
        refuse_binary(stream, file, encoding)
        lines = _decoded_lines(*in_utf8_lines(stream, encoding), max_characters)
        try:
            for number, text in cut(lines, cut_characters, max_characters):
                if not text:
                    continue
                is_empty = False
                if isinstance(text, TooLong) or len(text) > max_characters:
                    yield Rejected(str(file), number, too_long(max_characters, "a paragraph"))
                else:
                    yield Text(file, number, text)
        except UnicodeDecodeError:
            raise wrong_encoding(file, encoding) from None
    if is_empty:
        yield Rejected(str(file), 0, EMPTY)


def cut(
    lines: Iterable[str | TooLong], cut_characters: int, max_characters: float = float("inf")
) -> Iterator[tuple[int, str | TooLong]]:
    """Yield (number of the first line, text) of each piece.

    A paragraph of twice the length, if it is not 0, is cut at a line end. A text without a piece gives one that is
    empty; what is much longer than `max_characters` is not held, and TooLong stands for it.
    """
    piece: list[str] = []
    size, first_line, is_cut = 0, 1, False
    over: TooLong | None = None

    def join_piece() -> str | TooLong:
        return over or "".join(piece).strip()

    for number, line in enumerate(lines, 1):
        is_blank = isinstance(line, str) and not line.strip()
        if not is_blank or piece or over:
            first_line = first_line if piece or over else number
            if isinstance(line, TooLong):
                over = line
            else:
                piece.append(line)
                size += len(line)
            # White space at its ends does not count, and is less than that.
            if size > 2 * max_characters:
                over = TooLong(int(max_characters))
            if over:
                piece = []
        too_long = cut_characters and (size >= 2 * cut_characters or over)
        if (is_blank and (over or (piece and size >= cut_characters))) or too_long:
            yield first_line, join_piece()
            piece, size, is_cut, over = [], 0, True, None
    # An empty text is a document too, so that the validation of documents sees it.
    if size or over or not is_cut:
        yield first_line, join_piece()


def _decoded_lines(stream: io.BufferedReader, encoding: str, max_characters: int) -> Iterator[str | TooLong]:
    guessed_encoding = likely_encoding(stream, encoding)
    # No encoding takes more than four bytes per character.
    for _, line in lines_of(stream, None, 4 * max_characters):
        yield (
            line
            if isinstance(line, TooLong)
            else decode(line, encoding, likely=guessed_encoding)[0].replace("\r\n", "\n")
        )
