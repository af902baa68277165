"""The records of a WARC or WET archive, one by one: a damaged record costs no other one.

warcio reads the headers and the chunks of a record. Where one ends and the next begins is found here, since warcio
gives up an archive at its first damaged record, and takes a negative length for an empty record.
"""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from corpus.readers.record import Unreadable, too_long

KINDS = {"response", "resource", "conversion"}
MAGIC = b"WARC/"
ENCODINGS = ("br", "gzip", "deflate", "zstd")
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
HEADER_BYTES = 1 << 20
READ_BYTES = 1 << 16
CONVERTED_BYTES = 64_000_000
"""The longest record whose length is checked where lines end with LF alone."""
_HEADER_START_BYTES = 64
_NEXT_RECORD = re.compile(rb"\n\n(?=WARC/\d\.\d\n[A-Za-z-]+:)")
_CHARSET = re.compile(r"charset=([^;]+)", re.IGNORECASE)


class TornArchive(Exception):
    """The archive ends within the record of this number."""


@dataclass
class WarcRecord:
    """One record of an archive, to be read before the next one is asked for.

    number: its place in the archive, from 1.
    offset: bytes of the archive, decompressed, before it.
    type: WARC-Type, as its header has it.
    status: the status of an HTTP response; 200 where there is none.
    fault: why it cannot be read; "" for a good one.
    kind: the media type of its content.
    charset: as its headers declare it; "" where they say nothing.
    """

    number: int
    fault: str = ""
    kind: str = ""
    charset: str = ""
    url: str = ""
    date: str = ""
    content: Callable[[int], bytes] = lambda limit: b""
    """Return at most the given number of first bytes of the content, decoded. Raises Unreadable."""
    offset: int = 0
    type: str = ""
    status: int = 200


def records_of(archive: io.BufferedReader) -> Iterator[WarcRecord]:
    """All records, those without text too. Raises TornArchive."""
    stream = _CountedStream(archive)
    number, line = 0, b""
    while True:
        while not line.strip():
            line = stream.readline(HEADER_BYTES)
            if not line:
                return
        number += 1
        offset = stream.bytes_read - len(line)
        if MAGIC.startswith(line):
            raise TornArchive(number)
        if not line.startswith(MAGIC):
            skipped, line = _next_record(stream, line)
            yield WarcRecord(number, f"no WARC header: {skipped:,} bytes that belong to no record", offset=offset)
            continue
        head, headers = _headers(stream, line, number)
        length = headers.get("content-length", "")
        if not (length.isascii() and length.isdecimal() and len(length) < 20):
            message = f"Content-Length is {length[:40]!r}" if length else "there is no Content-Length"
            _, line = _next_record(stream, b"")
            yield WarcRecord(number, f"no valid WARC header: {message}; its content is skipped", offset=offset)
            continue
        block = _Block(stream, head, int(length), number)
        if b"\r" not in head and (content := _converted_content(stream, int(length))) is not None:
            block = _Block(io.BytesIO(content), head, len(content), number)
        record_type = headers.get("warc-type", "")
        if record_type in KINDS:
            yield replace(_read(number, headers, block), offset=offset, type=record_type)
        elif not record_type:
            yield WarcRecord(number, "no valid WARC header: there is no WARC-Type", offset=offset)
        else:
            yield WarcRecord(number, offset=offset, type=record_type)
        block.skip()
        line = b""


class _CountedStream:
    """A stream that counts what is read of it: of a decompressed one, nothing else knows the offset."""

    def __init__(self, stream: io.BufferedReader) -> None:
        self._stream = stream
        self._put_back = io.BytesIO()
        self.bytes_read = 0

    def read(self, size: int) -> bytes:
        data = self._put_back.read(size)
        if len(data) < size:
            data += self._stream.read(size - len(data))
        self.bytes_read += len(data)
        return data

    def readline(self, size: int) -> bytes:
        data = self._put_back.readline(size)
        if len(data) < size and not data.endswith(b"\n"):
            data += self._stream.readline(size - len(data))
        self.bytes_read += len(data)
        return data

    def put_back(self, data: bytes) -> None:
        """Have these bytes, the last that were read, read again."""
        self._put_back = io.BytesIO(data + self._put_back.read())
        self.bytes_read -= len(data)


def _headers(stream: _CountedStream, line: bytes, number: int) -> tuple[bytes, dict[str, str]]:
    """The whole header with its blank line, and its fields by name in small letters; the first of each counts."""
    lines, size = [line], len(line)
    while lines[-1].strip():
        lines.append(stream.readline(HEADER_BYTES))
        if not lines[-1]:
            raise TornArchive(number)
        size += len(lines[-1])
        if size > HEADER_BYTES:
            return b"", {}
    fields: dict[str, str] = {}
    for field in lines[1:]:
        name, _, value = field.decode("utf-8", "replace").partition(":")
        fields.setdefault(name.strip().lower(), value.strip())
    return b"".join(lines), fields


def _next_record(stream: _CountedStream, line: bytes) -> tuple[int, bytes]:
    """Go on to the next line that opens a record: how many bytes lie before it, and that line; b"" at the end."""
    skipped = len(line)
    while line := stream.readline(READ_BYTES):
        if line.startswith(MAGIC):
            return skipped, line
        skipped += len(line)
    return skipped, b""


def _converted_content(stream: _CountedStream, length: int) -> bytes | None:
    """The content of a record whose line ends were converted to LF, so that it is shorter than declared; None, with
    nothing read, where the length is right."""
    if length > CONVERTED_BYTES:
        return None
    data = stream.read(length + _HEADER_START_BYTES)
    end = data[length:]
    is_right = len(data) >= length and (not end.strip() or end.startswith(b"\n\nWARC/"))
    next_record = None if is_right else _NEXT_RECORD.search(data)
    if next_record and next_record.start() < length:
        stream.put_back(data[next_record.start() :])
        return data[: next_record.start()]
    if len(data) < length and data.endswith(b"\n\n"):
        return data[:-2]
    stream.put_back(data)
    return None


class _Block:
    """Header and content of one record as a stream that ends with it."""

    def __init__(self, stream: _CountedStream | io.BytesIO, head: bytes, length: int, number: int) -> None:
        self.length = length
        self._stream = stream
        self._number = number
        self._head = io.BytesIO(head)
        self._left = length
        self.header_room: int | None = HEADER_BYTES + len(head)

    def read(self, size: int = -1) -> bytes:
        return self._read_ahead(self._stream.read, self._head.read, size)

    def readline(self, size: int = -1) -> bytes:
        if self.header_room is not None:
            size = min(self.header_room, self.header_room if size < 0 else size)
            if not size:
                raise Unreadable(f"not a readable page: headers of over {HEADER_BYTES / 1e6:.0f} MB")
        line = self._read_ahead(self._stream.readline, self._head.readline, size)
        if self.header_room is not None:
            self.header_room -= len(line)
        return line

    def _read_ahead(self, rest: Callable[[int], bytes], head: Callable[[int], bytes], size: int) -> bytes:
        if data := head(size):
            return data
        data = rest(self._left if size < 0 else min(size, self._left))
        self._left -= len(data)
        return data

    def skip(self) -> None:
        """Go on to the end of the record. Raises TornArchive."""
        while self._left:
            if not self.read(READ_BYTES):
                raise TornArchive(self._number)


def _read(number: int, headers: dict[str, str], block: _Block) -> WarcRecord:
    from warcio.recordloader import ArcWarcRecordLoader

    if headers["warc-type"] == "response" and not headers.get("warc-target-uri"):
        return WarcRecord(number, "no valid WARC header: there is no WARC-Target-URI")
    try:
        loaded = ArcWarcRecordLoader(verify_http=False).parse_record_stream(block, known_format="warc")
        kind, charset = _content_type(loaded)
        url, date = (loaded.rec_headers.get_header(f"WARC-{name}") or "" for name in ("Target-URI", "Date"))
    except Unreadable as error:
        return WarcRecord(number, str(error))
    except Exception as error:  # half a header gives errors of many kinds
        return WarcRecord(number, f"no valid headers: {type(error).__name__}: {error}")
    block.header_room = None

    def content(limit: int) -> bytes:
        body = _content(loaded, block.length, limit)
        block.skip()  # the text of a record that is cut short is not given out
        return body

    code = loaded.http_headers.get_statuscode() if loaded.http_headers else ""
    return WarcRecord(number, "", kind, charset, url, date, content, status=int(code) if code.isdecimal() else 200)


def _content_type(loaded: Any) -> tuple[str, str]:
    """Return (media type, declared charset) of a record's content."""
    value = (loaded.http_headers or loaded.rec_headers).get_header("Content-Type") or ""
    charset = _CHARSET.search(value)
    return value.partition(";")[0].strip().lower(), charset.group(1) if charset else ""


def _content(loaded: Any, length: int, limit: int) -> bytes:
    from warcio.bufferedreaders import ChunkedDataReader

    http, stream = loaded.http_headers, loaded.raw_stream
    transfer = _codings(http, "transfer-encoding")
    is_chunked = "chunked" in transfer
    # What encodes the transfer is applied last.
    encodings = [name for name in [*_codings(http, "content-encoding"), *transfer] if name in ENCODINGS]
    # A chunk is held as a whole; neither chunks nor compression make a page twice as long.
    if (is_chunked or encodings) and length > 2 * limit + READ_BYTES:
        raise Unreadable(too_long(limit - 1, "a page"))
    if is_chunked:
        stream = ChunkedDataReader(stream)
    if not encodings:
        return bytes(stream.read(limit))
    content = stream.read(2 * limit + READ_BYTES)
    for index, encoding in enumerate(reversed(encodings), 1):
        try:
            content = _decompressed(content, encoding, limit if index == len(encodings) else 2 * limit + READ_BYTES)
        except Exception as error:  # brotli's module has its own error class
            raise Unreadable(f"not a complete {encoding} page: {error}") from None
    return bytes(content)


def _codings(http: Any, name: str) -> list[str]:
    """The codings that the headers of a name list, in one line or several, in the order in which they were applied."""
    lines = [value for header, value in http.headers if header.lower() == name] if http else []
    return [coding.strip().lower().removeprefix("x-") for line in lines for coding in line.split(",")]


def _decompressed(data: bytes, encoding: str, limit: int) -> bytes:
    """Return at most `limit` bytes of the decompressed data; the data unchanged where they are not compressed, since
    servers send wrong headers."""
    if encoding == "br":
        import brotli  # type: ignore[import-untyped]

        decompressor = brotli.Decompressor()
        decompressed = decompressor.process(data, output_buffer_limit=limit)
        while len(decompressed) < limit and not decompressor.is_finished() and not decompressor.can_accept_more_data():
            decompressed += decompressor.process(b"", output_buffer_limit=limit - len(decompressed))
        return bytes(decompressed[:limit])
    if encoding == "zstd":
        import pyarrow as pa

        if not data.startswith(ZSTD_MAGIC):
            return data
        with pa.CompressedInputStream(pa.BufferReader(data), "zstd") as stream:
            return bytes(stream.read(limit))
    for window in (16 + zlib.MAX_WBITS,) if encoding == "gzip" else (zlib.MAX_WBITS, -zlib.MAX_WBITS):
        unpacker = zlib.decompressobj(window)
        try:
            unpacker.decompress(data[:READ_BYTES], 1)
        except zlib.error:
            continue
        return zlib.decompressobj(window).decompress(data, limit)
    return data
