"""Files whose name gives one format and whose first bytes are of another: JSON Lines in a .txt, CSV in a .json.

They are refused with the key that reads them, since their markup would be read as prose, or their records not at all.
Only what no text of the named format begins with counts: prose, code and odd records are never refused here.
"""

from __future__ import annotations

import io
import re

from corpus.readers.encodings import decode, likely_encoding
from corpus.readers.formats.delimited import agreement, dialect_of
from corpus.readers.formats.header import NAMES
from corpus.readers.plan import suffix_of
from corpus.readers.streams import in_utf8_lines
from corpus.readers.unread import refuse_format, suffix_by_magic
from infra.errors import StageError, stage_error
from infra.io.bounded import opened
from infra.io.json import BadJson, parse_json
from infra.io.sources import Place

SAMPLE_BYTES = 1 << 16
PROSE_SUFFIXES = ("", ".txt", ".text", ".log")
"""Suffixes of texts that hold prose. Files of code and of settings may well be JSON or pages."""
PROSE_FORMATS = ("text", "markdown", "tex", "subtitles", "email", "mhtml", "html")
NAMED = {
    "jsonl": "JSON Lines",
    "csv": "a CSV table",
    "parquet": "a Parquet file",
    "arrow": "an Arrow file",
    "html": "an HTML page",
    "warc": "a WARC archive",
    "text": "text",
}
_MAGIC = {b"PAR1": "parquet", b"ARROW1": "arrow", b"WARC/1.": "warc"}
_PAGE = re.compile(
    rb"\s*(?:<\?xml[^>]{0,200}\?>\s*)?(?:<!--.{0,1000}?-->\s*)?<(?:!doctype html|html)[\s>]", re.I | re.S
)
_XML = re.compile(rb"\s*<\?xml\s")
_JSON_LINE = re.compile(rb'^\s*[\[{"]', re.MULTILINE)
_WORDS = re.compile(rb"[A-Za-z\x80-\xff]{2,} \S+ \S+ \S+")
_BINARY = re.compile(rb"[\x00-\x08\x0e-\x1a]")
_LIST = re.compile(rb'\[\s*\{\s*"[^"\n]{1,200}"\s*:')
_OBJECT = re.compile(rb'\{\s*"[^"\n]{1,200}"\s*:')
_NAME = re.compile(r"[A-Za-z_][\w.-]{0,40}")
_LEAST_ROWS = 3


def refuse_misnamed(file: Place, kind: str, encoding: str, key: str, text_field: str = "", content: str = "") -> None:
    """Raise StageError `misnamed_file` for a file that is not of the format that its name gives.

    Args:
        kind: the format of its name.
        key: the dotted key of its source, which has a `format`; "" for a file without one.
        text_field: the field with the text; an object alone in a file of prose is a record only if it has it.
        content: of the source of a text, `TextOptions.content`; "" for records.
    """
    if kind == "text" and content == "html":  # pages under any name
        kind = "html"
    if suffix := unread_content(file, kind):
        raise refuse_format(file, suffix)
    recognised = content_format(file, kind, encoding, text_field)
    if not recognised or recognised == kind:
        return
    suffix = suffix_of(file)
    expected = f"expected the content of {suffix} files" if suffix else "expected text, as in files without a suffix"
    fix = f"rename the file to match its content, e.g. to end in .{'txt' if recognised == 'text' else recognised}"
    if key and (content or recognised in ("jsonl", "csv", "parquet", "arrow")):
        is_readable = kind in PROSE_FORMATS and recognised in ("jsonl", "csv", "html")
        as_text = ", or text to read it unchanged" if is_readable else ""
        fix = f"set {key}.format: {recognised}{as_text}, in a separate source if other files differ; or {fix}"
    raise stage_error("misnamed_file", str(file), f"{expected}, found {NAMED[recognised]}", fix)


def unread_content(file: Place, kind: str) -> str:
    """The suffix in UNREAD of a table or text that holds what no reader reads; "" for another one."""
    if kind not in ("text", "parquet", "arrow", "jsonl", "csv"):
        return ""
    with opened(file) as raw:
        start = raw.peek(SAMPLE_BYTES)[:SAMPLE_BYTES].removeprefix(b"\xef\xbb\xbf")
    if kind in ("parquet", "arrow", "jsonl", "csv"):
        return suffix_by_magic(start)
    is_prose = suffix_of(file) in PROSE_SUFFIXES
    return ".xml" if is_prose and _XML.match(start) and not _PAGE.match(start) else ""


def content_format(file: Place, kind: str, encoding: str, text_field: str) -> str:
    """The format of a file's first bytes: one of NAMED, or "" where they show none."""
    is_prose = kind in PROSE_FORMATS
    if kind == "text" and suffix_of(file) not in PROSE_SUFFIXES:
        return ""
    with opened(file) as raw:
        start = raw.peek(SAMPLE_BYTES)[:SAMPLE_BYTES]
        if by_magic := next((name for magic, name in _MAGIC.items() if start.startswith(magic)), ""):
            return by_magic
        stream, encoding = in_utf8_lines(raw, encoding)
        likely = likely_encoding(stream, encoding)
        try:
            start = stream.read(SAMPLE_BYTES)
        except StageError as error:
            if error.problems[0].code != "corrupt_file":
                raise
            # Cut or damaged: its reader keeps what is before that
            return ""
    is_whole = len(start) < SAMPLE_BYTES
    start = start.removeprefix(b"\xef\xbb\xbf")
    if _PAGE.match(start):
        return "html"
    # A notebook is an object itself, and its reader puts aside what is none.
    if kind != "notebook" and _is_json(start.lstrip(), is_whole, text_field if is_prose else None):
        return "jsonl"
    if kind == "csv":
        return ""
    try:
        text = decode(start[: start.rfind(b"\n") + 1], encoding, likely=likely)[0]
    except UnicodeDecodeError:
        return ""
    if _is_table(text, file.name):
        return "csv"
    return "text" if kind in ("parquet", "arrow", "jsonl") and _is_text(start, kind) else ""


def _is_json(start: bytes, is_whole: bool, text_field: str | None) -> bool:
    """Return True for records in JSON: objects on lines, one object, or a list of them.

    Args:
        is_whole: whether the file ends there.
        text_field: the field that one object alone must have; None for any.
    """
    if _LIST.match(start):
        return True
    if not _OBJECT.match(start):
        return False
    lines = [line for line in start.splitlines() if line.strip()]
    first = _object(lines[0])
    if first is not None and len(lines) > 1:
        return lines[1].startswith(b"{")
    if not is_whole:  # a record that is longer than the sample
        return len(lines) == 1 and (text_field is None or b'"%s"' % text_field.encode() in start)
    alone = first if first is not None else _object(start)
    return alone is not None and (text_field is None or text_field in alone)


def _is_text(start: bytes, kind: str) -> bool:
    """Return True for words under the name of a format that has none at its beginning, or on no line."""
    if _BINARY.search(start) or _WORDS.search(start[:4096]) is None:
        return False
    return _JSON_LINE.search(start) is None if kind == "jsonl" else not _is_json(start.lstrip(), False, None)


def _object(text: bytes) -> dict[str, object] | None:
    try:
        value = parse_json(text, surrogates=True)
    except BadJson:
        return None
    return value if isinstance(value, dict) else None


def _is_table(text: str, name: str) -> bool:
    """Return True for rows under names of columns, all of one length."""
    if not any(word.strip().lower() in NAMES for word in re.split(r"[,;|\t\"]", text.partition("\n")[0])):
        return False
    dialect = dialect_of(text, name)
    share, columns, rows = agreement(text, dialect)
    if share < 1 or columns < 2 or rows < _LEAST_ROWS:
        return False
    names = next(dialect.reader(iter(io.StringIO(text, newline=""))), [])
    is_named = all(_NAME.fullmatch(field.strip()) for field in names)
    return is_named and any(field.strip().lower() in NAMES for field in names)
