"""Lines of a byte stream, of a part of one too, none of them longer than memory allows."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass

SKIP_BYTES = 1 << 20


@dataclass
class Span:
    """The lines that begin in the bytes from `start` to before `end`.

    lines: how many these are, known once they were read to the end.
    """

    start: int
    end: int
    lines: int = 0


class TooLong:
    """Stands for a line that was skipped because of its length."""

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def __str__(self) -> str:
        return f"longer than max_document_mb allows: a line of over {self._limit / 1e6:,.0f} MB"


def lines_of(
    stream: io.BufferedReader, span: Span | None, max_bytes: int | None
) -> Iterator[tuple[int, bytes | TooLong]]:
    """(number, line with its end) of each line; numbers count from 1 at the start of the span."""
    number, position = 0, 0
    end = None
    if span is not None:
        end = span.end
        if span.start:
            # The line that reaches into this span belongs to the one before.
            stream.seek(span.start - 1)
            position = span.start - 1 + _skip_line(stream)
    limit = -1 if max_bytes is None else max_bytes + 1
    while end is None or position < end:
        line = stream.readline(limit)
        if not line:
            return
        number += 1
        position += len(line)
        if span is not None:
            span.lines = number
        if max_bytes is not None and len(line) > max_bytes and not line.endswith(b"\n"):
            position += _skip_line(stream)
            yield number, TooLong(max_bytes)
        else:
            yield number, line


def _skip_line(stream: io.BufferedReader) -> int:
    skipped = 0
    while part := stream.readline(SKIP_BYTES):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped
