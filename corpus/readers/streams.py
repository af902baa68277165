"""The bytes of a file or object in an encoding that splits into lines."""

from __future__ import annotations

import codecs
import io
from typing import BinaryIO

from corpus.readers.unread import refuse_by_magic
from infra.errors import stage_error
from infra.io.bounded import BUFFER_BYTES
from infra.io.sources import Place

PROBE_BYTES = 8192
# In texts NULs are rare accidents; in binary files every tenth byte or so is one.
MAX_NUL_SHARE = 0.001
MIN_WIDE_CHARACTERS = 8
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def encoding_mark(start: bytes) -> str:
    """Return the encoding of a byte order mark, "" without one."""
    return next((encoding for mark, encoding in _MARKS if start.startswith(mark)), "")


def wide_without_mark(start: bytes) -> str:
    """Return utf-16-le or utf-16-be for bytes of which every other one is mostly NUL and the rest never, as in most
    texts of that encoding without a byte order mark; else "".
    """
    half = len(start) // 2
    even, odd = start[: 2 * half : 2].count(0), start[1 : 2 * half : 2].count(0)
    if half < MIN_WIDE_CHARACTERS or even * odd:
        return ""
    return "utf-16-le" if odd > half // 2 else "utf-16-be" if even > half // 2 else ""


def is_wide(encoding: str) -> bool:
    """Return True if a line end is more than one byte in this encoding, by whichever of its names."""
    try:
        return codecs.lookup(encoding).name.startswith(("utf-16", "utf-32"))
    except LookupError:  # none, or one that is to be found out
        return False


def refuse_binary(stream: io.BufferedReader, file: Place, encoding: str) -> None:
    """Raise StageError `binary_source` for a stream that opens like an image or a program rather than text."""
    probe = stream.peek(PROBE_BYTES)[:PROBE_BYTES]
    refuse_by_magic(probe, file)
    wide = is_wide(encoding) or is_wide(encoding_mark(probe)) or (encoding == "auto" and wide_without_mark(probe))
    if not wide and probe.count(0) > MAX_NUL_SHARE * len(probe):
        raise stage_error(
            "binary_source",
            str(file),
            f"expected text, found a binary file (NUL byte at byte {probe.index(0):,})",
            "remove it from the paths, or set the format or encoding",
        )


def wide_encoding(stream: io.BufferedReader, encoding: str) -> str:
    """The encoding of a stream in which a line end is more than one byte, as configured or seen from its start; "" for
    all others."""
    probe = stream.peek(PROBE_BYTES)[:PROBE_BYTES]
    mark = encoding_mark(probe)
    declared = encoding if is_wide(encoding) else mark or (wide_without_mark(probe) if encoding == "auto" else "")
    if not is_wide(declared):
        return ""
    declared = codecs.lookup(declared).name
    if declared in ("utf-16", "utf-32") and not is_wide(mark):
        # Python's own decoder refuses a stream without the mark; most such files come from Windows.
        return wide_without_mark(probe) or f"{declared}-le"
    return declared


def in_utf8_lines(stream: io.BufferedReader, encoding: str) -> tuple[io.BufferedReader, str]:
    """The same text with lines that end in one byte, and what it is in then: UTF-16 and UTF-32 are turned into UTF-8 on
    the way."""
    wide = wide_encoding(stream, encoding)
    return (io.BufferedReader(_Transcoder(stream, wide), BUFFER_BYTES), "utf-8") if wide else (stream, encoding)


class _Transcoder(io.RawIOBase):
    def __init__(self, stream: BinaryIO, encoding: str) -> None:
        self._text = io.TextIOWrapper(stream, encoding, errors="replace", newline="")
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self._rest:
            self._rest = self._text.read(BUFFER_BYTES).encode()
        part, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)
