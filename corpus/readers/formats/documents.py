"""Texts of files that are one document each: EPUB, DOCX, PDF, notebooks, subtitles, web archives, e-mails,
LaTeX, Markdown.

Python's own zipfile, html.parser, email and ElementTree read them, and PDFium PDF files.
"""

from __future__ import annotations

import io
import lzma
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from html import unescape
from html.parser import HTMLParser
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

from corpus.documents.quarantine import EMPTY, Rejected
from corpus.readers.encodings import decode, web_name
from corpus.readers.formats.formulas import raised, with_formulas
from corpus.readers.formats.json_lines import wrong_encoding
from corpus.readers.formats.latex import latex_text
from corpus.readers.formats.mail import mail_text, parsed
from corpus.readers.formats.pdf import pdf_text
from corpus.readers.formats.web import main_text
from corpus.readers.record import Text, Unreadable, too_long
from corpus.readers.streams import refuse_binary
from corpus.readers.unread import MAGIC_BYTES, reads_pdf, refuse_by_magic, refuse_format
from infra.errors import stage_error
from infra.io.bounded import opened
from infra.io.json import BadJson, parse_json
from infra.io.sources import Place

MAX_ARCHIVE_BYTES = 512_000_000
"""Size of an EPUB, DOCX or PDF file, most of which may be pictures."""


def read_document(file: Place, kind: str, encoding: str, max_bytes: int) -> Iterator[Text | Rejected]:
    """The text of a file of one of the DOCUMENT_FORMATS.

    Raises:
        StageError: `missing_source`, `corrupt_file`, `binary_source`, `wrong_encoding`, `unread_format`.
    """
    if kind == "pdf" and not reads_pdf():
        raise refuse_format(file, ".pdf")
    is_archive = kind in _ARCHIVES
    limit = MAX_ARCHIVE_BYTES if is_archive else 4 * max_bytes
    with opened(file) as stream:
        if not is_archive:
            refuse_by_magic(stream.peek(MAGIC_BYTES)[:MAGIC_BYTES], file)
            refuse_binary(stream, file, encoding)
        content = stream.read(limit + 1)
    if len(content) > limit:
        yield Rejected(str(file), 0, too_long(limit, "the file"))
        return
    try:
        if is_archive:
            text, repaired = _ARCHIVES[kind](content, max_bytes), False
        else:
            text, repaired = decode(content, encoding)
            text = _TEXTS[kind](text.replace("\r\n", "\n").replace("\r", "\n"))
    except RecursionError:
        yield Rejected(str(file), 0, "nested too deep")
        return
    except UnicodeDecodeError:
        raise wrong_encoding(file, encoding) from None
    except zipfile.BadZipFile as error:
        message = f"not a complete {kind.upper()} file: {error}"
        raise stage_error("corrupt_file", str(file), message, "download it again") from None
    except Unreadable as error:
        yield Rejected(str(file), 0, str(error))
        return
    if len(text) > max_bytes:
        yield Rejected(str(file), 0, too_long(max_bytes, "its text; cut it by cut_characters"))
    elif text.strip():
        yield Text(file, 1, text.strip(), {}, repaired)
    else:
        yield Rejected(str(file), 0, EMPTY)


def notebook_text(text: str) -> str:
    """Cells of a Jupyter notebook in order: prose unchanged, code between fences. Outputs are left out."""
    try:
        notebook = parse_json(text, expected="a notebook", nan=True)
    except BadJson as error:
        raise Unreadable(f"not a readable notebook: {error}") from None
    notebook = notebook if isinstance(notebook, dict) else {}
    sheets = notebook.get("worksheets")  # before version 4 of the format
    parts_of_cells = [notebook] if sheets is None else sheets
    try:
        cells = [cell for part in parts_of_cells for cell in part["cells"]]
        sources = [_source(cell) for cell in cells]
    except (TypeError, KeyError, AttributeError):
        raise Unreadable("not a notebook: it has no cells, or cells of an unknown form") from None
    language = _language(notebook.get("metadata"))
    parts = []
    for cell, source in zip(cells, sources, strict=True):
        if not source.strip():
            continue
        is_code = cell.get("cell_type") == "code"
        parts.append(f"```{language}\n{source.strip()}\n```" if is_code else source.strip())
    return "\n\n".join(parts)


def _source(cell: Mapping[str, Any]) -> str:
    """Text of a notebook's cell. Raises TypeError or AttributeError for a cell of an unknown form."""
    source = cell.get("source", cell.get("input", ""))
    return source if isinstance(source, str) else "".join(source)


def _language(metadata: Any) -> str:
    for key, name in (("kernelspec", "language"), ("language_info", "name")):
        group = metadata.get(key) if isinstance(metadata, dict) else None
        if isinstance(group, dict) and group.get(name):
            return str(group[name])
    return ""


def epub_text(content: bytes, max_bytes: int) -> str:
    """Chapters of an EPUB book in reading order."""
    with _opened(content) as archive:
        parts = [page_text(_member(archive, name, max_bytes)) for name in _chapters(archive, max_bytes)]
    return "\n\n".join(filter(None, parts))


def _chapters(archive: zipfile.ZipFile, max_bytes: int) -> list[str]:
    """Names of the pages: those of the book's spine, or all by name where it names none."""
    names = archive.namelist()
    pages = [name for name in names if name.lower().endswith((".xhtml", ".html", ".htm"))]
    if "META-INF/encryption.xml" in names and b"EncryptedData" in _member(
        archive, "META-INF/encryption.xml", max_bytes
    ):
        raise Unreadable("an encrypted EPUB file")
    package = next((name for name in names if name.lower().endswith(".opf")), None)
    if package is None:
        return pages
    root = _xml(_member(archive, package, max_bytes), package)
    hrefs = {item.get("id"): item.get("href", "") for item in root.iter() if _local(item) == "item"}
    folder = PurePosixPath(package).parent
    spine = [hrefs.get(node.get("idref"), "") for node in root.iter() if _local(node) == "itemref"]
    paths = [str(folder / unquote(href)) for href in spine if href]
    return [name for name in paths if name in names] or pages


def docx_text(content: bytes, max_bytes: int) -> str:
    """Paragraphs of a Word document in order, cells of a table row with tabs between. Deleted text is left out."""
    with _opened(content) as archive:
        if "word/document.xml" not in archive.namelist():
            raise Unreadable("not a Word document: it has no word/document.xml")
        root = _xml(_member(archive, "word/document.xml", max_bytes), "word/document.xml")
    lines: list[str] = []
    _word_blocks(root, lines)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def _word_blocks(element: ElementTree.Element, lines: list[str]) -> None:
    for child in element:
        match _local(child):
            case "p":
                lines += [_word_run(child), ""]
            case "tr":
                cells: list[str] = []
                for cell in (node for node in child if _local(node) == "tc"):
                    cell_lines: list[str] = []
                    _word_blocks(cell, cell_lines)
                    cells.append(" ".join(filter(None, cell_lines)))
                lines.append("\t".join(cells))
            case _:
                _word_blocks(child, lines)


_UNBOUND_PREFIX = 27
"""expat's XML_ERROR_UNBOUND_PREFIX."""
_RAISED = {"superscript": "sup", "subscript": "sub"}


def _word_run(element: ElementTree.Element) -> str:
    """Text of a paragraph, with raised and lowered signs as such."""
    parts = []
    for child in element:
        match _local(child):
            case "t":
                parts.append(child.text or "")
            case "tab":
                parts.append("\t")
            case "br" | "cr":
                parts.append("\n")
            case "noBreakHyphen":
                parts.append("\u2011")
            case "del" | "moveFrom" | "instrText" | "pPr" | "Fallback":  # what has moved is where it went to
                continue
            case "r":
                text = _word_run(child)
                align = next((node for node in child.iter() if _local(node) == "vertAlign"), None)
                kind = _RAISED.get(next(iter(align.attrib.values()), ""), "") if align is not None else ""
                parts.append(raised(text, kind) if kind and text.strip() else text)
            case _:
                parts.append(_word_run(child))
    return "".join(parts)


def subtitle_text(text: str) -> str:
    """Lines of SubRip and WebVTT subtitles, without numbers, times and styles; the lines of one cue are joined."""
    cues: list[str] = []
    for block in re.split(r"\n\s*\n", text.removeprefix("\ufeff")):
        lines = block.strip().split("\n")
        timing_index = next((number for number, line in enumerate(lines) if "-->" in line), None)
        if timing_index is None:
            continue  # WEBVTT, NOTE, STYLE, REGION
        cue = " ".join(line.strip() for line in lines[timing_index + 1 :])
        cue = re.sub(r"<[^>]*>|\{\\[^}]*\}", "", cue).strip()
        if cue and (not cues or cues[-1] != cue):
            cues.append(cue)
    return unescape("\n".join(cues))


def mhtml_text(text: str) -> str:
    """Main text of the page that a browser saved with its pictures and styles."""
    with parsed(text, "saved web page") as message:
        for part in message.walk():
            if part.get_content_type() in ("text/html", "application/xhtml+xml"):
                content = part.get_payload(decode=True)
                if isinstance(content, bytes):
                    page, _ = decode(content, "auto", web_name(part.get_content_charset() or ""))
                    return main_text(page)
    raise Unreadable("not a saved web page: none of its parts is HTML")


def markdown_text(text: str) -> str:
    """Return Markdown unchanged, without the metadata before it: models are to read and write it."""
    return re.sub(r"\A---\n.*?\n---\n", "", text.removeprefix("\ufeff"), count=1, flags=re.DOTALL)


class _Blocks(HTMLParser):
    """Text of a page: a paragraph for each block, everything but scripts, styles and the head."""

    BLOCKS = frozenset(
        {
            "p", "div", "section", "article", "h1", "h2", "h3", "h4", "h5", "h6", "li", "ul", "ol", "dl", "dt", "dd",
            "blockquote", "pre", "table", "tr", "figure", "figcaption", "hr", "aside", "header", "footer", "body",
        }
    )  # fmt: skip
    HIDDEN = frozenset({"script", "style", "head", "template", "rt", "rp"})

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._hidden = 0
        self._pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in self.HIDDEN
        self._pre += tag == "pre"
        if tag in self.BLOCKS:
            self.parts.append("\n\n")
        elif tag == "br":
            self.parts.append("\n")
        elif tag in ("td", "th"):
            self.parts.append("\t")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.HIDDEN:
            self.handle_starttag(tag, attrs)
            self._pre -= tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        self._hidden = max(0, self._hidden - (tag in self.HIDDEN))
        self._pre = max(0, self._pre - (tag == "pre"))
        if tag in self.BLOCKS:
            self.parts.append("\n\n")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.parts.append(data if self._pre else re.sub(r"\s+", " ", data))


def page_text(content: bytes) -> str:
    """All text of an XHTML page of a book, in paragraphs."""
    declared = re.search(rb"""encoding=["']([\w.-]+)["']""", content[:200])
    text, _ = decode(content, "auto", web_name(declared[1].decode("ascii")) if declared else "")
    parser = _Blocks()
    parser.feed(with_formulas(text))
    parser.close()
    lines = "".join(parser.parts)
    return re.sub(r"\n[ \n]*\n", "\n\n", re.sub(r" *\n *(?=\S)", "\n", lines)).strip()


_DAMAGED_ARCHIVE = (
    *(EOFError, NotImplementedError, ValueError, OSError, LookupError, OverflowError),
    *(struct.error, zlib.error, lzma.LZMAError),
)
"""Exceptions of zipfile, besides its own, for a file that is none or is damaged."""


@contextmanager
def _opened(content: bytes) -> Iterator[zipfile.ZipFile]:
    """A ZIP archive. Raises BadZipFile, whatever zipfile makes of a damaged one."""
    try:
        archive = zipfile.ZipFile(io.BytesIO(content))
    except _DAMAGED_ARCHIVE as error:
        raise zipfile.BadZipFile(str(error)) from None
    with archive:
        yield archive


def _member(archive: zipfile.ZipFile, name: str, max_bytes: int) -> bytes:
    """Raise Unreadable where a file in the archive is larger than a text may be: a small one may hold gigabytes."""
    limit = 4 * max_bytes
    try:
        with archive.open(name) as file:
            content = file.read(limit + 1)
    except _DAMAGED_ARCHIVE as error:
        raise zipfile.BadZipFile(f"{name} in it: {error}") from None
    except RuntimeError:  # a password
        raise Unreadable("an encrypted archive") from None
    if len(content) > limit:
        raise Unreadable(too_long(limit, f"{name} in it"))
    return content


def _xml(content: bytes, name: str) -> ElementTree.Element:
    # Entities that contain each other could fill the memory; neither Word nor a book's package has any.
    if re.search(rb"<!(DOCTYPE|ENTITY)", content, re.IGNORECASE):
        raise Unreadable(f"{name} in it has a document type, which is not supported")
    try:
        return ElementTree.fromstring(content)
    except ElementTree.ParseError as error:
        if error.code != _UNBOUND_PREFIX:
            raise Unreadable(f"{name} in it is not readable XML: {error}") from None
    except ValueError as error:
        raise Unreadable(f"{name} in it is not readable XML: {error}") from None
    # Some programs leave the declaration of prefixes out, which Word does not miss.
    tags = b" ".join(re.findall(rb"<[^<>]*>", content))
    prefixes = set(re.findall(rb"[<\s]/?([A-Za-z_][\w.-]*):\w", tags)) - set(re.findall(rb"xmlns:([\w.-]+)", tags))
    declared = b" ".join(b'xmlns:%s="%s"' % (prefix, prefix) for prefix in sorted(prefixes - {b"xml", b"xmlns"}))
    content = b"<all %s>%s</all>" % (declared, re.sub(rb"^\s*<\?xml.*?\?>", b"", content, flags=re.DOTALL))
    try:
        return ElementTree.fromstring(content)
    except (ElementTree.ParseError, ValueError) as error:
        raise Unreadable(f"{name} in it is not readable XML: {error}") from None


def _local(element: ElementTree.Element) -> str:
    return str(element.tag).rpartition("}")[2]


_ARCHIVES: dict[str, Callable[[bytes, int], str]] = {"epub": epub_text, "docx": docx_text, "pdf": pdf_text}
_TEXTS: dict[str, Callable[[str], str]] = {
    "notebook": notebook_text,
    "subtitles": subtitle_text,
    "mhtml": mhtml_text,
    "email": mail_text,
    "tex": latex_text,
    "markdown": markdown_text,
}
DOCUMENT_FORMATS = frozenset({*_ARCHIVES, *_TEXTS})
