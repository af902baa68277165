"""Pages of HTML files and of WARC and WET archives, as text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from corpus.quarantine import EMPTY, Rejected
from corpus.readers.encodings import decode, web_name
from corpus.readers.plain import too_long
from corpus.readers.record import Text
from corpus.readers.streams import opened
from infra.errors import stage_error
from infra.sources import Place

META_BYTES = 4096
DRAIN_BYTES = 1 << 16
MAGIC = b"WARC/"
_META_CHARSET = re.compile(rb"""<meta[^>]+charset=["']?\s*([A-Za-z0-9_.:-]+)""", re.IGNORECASE)
_HEADER_CHARSET = re.compile(r"charset=([^;]+)", re.IGNORECASE)
PAGES = {"text/html", "application/xhtml+xml"}
KINDS = {"response", "resource", "conversion"}


def read_html(place: Place, encoding: str, max_bytes: int) -> Iterator[Text | Rejected]:
    """The main text of one page. Raises StageError `missing_source`, `corrupt_file`."""
    with opened(place) as stream:
        content = stream.read(max_bytes + 1)
    if not content.strip():
        yield Rejected(str(place), 0, EMPTY)
    else:
        yield _page(place, 1, content, encoding, "", {}, max_bytes)


def read_warc(place: Place, encoding: str, max_bytes: int) -> Iterator[Text | Rejected]:
    """The pages of a WARC archive, or the texts of a WET archive. Records of other types than response, resource and
    conversion, and what is neither HTML nor text, are no records of this reader.

    metadata: `url`, `date` (ISO 8601) and `content_type` of each.
    Raises StageError: `missing_source`; `corrupt_file` for an archive that ends within a record, naming the record.
    """
    from warcio.archiveiterator import ArchiveIterator
    from warcio.exceptions import ArchiveLoadFailed

    number = 0
    with opened(place) as stream:
        start = stream.peek(len(MAGIC))[: len(MAGIC)]
        if start and start != MAGIC:
            raise stage_error(
                "corrupt_file", str(place), f"not a WARC archive: it opens with {start!r}", "set the format"
            )
        try:
            # Decompressed before it comes here: warcio passes over an archive that ends within a record.
            for record in ArchiveIterator(stream):
                number += 1
                kind, charset = _content_type(record)
                is_text = record.rec_type in KINDS and (kind in PAGES or kind == "text/plain")
                content = record.content_stream().read(max_bytes + 1) if is_text else b""
                _drain(record)
                if is_text:
                    metadata = {
                        "url": record.rec_headers.get_header("WARC-Target-URI") or "",
                        "date": record.rec_headers.get_header("WARC-Date") or "",
                        "content_type": kind,
                    }
                    make = _page if kind in PAGES else _plain
                    yield make(place, number, content, encoding, charset, metadata, max_bytes)
        except (ArchiveLoadFailed, EOFError, OSError, ValueError, AttributeError) as error:
            # warcio stumbles over half a header with an AttributeError.
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            message = f"not a whole WARC archive: record {number:,}: {reason}"
            raise stage_error("corrupt_file", f"{place}:{number}", message, "fetch it again") from None
    if number == 0:
        yield Rejected(str(place), 0, EMPTY)


def main_text(html: str) -> str:
    """The text of a page without its navigation, advertisements and footers; all of its text where nothing else is
    found (trafilatura, Barbaresi, 2021)."""
    import trafilatura

    text = trafilatura.extract(html, include_comments=False, favor_recall=True)
    return text or trafilatura.html2txt(html)


def declared_charset(content: bytes, header: str = "") -> str:
    """The encoding that a page declares: in its HTTP header, else in a meta element."""
    if name := web_name(header):
        return name
    found = _META_CHARSET.search(content[:META_BYTES])
    return web_name(found.group(1).decode("ascii")) if found else ""


def _page(
    place: Place, number: int, content: bytes, encoding: str, charset: str, metadata: dict[str, str], max_bytes: int
) -> Text | Rejected:
    if len(content) > max_bytes:
        return Rejected(str(place), number, too_long(max_bytes, "a page"))
    if content.count(0) > len(content) // 100 and not charset.startswith("utf-"):
        return Rejected(str(place), number, "not HTML: binary data (NUL bytes)")
    try:
        html, repaired = decode(content, encoding, declared_charset(content, charset))
    except UnicodeDecodeError:
        return Rejected(str(place), number, f"not valid {encoding}")
    return Text(place, number, main_text(html), metadata, repaired)


def _plain(
    place: Place, number: int, content: bytes, encoding: str, charset: str, metadata: dict[str, str], max_bytes: int
) -> Text | Rejected:
    if len(content) > max_bytes:
        return Rejected(str(place), number, too_long(max_bytes, "a text"))
    try:
        text, repaired = decode(content, encoding, web_name(charset))
    except UnicodeDecodeError:
        return Rejected(str(place), number, f"not valid {encoding}")
    return Text(place, number, text, metadata, repaired)


def _content_type(record: Any) -> tuple[str, str]:
    """(media type, declared charset) of what a record holds."""
    headers = record.http_headers or record.rec_headers
    value = headers.get_header("Content-Type") or ""
    charset = _HEADER_CHARSET.search(value)
    return value.partition(";")[0].strip().lower(), charset.group(1) if charset else ""


def _drain(record: Any) -> None:
    """Reads what is left of a record. Raises EOFError if the file ends within it."""
    while record.raw_stream.read(DRAIN_BYTES):
        pass
    if record.raw_stream.limit > 0 or not record.rec_headers.get_header("Content-Length"):
        raise EOFError("the file ends within it")
