"""Pages of HTML files and of WARC and WET archives, as text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Literal

from corpus.documents.quarantine import EMPTY, Rejected
from corpus.readers.encodings import decode, no_text, web_name
from corpus.readers.formats.formulas import with_formulas
from corpus.readers.formats.warc import MAGIC, TornArchive, WarcRecord, records_of
from corpus.readers.record import Text, Unreadable, too_long
from corpus.readers.unread import MAGIC_BYTES, named_by_magic, refuse_by_magic
from infra.errors import stage_error
from infra.io.bounded import opened
from infra.io.sources import Place

META_BYTES = 4096
_META_CHARSET = re.compile(rb"""<meta[^>]+charset=["']?\s*([A-Za-z0-9_.:-]+)""", re.IGNORECASE)
_FULL_PAGE = re.compile(r"<(?:html|rss|feed|\?xml)\b", re.IGNORECASE)
"""In whole pages, and in feeds, which are none."""
PAGES = {"text/html", "application/xhtml+xml"}


def read_html(file: Place, encoding: str, max_bytes: int) -> Iterator[Text | Rejected]:
    """The main text of one page. Raises StageError `missing_source`, `corrupt_file`."""
    with opened(file) as stream:
        refuse_by_magic(stream.peek(MAGIC_BYTES)[:MAGIC_BYTES], file)
        content = stream.read(max_bytes + 1)
    if not content.strip():
        yield Rejected(str(file), 0, EMPTY)
    else:
        yield _page(file, 1, content, encoding, "", {}, max_bytes)


def read_warc(
    file: Place, encoding: str, max_bytes: int, error_pages: Literal["skip", "read"] = "skip"
) -> Iterator[Text | Rejected]:
    """The pages of a WARC archive, or the texts of a WET archive. Records of other types than response, resource and
    conversion, and what is neither HTML nor text, are no records of this reader; a damaged record is put aside by
    itself. An archive with records of which none is a page or a text is put aside as a whole: its header lines may
    be damaged.

    metadata: `url`, `date` (ISO 8601) and `content_type` of each.

    Args:
        error_pages: what becomes of responses whose HTTP status is not 2xx.

    Raises StageError: `missing_source`; `corrupt_file` for an archive that ends within a record, naming the record.
    """
    number, is_silent = 0, True
    types: Counter[str] = Counter()
    with opened(file) as stream:
        start = stream.peek(len(MAGIC))[: len(MAGIC)]
        if start and start != MAGIC:
            raise stage_error(
                "corrupt_file", str(file), f"not a WARC archive: it begins with {start!r}", "set the format"
            )
        try:
            for record in records_of(stream):
                number = record.number
                is_text = record.kind in PAGES or record.kind == "text/plain"
                is_silent &= not record.fault and not is_text
                if record.fault:
                    yield Rejected(str(file), number, f"{record.fault} (at byte {record.offset:,})")
                elif is_text and error_pages == "skip" and not 200 <= record.status < 300:
                    reason = f"HTTP status {record.status}: an error page or a redirect"
                    yield Rejected(str(file), record.number, reason, is_skipped=True)
                elif is_text:
                    yield _text_of(record, file, encoding, max_bytes)
                else:
                    types[" ".join(filter(None, (record.type[:40], record.kind[:40])))] += 1
                    last = record
        except TornArchive as torn:
            message = f"not a complete WARC archive: record {torn.args[0]:,}: the file ends within it"
            raise stage_error("corrupt_file", f"{file}:{torn.args[0]}", message, "download it again") from None
    if number == 0:
        yield Rejected(str(file), 0, EMPTY)
    elif is_silent:
        listing = ", ".join(f"{count:,} {name}" for name, count in types.most_common(5))
        reason = f"no page or text in it: {number:,} records ({listing}), the last at byte {last.offset:,}"
        yield Rejected(str(file), number, reason)


def _text_of(record: WarcRecord, file: Place, encoding: str, max_bytes: int) -> Text | Rejected:
    metadata = {"url": record.url, "date": record.date, "content_type": record.kind}
    make = _page if record.kind in PAGES else _plain
    try:
        content = record.content(max_bytes + 1)
    except Unreadable as error:
        return Rejected(str(file), record.number, str(error))
    if name := named_by_magic(content[:MAGIC_BYTES]):
        return Rejected(str(file), record.number, f"{name} that is called {record.kind}")
    return make(file, record.number, content, encoding, record.charset, metadata, max_bytes)


def main_text(html: str) -> str:
    """The text of a page without its navigation, advertisements and footers; all of its text where nothing else is
    found (trafilatura, Barbaresi, 2021).

    Args:
        html: a page or a piece.

    Raises Unreadable where it cannot be parsed.
    """
    from trafilatura import extract, html2txt

    html = with_formulas(html)
    try:
        text = extract(html, include_comments=False, favor_recall=True) or html2txt(html)
        if not text and not _FULL_PAGE.search(html):
            # A piece of a page, such as a field of a record holds: trafilatura takes one of a single block for no HTML.
            html = f"<html><body>{html}</body></html>"
            text = extract(html, include_comments=False, favor_recall=True) or html2txt(html)
        return text
    except Exception as error:  # whatever its parsers stumble over
        raise Unreadable(f"not readable HTML: {type(error).__name__}: {error}") from None


def declared_charset(content: bytes, header: str = "") -> str:
    """The encoding that a page declares: in its HTTP header, else in a meta element."""
    if name := web_name(header):
        return name
    match = _META_CHARSET.search(content[:META_BYTES])
    return web_name(match.group(1).decode("ascii")) if match else ""


def _page(
    file: Place, number: int, content: bytes, encoding: str, charset: str, metadata: dict[str, str], max_bytes: int
) -> Text | Rejected:
    if len(content) > max_bytes:
        return Rejected(str(file), number, too_long(max_bytes, "a page"))
    if content.count(0) > len(content) // 100 and not charset.startswith("utf-"):
        return Rejected(str(file), number, "not HTML: binary data (NUL bytes)")
    try:
        html, repaired = decode(content, encoding, declared_charset(content, charset))
    except UnicodeDecodeError:
        return Rejected(str(file), number, f"not valid {encoding}")
    if fault := no_text(html):  # the extraction takes control characters out
        return Rejected(str(file), number, fault)
    try:
        return Text(file, number, main_text(html), metadata, repaired)
    except Unreadable as error:
        return Rejected(str(file), number, str(error))


def _plain(
    file: Place, number: int, content: bytes, encoding: str, charset: str, metadata: dict[str, str], max_bytes: int
) -> Text | Rejected:
    if len(content) > max_bytes:
        return Rejected(str(file), number, too_long(max_bytes, "a text"))
    try:
        text, repaired = decode(content, encoding, web_name(charset))
    except UnicodeDecodeError:
        return Rejected(str(file), number, f"not valid {encoding}")
    return Text(file, number, text, metadata, repaired)
