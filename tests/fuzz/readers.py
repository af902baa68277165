"""Targets: each reader of a corpus, and the records of pairs. All that a file has must be among what comes out."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy, composite

from corpus.documents.quarantine import Rejected
from corpus.instructions import file_pairs as instruction_pairs
from corpus.pairs.files import Pair
from corpus.preferences import file_pairs as preference_pairs
from corpus.readers.config import FileDocuments, FileInstructions, FilePreferences
from corpus.readers.plan import partitions_of
from corpus.readers.texts import read_texts
from tests.fuzz import damage
from tests.fuzz.harness import Target, Violation


class File(NamedTuple):
    """A file of a corpus, and the options of the source that it is in."""

    name: str
    content: bytes
    options: dict[str, Any]


OPTIONS: dict[str, tuple[Any, ...]] = {
    "encoding": ("auto", "utf-8", "latin-1", "utf-16", "shift_jis", "cp037", "utf-7", "ascii", "utf-8-sig"),
    "header": ("auto", "first_row", "none"),
    "text_field": ("text", "page.body", "column_1", "a"),
    "metadata_fields": ((), ("a", "page.body", "url"), ("a.b.c",)),
    "content": ("plain", "html", "email"),
    "text_unit": ("file", "paragraph", "line"),
    "cut_characters": (None, 100),
    "max_document_mb": (20, 0.0001, 1),
    "error_pages": ("skip", "read"),
    "broken_files": ("stop", "quarantine"),
}


@composite
def files(draw: DrawFn, suffix: str, contents: SearchStrategy[bytes]) -> File:
    content, packing = draw(damage.packed(draw(contents)))
    options = {}
    for key in draw(st.lists(st.sampled_from(sorted(OPTIONS)), max_size=2, unique=True)):
        options[key] = draw(st.sampled_from(OPTIONS[key]))
    return File(f"a{suffix}{packing}", content, options)


def write(folder: Path, file: File) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / file.name
    path.write_bytes(file.content)
    return path


def check_texts(file: File, folder: Path) -> int:
    path = write(folder, file)
    try:
        source = FileDocuments.model_validate({"paths": [str(path)], **file.options})
        lines, items = set[int](), 0
        for pieces in partitions_of(source, source.places()):
            for piece in pieces:
                for item in read_texts(source, piece, "ingest.read.0"):
                    items += 1
                    lines.add(item.line)
                    if isinstance(item, Rejected):
                        if not item.reason:
                            raise Violation("put aside without a reason")
                        item.as_line(piece=0).encode()
                        continue
                    item.text.encode()
                    if item.metadata is not None:
                        json.dumps(item.metadata, default=str)
        if not items and file.content.strip():
            raise Violation(f"nothing came out of a file of {len(file.content)} bytes")
        if path.suffix in (".jsonl", ".json"):
            _check_lines(file, source.encoding, lines)
        return items
    finally:
        path.unlink(missing_ok=True)


def _check_lines(file: File, encoding: str, lines: set[int]) -> None:
    """Each line of JSON that has anything must have come out; other forms of files number objects, not lines."""
    start = file.content.removeprefix(b"\xef\xbb\xbf").lstrip()
    if encoding not in ("auto", "utf-8", "latin-1") or start[:1] == b"[" or re.match(rb"\{[ \t]*\r?\n", start):
        return
    if b"\0" in file.content or lines == {0} or file.content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return
    expected = {number for number, line in enumerate(file.content.split(b"\n"), 1) if line.strip()}
    expected -= {1} if file.content.split(b"\n")[0].removeprefix(b"\xef\xbb\xbf").strip() == b"" else set()
    if missing := expected - lines:
        raise Violation(f"lines unaccounted for: {sorted(missing)[:5]}")


ROWS = [
    {"text": "The mill stood by the river.", "a": 1, "page": {"body": "In it a miller lived."}, "url": "http://a/"},
    {"text": "A second, longer text.\nWith a line.", "a": ["x"], "page": None},
    {"text": "<html><body><p>Hello there &amp; all</p></body></html>"},
    {"text": "From: a@b.example\nSubject: Pears\nContent-Type: text/plain; charset=utf-8\n\nThey are ripe."},
]
TABLE = [["text", "a"], ["The mill stood by the river.", "1"], ['He said "no", twice.', "2"], ["line\nbreak", "x"]]
PROSE = [
    b"The mill stood by the river.\n\nIn it, a miller lived.\nHe was old.\n",
    "Überall standen Bäume – große, alte. «Ça va?» 日本語のテキスト。\n".encode(),
    b"a\n\n\n\nb\r\n\r\nc",
]
PAGE = (
    b"<!DOCTYPE html><html><head><meta "
    b"charset='utf-8'><title>Mills</title></head><body><nav>Home</nav><article><h1>Mills</h1>"
    b"<p>The mill stood by the river, and it was old. There the miller lived with his three "
    b"sons.</p><ul><li>One<li>Two</ul>"
    b"<table><tr><td>a<td>b</table><pre>x = 1</pre><math><mi>x</mi></math><!-- c "
    b"--><script>x()</script></article></body></html>"
)
SRT = (
    b"1\r\n00:00:01,000 --> 00:00:02,000\r\n<i>Who is\r\nthere?</i>\r\n\r\n2\r\n00:00:03,000 --> "
    b"00:00:04,000\r\n{\\an8}Me.\r\n"
)
VTT = (
    b"WEBVTT\n\nNOTE by hand\n\nSTYLE\n::cue {color: red}\n\nintro\n00:01.000 --> 00:02.000 align:start\n<v Ann>Tom "
    b"&amp; I</v>\n"
)
TEX = rb"""\documentclass{article}
\newcommand{\ie}{\emph{i.e.}} \def\R{\mathbb{R}} \newcommand{\two}[2][x]{#1 and #2}
\title{On \textbf{pumps}}
\begin{document}
\maketitle \section*{Introduction}\label{sec:intro}
Caf\'e, na\"{\i}ve: ``both'' valves leak---see \cite{ann,bob} and $x^2 \in \R$. \two{y} \ie % note
\begin{itemize}\item One \item[b] Two\end{itemize}
\begin{tabular}{ll} a & b \\ c & d \end{tabular} \[ E = mc^2 \] \verb|x| \input{other}
\begin{verbatim}
raw
\end{verbatim}
\end{document}
"""
MARKDOWN = (
    b"---\ntitle: One\ntags: [a, b]\n---\n# One\n\n- a *b*\n\n```python\nx = 1\n```\n\n| a | b |\n|---|---|\n| 1 | "
    b"2 |\n<div>x</div>\n"
)
MAIL = (
    b"From: =?utf-8?q?Ann=C3=A9?= <a@b.example>\r\nReceived: by x\r\nSubject: "
    b"=?iso-8859-1?B?UGVhcnM=?=\r\nMIME-Version: 1.0\r\n"
    b'Content-Type: multipart/alternative; boundary="b"\r\n\r\n--b\r\nContent-Type: text/plain; charset=utf-8\r\n'
    b"Content-Transfer-Encoding: quoted-printable\r\n\r\nThey are ripe=2E =E2=82=AC\r\n--b\r\nContent-Type: "
    b"text/html\r\n"
    b"Content-Transfer-Encoding: base64\r\n\r\nPHA+VGhleSBhcmU8L3A+\r\n--b--\r\n"
)
MHTML = (
    b'MIME-Version: 1.0\nContent-Type: multipart/related; boundary="b"\n\n--b\nContent-Type: text/html; charset=utf-8\n'
    b"Content-Transfer-Encoding: quoted-printable\n\n<html><body><p>The pump has two valves, and "
    b"=E2=80=9Cboth=E2=80=9D of them "
    b"leak.</p></body></html>\n--b\nContent-Type: text/css\n\np {color: red}\n--b--\n"
)
NOTEBOOK = {
    "cells": [
        {"cell_type": "markdown", "source": ["# A pump\n", "It has two valves."], "metadata": {}},
        {"cell_type": "code", "source": "print(1)", "outputs": [{"data": {"image/png": "iVBORw0KGgo"}}]},
        {"cell_type": "raw", "source": []},
    ],
    "metadata": {"kernelspec": {"language": "python"}, "language_info": {"name": "python"}},
    "nbformat": 4,
}
NOTEBOOK_3 = {"worksheets": [{"cells": [{"cell_type": "code", "input": "x", "language": "python"}]}], "nbformat": 3}
EPUB = {
    "mimetype": b"application/epub+zip",
    "META-INF/container.xml": b'<?xml version="1.0"?><container><rootfiles><rootfile '
    b'full-path="OEBPS/content.opf"/></rootfiles></container>',
    "OEBPS/content.opf": b"<package><manifest><item id='a' href='a%20one.xhtml'/><item id='b' "
    b"href='text/b.xhtml'/></manifest>"
    b"<spine><itemref idref='b'/><itemref idref='a'/></spine></package>",
    "OEBPS/a one.xhtml": b"<?xml version='1.0'?><html><body><h1>Second</h1><p>Two words, "
    b"10<sup>2</sup>.</p></body></html>",
    "OEBPS/text/b.xhtml": (
        "<?xml version='1.0' encoding='utf-8'?><html><body><h1>First</h1><p>Café</p></body></html>".encode()
    ),
}
DOCX = {
    "word/document.xml": b'<?xml version="1.0"?><w:document '
    b'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main">'
    b"<w:body><w:p><w:r><w:t>Ten is 10</w:t></w:r><w:r><w:rPr><w:vertAlign "
    b"w:val='superscript'/></w:rPr><w:t>2</w:t></w:r></w:p>"
    b"<w:tbl><w:tr><w:tc><w:p><w:r><w:t>a</w:t></w:r></w:p></w:tc></w:tr></w:tbl><w:p><w:del><w:r><w:delText>x</w:delText></w:r>"
    b"</w:del></w:p></w:body></w:document>",
    "[Content_Types].xml": b"<Types/>",
}


def _warc(kind: str, uri: str, content: bytes, http: str = "") -> bytes:
    if http:
        content = (
            f"HTTP/1.1 200 OK\r\nContent-Type: {http}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content
        )
    head = (
        f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: {uri}\r\nWARC-Date: 2026-01-01T00:00:00Z\r\n"
        f"WARC-Record-ID: <urn:uuid:00000000-0000-0000-0000-000000000001>\r\n"
        f"Content-Type: {'application/http; msgtype=response' if http else 'text/plain'}\r\nContent-Length: "
        f"{len(content)}\r\n\r\n"
    )
    return head.encode() + content + b"\r\n\r\n"


_CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nTransfer-Encoding: "
    b"chunked\r\n\r\n5\r\n<p>He\r\n8\r\nllo.</p>\r\n0\r\n\r\n"
)
WARCS = [
    _warc("warcinfo", "", b"software: x\r\n") + _warc("response", "http://a/", PAGE, "text/html; charset=utf-8"),
    _warc("conversion", "http://b/", b"Plain text of a page that is long enough.") * 2,
    _warc("response", "http://c/", _CHUNKED)
    + _warc("resource", "http://d/", PAGE)
    + _warc("request", "http://e/", b"GET /"),
]
WARC_TOKENS = (
    *damage.TOKENS, b"Content-Length: -1\r\n", b"Content-Length: 99999999999\r\n", b"Content-Encoding: gzip\r\n",
    b"WARC/1.0\r\n",
    b"Content-Encoding: br\r\n", b"Transfer-Encoding: chunked\r\n", b"HTTP/1.1 999\r\n", b"ffffffffffffffffff\r\n",
    b"\r\n\r\n",
    b"Content-Type: text/html; charset=utf-16\r\n", b"Content-Encoding: zstd\r\n",
)  # fmt: skip
HTML_TOKENS = (
    *damage.TOKENS, b"<p>", b"</p>", b"<div>" * 300, b"<table><tr><td>", b"<meta charset=utf-16>", b"<!--",
    b"<![CDATA[", b"<?xml ?>",
    b"<meta charset=x-unknown>", b"&#xD800;", b"&#x110000;", b"&nbsp;", b"<math>", b"<svg>", b"<script>",
    b"<plaintext>", b"<b a='",
    b"<!DOCTYPE a [<!ENTITY b 'c'>]>", b"&b;", b"<a href='javascript:x'>", b"</html>", b"<body>", b"<pre>",
    b"<template>", b"<frameset>",
)  # fmt: skip
TEX_TOKENS = (
    *damage.TOKENS, b"\\newcommand{\\a}{\\a\\a}", b"\\a", b"\\def\\b#1{#1#1}", b"\\b{\\b{x}}", b"\\begin{a}",
    b"\\end{document}", b"\\item",
    b"$$", b"$", b"\\[", b"\\verb", b"{" * 200, b"\\input{a}", b"\\newcommand", b"[", b"#9", b"\\left(", b"\\frac",
    b"^", b"_", b"\\\\",
    b"\\renewcommand{\\emph}{\\emph}", b"\\let\\c\\c", b"\\csname", b"%\n", b"\\'", b"\\char\"FFFFFF",
    b"\\symbol{99999999}",
)  # fmt: skip
MAIL_TOKENS = (
    *damage.TOKENS, b"Content-Type: multipart/mixed; boundary=b\r\n",
    b"Content-Type: text/plain; charset=x-unknown\r\n", b"--b\r\n",
    b"--b--", b"=?utf-8?q?=FF?=", b"=?utf-8?b?_?=", b"=?x?q?a?=", b"=ZZ", b"=\r\n",
    b"Content-Transfer-Encoding: base64\r\n", b"boundary=",
    b"Content-Transfer-Encoding: uuencode\r\n", b"begin 644 a\n", b"Content-Type: message/rfc822\r\n\r\n",
    b"Subject: ", b"; charset*0=a",
    b"Content-Disposition: attachment\r\n", b"charset*=utf-8''%FF", b"charset=\"utf\0\"",
    b"Content-Type: text/plain; charset=rot13\r\n",
    b"Content-Type: text/plain; charset=idna\r\n", b"Content-Type: text/plain; charset=hex\r\n",
)  # fmt: skip
SUBTITLE_TOKENS = (
    *damage.TOKENS,
    b" --> ",
    b"00:00:99,999 --> 1",
    b"WEBVTT\n",
    b"NOTE",
    b"{\\an8}",
    b"<c.a>",
    b"\n\n1\n",
)


def _columns(draw: DrawFn) -> dict[str, Any]:
    """Columns of a table in any type of Arrow."""
    import pyarrow as pa

    rows = draw(st.integers(0, 4))
    kinds: tuple[tuple[Any, tuple[Any, ...]], ...] = (
        (pa.string(), ("The mill stood.", "", "é", None, "\0", "x" * 3_000)),
        (pa.large_string(), ("The mill", None, "日本")),
        (pa.binary(), (b"bytes", b"\xff\xfe", b"\xed\xa0\x80", None)),
        (pa.int64(), (1, None, 2**63 - 1)),
        (pa.float64(), (0.5, float("nan"), float("inf"), None)),
        (pa.bool_(), (True, None)),
        (pa.timestamp("ns", "UTC"), (datetime(2026, 1, 1), None)),
        (pa.timestamp("s"), (datetime(2026, 1, 1), datetime(9999, 12, 31), None)),
        (pa.date32(), (date(2026, 1, 1), None)),
        (pa.decimal128(10, 2), (Decimal("1.50"), None)),
        (pa.list_(pa.string()), (["a", None], [], None)),
        (pa.struct([("body", pa.string()), ("n", pa.int8())]), ({"body": "In it a miller lived.", "n": 1}, None)),
        (pa.map_(pa.string(), pa.int32()), ([("a", 1)], [], None)),
        (pa.dictionary(pa.int8(), pa.string()), ("a", "b", None)),
        (pa.null(), (None,)),
        (pa.duration("ms"), (1, None)),
        (pa.list_(pa.float16(), 2), (None, [1.0, 2.0])),
    )
    columns = {}
    names = ("text", *draw(st.lists(st.sampled_from(("a", "page", "url", "text.x", "é", "")), max_size=3, unique=True)))
    for name in names:
        kind, values = kinds[0] if name == "text" and draw(st.integers(0, 2)) else draw(st.sampled_from(kinds))
        cells = [draw(st.sampled_from(values)) for _ in range(rows)]
        if name == "text" and kind == pa.binary() and draw(st.booleans()):
            columns[name] = pa.array(cells, pa.binary()).view(pa.string())  # text that is no UTF-8
        else:
            columns[name] = pa.array(cells, kind)
    return columns


@composite
def parquet_files(draw: DrawFn) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = io.BytesIO()
    packing = draw(st.sampled_from(("snappy", "none", "gzip", "zstd", "brotli", "lz4")))
    try:
        pq.write_table(
            pa.table(_columns(draw)),
            file,
            compression=packing,
            row_group_size=draw(st.sampled_from((1, 2, 100))),
            data_page_version=draw(st.sampled_from(("1.0", "2.0"))),
            use_dictionary=draw(st.booleans()),
        )
    except (pa.ArrowException, NotImplementedError):
        return b"PAR1"
    return draw(damage.damaged(file.getvalue(), draw(st.sampled_from((0, 0, 1, 2)))))


@composite
def arrow_files(draw: DrawFn) -> bytes:
    import pyarrow as pa

    file, table = io.BytesIO(), pa.table(_columns(draw))
    packing = draw(st.sampled_from((None, "lz4", "zstd")))
    write = draw(st.sampled_from((pa.ipc.new_file, pa.ipc.new_stream)))
    with write(file, table.schema, options=pa.ipc.IpcWriteOptions(compression=packing)) as writer:
        writer.write_table(table, max_chunksize=2)
    return draw(damage.damaged(file.getvalue(), draw(st.sampled_from((0, 0, 1, 2)))))


TURNS = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
INSTRUCTIONS = [
    {"instruction": "Add.", "input": "1 and 2", "output": "3", "system": "Be brief.", "history": [["a", "b"]]},
    {"prompt": "Who?", "response": "Me.", "answer": "3", "unit_tests": ["assert f(1) == 2"], "weight": 2},
    {"conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Me."}], "system": "Be brief."},
    {"messages": [{"role": "system", "content": "S"}, *TURNS, {"role": "user", "content": [{"type": "text",
    "text": "x"}]}, TURNS[1]]},
    {
        "messages": [
            TURNS[0],
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "2", "tool_call_id": "c"},
            TURNS[1],
        ],
        "tools": [TOOL],
    },
]  # fmt: skip
PREFERENCES = [
    {"prompt": "Who?", "chosen": "Me.", "rejected": "You.", "votes": [3, 1], "margin": 0.5, "annotator": "ann"},
    {"prompt": "Who?", "chosen": [*TURNS], "rejected": [TURNS[0], {"role": "assistant", "content": "No."}]},
    {"chosen": "\n\nHuman: Who?\n\nAssistant: Me.", "rejected": "\n\nHuman: Who?\n\nAssistant: You."},
    {"prompt": "Who?", "answers": ["a", "b", "c"], "ranks": [1, 2, 3], "scores": [3, 2, 1]},
    {"prompt": "Who?", "completions": [{"text": "a", "score": 1}, {"text": "b", "score": 2}], "annotator": 3},
    {"conversations": [{"from": "human", "value": "Q"}], "chosen": {"from": "gpt", "value": "a"},
    "rejected": {"from": "gpt", "value": "b"}},
    {
        "prompt": [TURNS[0]],
        "chosen": [{"role": "assistant", "content": None, "tool_calls": [CALL]}],
        "rejected": [{"role": "assistant", "content": "No."}],
        "tools": [TOOL],
    },
]  # fmt: skip
INSTRUCTION_OPTIONS: tuple[dict[str, Any], ...] = (
    {}, {"trim_conversations": True}, {"prompt_field": "prompt", "response_field": "response"}, {"input_field": None},
    {"limit": 2},
    {"verify": "exact"}, {"verify": "number"}, {"verify": "json"}, {"verify": "words:1-3"}, {"verify": "format:^a+$"},
    {"verify": "exact", "reference_field": "answer"}, {"encoding": "latin-1"}, {"verify": "tests",
    "reference_field": "unit_tests"},
    {"templates": [{"prompt": "Q: {instruction}", "answer": "{output}"}]}, {"weight": 2.0},
)  # fmt: skip
PREFERENCE_OPTIONS: tuple[dict[str, Any], ...] = (
    {}, {"trim_conversations": True}, {"votes_field": "votes"}, {"margin_field": "margin"},
    {"annotator_field": "annotator"},
    {"dialogue": True}, {"limit": 2}, {"input_field": None}, {"votes_field": "votes", "annotator_field": "annotator"},
)  # fmt: skip


@composite
def pair_files(draw: DrawFn, rows: list[Any], options: tuple[dict[str, Any], ...]) -> File:
    if draw(st.integers(0, 5)):
        suffix, content = ".jsonl", draw(damage.line_files(rows))
    else:
        names = draw(
            st.lists(st.sampled_from(sorted({key for row in rows for key in row})), min_size=1, max_size=4, unique=True)
        )
        table = [names, *([_cell(row.get(name)) for name in names] for row in rows)]
        suffix, content = ".csv", draw(damage.tables(table))
    content, packing = draw(damage.packed(content))
    return File(f"a{suffix}{packing}", content, draw(st.sampled_from(options)))


def _cell(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def _check_pairs(kind: Any, read: Callable[..., Iterable[Pair | Rejected]]) -> Callable[[File, Path], object]:
    def check(file: File, folder: Path) -> None:
        path = write(folder, file)
        try:
            try:
                source = kind.model_validate({"paths": [str(path)], **file.options})
            except ValueError as error:
                raise AssertionError(f"the target's options are wrong: {error}") from None
            lines, items = set[int](), 0
            for item in read(source, source.places(), "read.0"):
                items += 1
                if isinstance(item, Rejected):
                    if not item.reason:
                        raise Violation("put aside without a reason")
                    lines.add(item.line)
                    item.as_line(piece=0).encode()
                    continue
                line = json.loads(item.as_line())
                item.as_line().encode()
                answers = ("chosen", "rejected") if "chosen" in line else ("response",)
                for key in ("prompt", *answers):
                    if not isinstance(line[key], str):
                        raise Violation(f"{key} is no text")
                assert item.id
            if not items and file.content.strip():
                raise Violation(f"nothing came out of a file of {len(file.content)} bytes")
            _check_count(file, source, items)
        finally:
            path.unlink(missing_ok=True)

    return check


def _check_count(file: File, source: Any, items: int) -> None:
    """At least one pair, or one reason, must come out for each line of a file of JSON lines."""
    start = file.content.removeprefix(b"\xef\xbb\xbf").lstrip()
    if (
        not file.name.endswith(".jsonl")
        or source.encoding not in ("auto", "latin-1")
        or source.limit
        or start[:1] == b"["
    ):
        return
    if re.match(rb"\{[ \t]*\r?\n", start) or b"\0" in file.content or file.content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return
    lines = sum(bool(line.strip()) for line in start.split(b"\n"))
    if items < lines and not getattr(source, "annotator_field", None):
        raise Violation(f"lines unaccounted for: {items} of {lines}")


def _reader(name: str, suffixes: str | tuple[str, ...], contents: Callable[[], SearchStrategy[bytes]]) -> Target:
    names = (suffixes,) if isinstance(suffixes, str) else suffixes
    return Target(f"read-{name}", lambda: st.one_of(*(files(suffix, contents()) for suffix in names)), check_texts)


TARGETS = (
    _reader("jsonl", (".jsonl", ".json"), lambda: damage.line_files(ROWS)),
    _reader("csv", (".csv", ".tsv"), lambda: damage.tables(TABLE)),
    _reader("text", (".txt", ""), lambda: damage.byte_files(PROSE)),
    _reader("html", (".html", ".xhtml"), lambda: damage.byte_files([PAGE], 6, HTML_TOKENS)),
    _reader("warc", (".warc", ".wet"), lambda: damage.byte_files(WARCS, 4, WARC_TOKENS)),
    _reader("notebook", ".ipynb", lambda: damage.json_files([NOTEBOOK, NOTEBOOK_3])),
    _reader("epub", ".epub", lambda: damage.archives(EPUB, HTML_TOKENS)),
    _reader("docx", ".docx", lambda: damage.archives(DOCX, HTML_TOKENS)),
    _reader("subtitles", (".srt", ".vtt"), lambda: damage.byte_files([SRT, VTT], 4, SUBTITLE_TOKENS)),
    _reader("mhtml", (".mhtml", ".mht"), lambda: damage.byte_files([MHTML], 4, MAIL_TOKENS)),
    _reader("email", ".eml", lambda: damage.byte_files([MAIL, MHTML], 4, MAIL_TOKENS)),
    _reader("tex", ".tex", lambda: damage.byte_files([TEX], 5, TEX_TOKENS)),
    _reader("markdown", ".md", lambda: damage.byte_files([MARKDOWN], 4, HTML_TOKENS)),
    _reader("parquet", ".parquet", parquet_files),
    _reader("arrow", (".arrow", ".feather"), arrow_files),
    Target(
        "pairs-instructions",
        lambda: pair_files(INSTRUCTIONS, INSTRUCTION_OPTIONS),
        _check_pairs(FileInstructions, instruction_pairs),
    ),
    Target(
        "pairs-preferences",
        lambda: pair_files(PREFERENCES, PREFERENCE_OPTIONS),
        _check_pairs(FilePreferences, preference_pairs),
    ),
)
