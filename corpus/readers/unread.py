"""Formats that no library here reads well: refused by name, with a program that converts them, so that neither their
markup nor their bytes become prose."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

from infra.errors import StageError, stage_error
from infra.io.sources import Place

PDF_LIBRARY = "pypdfium2"
_PDF = (
    "install the extra `pdf` (`pip install pypdfium2`), with which files named .pdf are read; or convert it, e.g. by "
    "`docling FILE --to md` or pymupdf4llm for its layout, or `pdftotext FILE`"
)
_OFFICE = "convert it, e.g. by `soffice --headless --convert-to docx FILE`"
_BOOK = "convert it, e.g. by `ebook-convert FILE FILE.epub` of Calibre"
_RECORDS = "write its texts as JSON Lines or Parquet"
_SUBTITLES = "convert it, e.g. by `ffmpeg -i FILE FILE.srt`"
_UNPACK = "unpack it into a folder, and name the folder"
_XML = (
    "XML",
    "write its texts as JSON Lines (WikiExtractor does for MediaWiki dumps); `format: html` for XHTML, `format: text` "
    "for the markup itself",
)
POINTER = ".gitlfs"
"""In place of a suffix: files that Git LFS left out of a clone, which have their names alone."""
UNREAD = {
    ".pdf": ("PDF", _PDF),
    ".ps": ("PostScript", "convert it, e.g. by `ps2ascii FILE`"),
    ".djvu": ("DjVu", "convert it, e.g. by `djvutxt FILE`"),
    ".rtf": ("RTF", _OFFICE),
    ".doc": ("Word 97", _OFFICE),
    ".odt": ("OpenDocument", _OFFICE),
    ".ppt": ("PowerPoint", "convert it, e.g. by `docling FILE --to md`"),
    ".pptx": ("PowerPoint", "convert it, e.g. by `docling FILE --to md`"),
    ".xls": ("Excel", "write its sheets as CSV, e.g. by `soffice --headless --convert-to csv FILE`"),
    ".xlsx": ("Excel", "write its sheets as CSV, e.g. by `soffice --headless --convert-to csv FILE`"),
    ".mobi": ("Mobipocket", _BOOK),
    ".azw3": ("Kindle", _BOOK),
    ".fb2": ("FictionBook", _BOOK),
    **dict.fromkeys((".xml", ".svg", ".rss", ".atom", ".opml", ".kml", ".gpx", ".tei", ".tmx", ".xliff"), _XML),
    ".ass": ("SubStation Alpha", _SUBTITLES),
    ".ssa": ("SubStation Alpha", _SUBTITLES),
    ".mbox": ("mailbox", "write each message as an .eml file, e.g. by Python's `mailbox`"),
    ".arc": ("ARC archive", "convert it, e.g. by `warcio recompress FILE FILE.warc.gz`"),
    ".zip": ("ZIP archive", _UNPACK),
    ".tar": ("tar archive", _UNPACK),
    ".tgz": ("tar archive", _UNPACK),
    ".orc": ("ORC", "write it as Parquet, e.g. by pyarrow.orc and pyarrow.parquet"),
    ".avro": ("Avro", "write it as Parquet or JSON Lines"),
    ".pkl": ("pickle", "write its texts as JSON Lines or Parquet, if you trust it: a pickle can run any code"),
    ".pickle": ("pickle", "write its texts as JSON Lines or Parquet, if you trust it: a pickle can run any code"),
    ".sqlite": ("SQLite", "write its rows as CSV, e.g. by `sqlite3 -header -csv FILE 'SELECT …'`"),
    ".msgpack": ("MessagePack", _RECORDS),
    ".npy": ("NumPy", _RECORDS),
    ".npz": ("NumPy", _RECORDS),
    ".h5": ("HDF5", _RECORDS),
    ".hdf5": ("HDF5", _RECORDS),
    ".ods": ("OpenDocument", "write its sheets as CSV, e.g. by `soffice --headless --convert-to csv FILE`"),
    POINTER: ("Git LFS pointer", "download the file that it stands for, e.g. with `git lfs pull` or `hf download`"),
    ".br": ("Brotli", "unpack it by `brotli -d FILE`, or pack it by gzip or zstd"),
    ".lz4": ("LZ4", "unpack it, e.g. by `lz4 -d FILE`, or pack it by gzip or zstd"),
    ".lzma": ("LZMA", "unpack it by `xz --format=lzma -d FILE`, or pack it by xz"),
    ".lz": ("lzip", "unpack it by `lzip -d FILE`, or pack it by xz"),
    ".7z": ("7z archive", _UNPACK),
    ".rar": ("RAR archive", _UNPACK),
}
"""Formats that are refused by name: what they are called, and what to do."""
_BINARY = ("binary", "remove them from the paths, or convert them to text")
MAGIC = {
    b"%PDF-": ".pdf",
    b"{\\rtf": ".rtf",
    b"%!PS": ".ps",
    b"PK\x03\x04": ".zip",
    b"AT&TFORM": ".djvu",
    b"filedesc://": ".arc",
    b"version https://git-lfs.github.com/spec/": POINTER,
}
"""First bytes of files of such formats, whatever their names."""


MAGIC_BYTES = 64
"""Bytes at the start of a file that these are looked for in."""


@cache
def reads_pdf() -> bool:
    """Return True if the extra that reads PDF files is installed."""
    return find_spec(PDF_LIBRARY) is not None


def refuse_format(file: Place, suffix: str) -> StageError:
    """The error for a file of a format in UNREAD."""
    name, fix = UNREAD[suffix]
    article = "an" if name[0] in "AEIORX" or name.startswith(("LZ", "HDF")) else "a"
    description = name if name.endswith("archive") else f"{name} file"
    return stage_error(
        "unread_format", str(file), f"expected text, found {article} {description}, which is not supported", fix
    )


class UnreadFiles(NamedTuple):
    """Files of one format that no reader reads. format: its name, "binary" for what has none in UNREAD."""

    format: str
    files: tuple[Place, ...]
    fix: str

    @property
    def note(self) -> str:
        """Their number and format, and one of them."""
        kind = self.format if self.format.endswith("archive") else f"{self.format} file"
        return f"{len(self.files):,} {kind}{'s' if len(self.files) > 1 else ''}, e.g. {self.files[0]}"


def by_unread_format(files: Iterable[tuple[Place, str]]) -> list[UnreadFiles]:
    """Files that no reader reads by their formats.

    Args:
        files: each with its suffix in UNREAD, or with "" for a binary file of another format.
    """
    groups: dict[tuple[str, str], list[Place]] = {}
    for file, suffix in files:
        groups.setdefault(UNREAD.get(suffix, _BINARY), []).append(file)
    return [UnreadFiles(name, tuple(group), fix) for (name, fix), group in groups.items()]


def refuse_by_magic(start: bytes, file: Place) -> None:
    """Raise StageError `unread_format` for a file that opens as one of a format in UNREAD."""
    if suffix := suffix_by_magic(start):
        raise refuse_format(file, suffix)


def named_by_magic(start: bytes | str) -> str:
    """The name of the format in UNREAD that a record's content opens as; "" for text."""
    suffix = suffix_by_magic(start.encode("utf-8", "replace") if isinstance(start, str) else start)
    return UNREAD[suffix][0] if suffix else ""


def suffix_by_magic(start: bytes) -> str:
    """The suffix in UNREAD of what a file opens as; "" for none of them."""
    return next((suffix for magic, suffix in MAGIC.items() if start.startswith(magic)), "")
