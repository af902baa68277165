"""Bounded reading of files from outside: for any content, reading takes memory for one record, or for as many bytes as
the file's size on disk allows.

A compressed file of 4 MB may contain a line of 1 GB, a path may name an endless device, and a few bytes of an archive
may request a dictionary of 4 GB. Each of these results in an error that names the file and the line.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from infra.errors import stage_error
from infra.io.sources import Place, open_place, size_of

BUFFER_BYTES = 1 << 17
SKIP_BYTES = 1 << 20
RECORD_BYTES = 16_000_000
"""The longest record of instructions, preferences, benchmarks and the like, decompressed: some four million tokens."""
FILE_BYTES = 1_000_000_000
"""The largest file that is read as a whole."""
EXPANSION = 25
"""Largest ratio of content to size on disk of a file that is read as a whole; text has 3 to 10."""
SMALL_BYTES, SMALL_VALUES = 16_000_000, 1_000_000
"""Bytes and values that any file may hold, however small it is on disk."""
XZ_BYTES = 256_000_000
"""Memory for the dictionary of an xz file; `xz -9` needs 65 MB."""
COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2", b"\xfd7zXZ": "xz"}
SHORTEN = "shorten the record, or use another copy of the file"


@dataclass
class Span:
    """The lines that begin in the bytes from `start` to before `end`.

    lines: how many these are, known once they were read to the end.
    """

    start: int
    end: int
    lines: int = 0


class TooLong:
    """Placeholder of a record that was skipped because of its length. key: config key that sets the limit, if any."""

    def __init__(self, limit: int, key: str = "max_document_mb") -> None:
        self._limit, self._key = limit, key

    def __str__(self) -> str:
        allows = f"{self._key} allows" if self._key else "a record may be"
        return f"longer than {allows}: a line of over {self._limit / 1e6:,.0f} MB"


@contextmanager
def opened(source: Place) -> Iterator[io.BufferedReader]:
    """The bytes of a file or object; gzip, zstd, bzip2 and xz are decompressed, by their first bytes.

    Raises StageError: `missing_source`; `corrupt_file` for an archive that is truncated or damaged.
    """
    # What is peeked at is what is buffered: by default a block of the file system, which differs by machine.
    with open_place(source, BUFFER_BYTES) as file:
        kind = compression(file)
        try:
            yield _decompressed(file, kind)
        except (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError) as error:
            raise _corrupt(source, kind, error) from None
        except OSError as error:
            # pyarrow's decompressors report all their errors as plain OSError.
            if kind and error.errno is None:
                raise _corrupt(source, kind, error) from None
            raise


def compression(file: BinaryIO) -> str:
    """Return the compression of a file, by its first bytes; "" if there is none. Leaves the position at the start."""
    start = file.read(8)
    file.seek(0)
    return next((kind for mark, kind in COMPRESSED.items() if start.startswith(mark)), "")


def lines_of(
    stream: io.BufferedReader, span: Span | None, max_bytes: int, key: str = "max_document_mb"
) -> Iterator[tuple[int, bytes | TooLong]]:
    """Yield (number, line with its end) of each line; numbers count from 1 at the start of the span.

    Args:
        stream: what is read; it must be seekable where the span does not begin at 0.
        span: part of the stream; None for all of it.
        max_bytes: longest line that is held; TooLong stands for a longer one.
        key: config key that sets `max_bytes`; "" for a fixed one.
    """
    number, position = 0, 0
    end = None
    if span is not None:
        end = span.end
        if span.start:
            # The line that reaches into this span belongs to the one before.
            stream.seek(span.start - 1)
            position = span.start - 1 + _skip_line(stream)
    while end is None or position < end:
        line = stream.readline(max_bytes + 1)
        if not line:
            return
        number += 1
        position += len(line)
        if span is not None:
            span.lines = number
        if len(line) > max_bytes and not line.endswith(b"\n"):
            position += _skip_line(stream)
            yield number, TooLong(max_bytes, key)
        else:
            yield number, line


def file_lines(path: Path, max_bytes: int = RECORD_BYTES) -> Iterator[tuple[int, str]]:
    """Yield (number, text with its end) of each line of a UTF-8 file, decompressed, a byte order mark skipped.

    Raises:
        StageError: `too_big` for a line of more than `max_bytes`, `corrupt_file` for one that is not UTF-8, each naming
            file and line; and what `opened` raises.
    """
    _refuse_device(path)
    with opened(path) as stream:
        for number, line in lines_of(stream, None, max_bytes, ""):
            location = f"{path}:{number}"
            if isinstance(line, TooLong):
                raise stage_error("too_big", location, str(line), SHORTEN)
            try:
                yield number, (line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).decode("utf8")
            except UnicodeDecodeError as error:
                message = f"expected UTF-8: byte {error.start:,} is 0x{line[error.start]:02x}"
                raise stage_error("corrupt_file", location, message, "write the file as UTF-8") from None


def read_bounded(path: Path, max_bytes: int = FILE_BYTES) -> bytes:
    """Return the bytes of a file unchanged. Raises StageError `missing_source`, and `too_big` for more than
    `max_bytes`."""
    _refuse_device(path)
    with open_place(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise stage_error("too_big", str(path), f"expected a file of at most {max_bytes / 1e6:,.0f} MB", SHORTEN)
    return content


def read_text(path: Path, max_bytes: int = FILE_BYTES, encoding: str = "utf-8-sig", errors: str = "strict") -> str:
    """Return the text of a file with newlines as in Python's text mode. Raises as `read_bounded`, and
    UnicodeDecodeError."""
    text = read_bounded(path, max_bytes).decode(encoding, errors)
    return text.replace("\r\n", "\n").replace("\r", "\n")


class Expansion:
    """Content of a compressed file, counted while it is read as a whole, against its size on disk."""

    def __init__(self, source: Place) -> None:
        self._place, self._size = source, size_of(source)
        self._most_bytes = min(FILE_BYTES, max(SMALL_BYTES, EXPANSION * self._size))
        self._most_values = max(SMALL_VALUES, self._size)
        self._bytes, self._values = 0, 0

    def add(self, held: int, values: int) -> None:
        """Count bytes, and values of JSON or of a table. Raises StageError `too_big` for more than `FILE_BYTES`, for
        more than `EXPANSION` times the size on disk, and for more values than bytes on disk."""
        self._bytes += held
        self._values += values
        if self._bytes > self._most_bytes or self._values > self._most_values:
            is_bytes = self._bytes > self._most_bytes
            over = f"{self._most_bytes / 1e6:,.0f} MB" if is_bytes else f"{self._most_values:,} values"
            limit = f"{FILE_BYTES / 1e6:,.0f} MB that is compressed {EXPANSION} times at most"
            message = f"expected a file of at most {limit}: {self._size / 1e6:,.1f} MB on disk hold over {over}"
            raise stage_error("too_big", str(self._place), message, "decompress it and inspect its content")


def read_expanded(source: Place) -> bytes:
    """Return all bytes of a file, decompressed. Raises StageError as `opened` and `Expansion.add` do."""
    if isinstance(source, Path):
        _refuse_device(source)
    expansion, parts = Expansion(source), []
    with opened(source) as stream:
        while part := stream.read(SKIP_BYTES):
            parts.append(part)
            expansion.add(len(part), sum(map(part.count, (b",", b"[", b"{", b"\n", b"\t"))))
    return b"".join(parts)


def _refuse_device(path: Path) -> None:
    """Refuse a device or a pipe, which may be endless. A missing file is reported by the reader."""
    if path.exists() and not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():
        message = "expected a file, found a device, a pipe or a socket"
        raise stage_error("missing_source", str(path), message, "name a file")


def _skip_line(stream: io.BufferedReader) -> int:
    skipped = 0
    while part := stream.readline(SKIP_BYTES):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped


def _decompressed(file: BinaryIO, kind: str) -> io.BufferedReader:
    if not kind:
        return file if isinstance(file, io.BufferedReader) else io.BufferedReader(file, BUFFER_BYTES)  # type: ignore[arg-type]
    if kind in ("xz", "bz2", "gzip"):
        return io.BufferedReader(_Unpacked(file, kind), BUFFER_BYTES)
    import pyarrow as pa

    return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(file, "r"), kind), BUFFER_BYTES)


class _Unpacked(io.RawIOBase):
    """The streams of a gzip, xz or bzip2 file, one after the other. Python's own readers pass over whatever behind the
    first one opens none, also a damaged one with all its text; pyarrow's stumbles over an empty one, and over zeros
    behind the last."""

    def __init__(self, file: BinaryIO, kind: str) -> None:
        self._file, self._kind = file, kind
        self._unpacker: Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while True:
            if self._unpacker is None or self._unpacker.eof:
                data = self._next_stream()
                if not data:
                    return 0
                self._unpacker = _UNPACKERS[self._kind]()
            else:
                data = self._file.read(BUFFER_BYTES) if self._unpacker.needs_input else b""
                if self._unpacker.needs_input and not data:
                    raise EOFError("it ends within a stream")
            part = self._unpacker.decompress(data, len(buffer))
            if part:
                buffer[: len(part)] = part
                return len(part)

    def _next_stream(self) -> bytes:
        """The beginning of the next stream, b"" behind the last; streams may have zeros behind them, as tapes and block
        devices leave them."""
        data = self._unpacker.unused_data if self._unpacker else b""
        while True:
            data = data.lstrip(b"\0")
            if data:
                return data
            data = self._file.read(BUFFER_BYTES)
            if not data:
                return b""


class _GzipDecompressor:
    """One member of a gzip file, with the attributes of Python's decompressors for bzip2 and xz."""

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(zlib.MAX_WBITS | 16)

    @property
    def eof(self) -> bool:
        return self._inflate.eof

    @property
    def unused_data(self) -> bytes:
        return self._inflate.unused_data

    @property
    def needs_input(self) -> bool:
        return not self._inflate.unconsumed_tail

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._inflate.decompress(self._inflate.unconsumed_tail + data, max_length)


_UNPACKERS: dict[str, Callable[[], Any]] = {
    "xz": lambda: lzma.LZMADecompressor(memlimit=XZ_BYTES),
    "bz2": bz2.BZ2Decompressor,
    "gzip": _GzipDecompressor,
}


def _corrupt(source: Place, kind: str, error: Exception) -> Exception:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return stage_error("corrupt_file", str(source), f"not a complete {kind} file: {reason}", "download it again")
