"""Every format, whole and damaged: what is good comes in as it was, what is not is put aside, and nothing is lost."""

from __future__ import annotations

import base64
import bz2
import gzip
import io
import json
import lzma
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from corpus.config import IngestConfig
from corpus.documents.parts import read_documents
from corpus.ingest import ingest
from infra.errors import StageError
from infra.launch.config import LaunchConfig
from infra.run import Run

GOOD = [f"Letter {number} of the chronicle, in which the river is described once more." for number in range(40)]
BAD = 3


def page(text: str) -> bytes:
    paragraphs = "".join(f"<p>{text} {turn}</p>" for turn in ("It begins so.", "It goes on so.", "It ends so."))
    menu = "<nav><a href='/'>Home</a><a href='/shop'>Buy our lamps</a></nav>"
    return f"<html><head><title>T</title></head><body>{menu}<article>{paragraphs}</article></body></html>".encode()


def warc(*records: tuple[str, str, bytes, str], gzipped: bool = True) -> bytes:
    """records: (type, URL, content, content type)."""
    out = io.BytesIO()
    writer = WARCWriter(out, gzip=gzipped)
    for kind, url, content, content_type in records:
        if kind == "response":
            http = StatusAndHeaders("200 OK", [("Content-Type", content_type)], protocol="HTTP/1.1")
            record = writer.create_warc_record(url, kind, payload=io.BytesIO(content), http_headers=http)
        else:
            record = writer.create_warc_record(
                url, kind, payload=io.BytesIO(content), length=len(content), warc_content_type=content_type
            )
        writer.write_record(record)
    return out.getvalue()


def jsonl() -> bytes:
    lines = [json.dumps({"text": text}).encode() for text in GOOD]
    for place, bad in ((5, b'{"text": "torn'), (9, b'{"text": null}'), (30, b"[1, 2]")):
        lines.insert(place, bad)
    return b"\n".join(lines)


def json_list() -> bytes:
    return json.dumps([*({"text": text} for text in GOOD), 7, {"text": None}, {"text": 1}]).encode()


def parquet() -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({"text": [*GOOD[:20], None, None, *GOOD[20:], None]}), out, row_group_size=7)
    return out.getvalue()


def arrow() -> bytes:
    out = io.BytesIO()
    table = pa.table({"text": [None, *GOOD, None, None]})
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=10)
    return out.getvalue()


def lines() -> bytes:
    rows = [text.encode() for text in GOOD]
    rows[3:3] = [b"not utf-8 \xff"] * BAD
    return b"\n".join(rows)


def paragraphs() -> bytes:
    long = "x" * 600_000
    return "\n\n".join([*GOOD, long, long, long]).encode()


def wet() -> bytes:
    texts = [("conversion", f"http://a/{n}", text.encode(), "text/plain") for n, text in enumerate(GOOD)]
    bad = [("conversion", "http://b", b"not utf-8 \xff", "text/plain")] * BAD
    other = [("warcinfo", "", b"software: x", "application/warc-fields")]
    return warc(*other, *texts, *bad)


def pages(gzipped: bool = True) -> bytes:
    good = [("response", f"http://a/{n}", page(text), "text/html") for n, text in enumerate(GOOD)]
    bad = [("response", "http://b", b"\0" * 100, "text/html")] * BAD
    picture = [("response", "http://c/a.png", b"\x89PNG", "image/png")]
    return warc(*good, *bad, *picture, gzipped=gzipped)


SAMPLES: dict[str, tuple[Callable[[], bytes], dict[str, Any]]] = {
    "a.jsonl": (jsonl, {}),
    "a.jsonl.gz": (lambda: gzip.compress(jsonl()), {}),
    "a.jsonl.zst": (lambda: zstandard.compress(jsonl()[:500]) + zstandard.compress(jsonl()[500:]), {}),
    "a.jsonl.bz2": (lambda: bz2.compress(jsonl()), {}),
    "a.jsonl.xz": (lambda: lzma.compress(jsonl()), {}),
    "a.json": (json_list, {}),
    "a.parquet": (parquet, {}),
    "a.arrow": (arrow, {}),
    "lines.txt": (lines, {"text_unit": "line", "encoding": "utf-8"}),
    "paragraphs.txt": (paragraphs, {"text_unit": "paragraph", "max_document_mb": 0.5}),
    "a.warc.wet.gz": (wet, {"encoding": "utf-8"}),
    "a.warc.gz": (pages, {}),
}


def config(*paths: str, share: float = 0.5, **keys: Any) -> IngestConfig:
    return IngestConfig(read=[{"kind": "files", "paths": paths, **keys}], max_quarantine_share=share)


@pytest.mark.parametrize("name", SAMPLES)
def test_read_and_quarantined_are_all_there_is(build, write, lines_of, name):
    content, keys = SAMPLES[name]
    out = build(ingest, config(write(name, content()), **keys))
    [row] = json.loads((out / "aux" / "sources.json").read_text())
    assert (row["records"], row["quarantined"]) == (len(GOOD), BAD)
    aside = lines_of(out / "aux" / "quarantine.jsonl")
    assert len(aside) == BAD and all(item["file"].endswith(name) and item["line"] and item["reason"] for item in aside)
    texts = [document.text for document in read_documents(out)]
    assert [text.splitlines()[0].removesuffix(" It begins so.") for text in texts] == GOOD


def test_html_files_give_their_main_text(build, write):
    out = build(ingest, config(write("a.html", page(GOOD[0])), write("b.htm", page(GOOD[1]))))
    first, second = (document.text for document in read_documents(out))
    assert first.count(GOOD[0]) == 3 and "lamps" not in first
    assert second.count(GOOD[1]) == 3


def test_pages_and_mails_in_records_give_their_text(build, write):
    mail = (
        "From: Ann <ann@example.org>\nSubject: The lamp\nMIME-Version: 1.0\n"
        "Content-Type: multipart/alternative; boundary=B\n\n--B\nContent-Type: text/html\n\n<p>in colour</p>\n"
        "--B\nContent-Type: text/plain; charset=iso-8859-1\nContent-Transfer-Encoding: quoted-printable\n\n"
        "It went out at the caf=E9.\n--B--\n"
    )
    path = write("mail.jsonl", json.dumps({"text": mail}) + "\n")
    [document] = read_documents(build(ingest, config(path, content="email")))
    assert document.text == "The lamp\n\nIt went out at the café."
    path = write("pages.jsonl", json.dumps({"text": page(GOOD[0]).decode()}) + "\n")
    [document] = read_documents(build(ingest, config(path, content="html")))
    assert document.text.count(GOOD[0]) == 3 and "lamps" not in document.text


@pytest.mark.parametrize("compress", [bz2.compress, lzma.compress, gzip.compress])
def test_all_streams_of_a_compressed_file_are_read_and_a_damaged_one_is_told_of(build, write, compress):
    first, last = (json.dumps({"text": text}).encode() + b"\n" for text in GOOD[:2])
    whole = compress(first) + compress(b"") + compress(last)
    out = build(ingest, config(write("a.jsonl", whole)))
    assert [document.text for document in read_documents(out)] == GOOD[:2]
    for number, damaged in enumerate((compress(first) + b"?" + compress(last)[1:], whole + b"behind")):
        with pytest.raises(StageError, match="not a complete"):
            build(ingest, config(write(f"{number}.jsonl", damaged)))


def test_streams_of_xz_may_be_padded(build, write):
    first, last = (lzma.compress(json.dumps({"text": text}).encode() + b"\n") for text in GOOD[:2])
    out = build(ingest, config(write("a.jsonl", first + b"\0" * 512 + last + b"\0" * 8)))
    assert [document.text for document in read_documents(out)] == GOOD[:2]


@pytest.mark.parametrize(
    ("piece", "text"),
    [
        (f"<p>{GOOD[0]}</p>", GOOD[0]),
        ("<div>Use <code>sort</code> instead.</div>", "Use sort instead."),
        ("Thanks! <b>It works.</b>", "Thanks! It works."),
        ("<pre><code>a = 1\nb = 2</code></pre>", "a = 1\nb = 2"),
        ("<script>var x = 1</script>", ""),
    ],
)
def test_a_record_may_hold_a_piece_of_a_page_of_a_single_block(build, write, piece, text):
    path = write("answers.jsonl", json.dumps({"text": piece}) + "\n")
    [document] = read_documents(build(ingest, config(path, content="html")))
    assert document.text == text


def test_what_a_mail_decodes_to_is_mended_as_any_text_is(build, write):
    head = "Subject: The lamp\nContent-Type: text/plain; charset="
    nul = base64.b64encode("It went\0 out at the cafÃ©, which was closed.".encode()).decode()
    mails = [f"{head}utf-8\nContent-Transfer-Encoding: base64\n\n{nul}\n", f"{head}utf-7\n\nIt +2AA- went out.\n"]
    path = write("mail.jsonl", "".join(json.dumps({"text": mail}) + "\n" for mail in mails))
    first, second = read_documents(build(ingest, config(path, content="email")))
    assert first.text == "The lamp\n\nIt went out at the café, which was closed."
    assert second.text == "The lamp\n\nIt \ufffd went out."


@pytest.mark.parametrize("name", ["mail.txt", "mail.jsonl"])
def test_a_mail_is_cut_once_its_text_is_out_of_it(build, write, name):
    paragraphs = [f"Paragraph {number} of the mail" + ", and on" * 12 for number in range(4)]
    body = "\n\n".join(paragraphs)
    mail = (
        "Subject: The lamp\nMIME-Version: 1.0\nContent-Type: multipart/alternative; boundary=B\n\n"
        f"--B\nContent-Type: text/plain\n\n{body}\n--B\nContent-Type: text/html\n\n<p>colour\n--B--\n"
    )
    path = write(name, mail if name == "mail.txt" else json.dumps({"text": mail}) + "\n")
    found = [d.text for d in read_documents(build(ingest, config(path, content="email", cut_characters=200)))]
    assert len(found) > 1 and "\n\n".join(found) == "\n\n".join(["The lamp", *paragraphs])


def test_text_and_metadata_are_found_inside_other_fields(build, write, tmp_path):
    row = {"page": {"body": GOOD[0], "meta": {"year": 1901}}, "a.b": "dots", "url": "http://a"}
    keys = {"text_field": "page.body", "metadata_fields": ["page.meta.year", "a.b", "url", "gone"]}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    for path in (write("a.jsonl", json.dumps(row)), str(tmp_path / "a.parquet")):
        [document] = read_documents(build(ingest, config(path, **keys)))
        assert document.text == GOOD[0]
        assert json.loads(document.metadata) == {"page.meta.year": 1901, "a.b": "dots", "url": "http://a"}


def test_warc_records_keep_their_address_and_declared_encoding(build, write):
    text = "Die Mühle am Fluß stand still, und niemand wußte, weshalb die Räder sich nicht mehr drehten. " * 3
    content = f"<html><body><article><p>{text}</p></article></body></html>".encode("latin-1")
    path = write(
        "a.warc", warc(("response", "http://a/muehle", content, "text/html; charset=ISO-8859-1"), gzipped=False)
    )
    [document] = read_documents(build(ingest, config(path, metadata_fields=["url"])))
    assert json.loads(document.metadata) == {"url": "http://a/muehle"}
    assert "Mühle am Fluß" in document.text


def test_a_large_file_read_in_parts_is_the_same_and_its_lines_keep_their_numbers(
    build, write, payload, lines_of, monkeypatch
):
    rows = [json.dumps({"text": f"{number} {'word ' * (number % 50)}"}) for number in range(2000)]
    for number in (3, 700, 701, 1999):
        rows[number] = "{"
    path = write("a.jsonl", "\n".join(rows) + "\n")
    whole = build(ingest, config(path))
    monkeypatch.setattr("corpus.readers.plan.PARTITION_BYTES", 7_000)
    parts = build(ingest, config(path))
    assert list(read_documents(parts)) == list(read_documents(whole))
    for out in (whole, parts):
        assert [row["line"] for row in lines_of(out / "aux" / "quarantine.jsonl")] == [4, 701, 702, 2000]
    assert len(list((parts / "documents").iterdir())) > 20


def test_row_groups_of_a_parquet_file_are_read_apart(build, tmp_path, lines_of, monkeypatch):
    texts = [f"row {number} " * 20 for number in range(300)]
    texts[250] = None
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=50)
    monkeypatch.setattr("corpus.readers.plan.PARTITION_BYTES", 1_500)
    out = build(ingest, config(str(tmp_path / "a.parquet")))
    assert [document.text for document in read_documents(out)] == [text for text in texts if text]
    assert [row["line"] for row in lines_of(out / "aux" / "quarantine.jsonl")] == [251]
    assert len(list((out / "documents").iterdir())) > 1


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
def test_byte_order_marks_are_followed(build, write, encoding):
    text = write("a.txt", "Grüße\nvom Fluß".encode(encoding))
    rows = write("b.jsonl", '{"text": "Grüße"}\n{"text": "vom Fluß"}\n'.encode(encoding))
    assert [d.text for d in read_documents(build(ingest, config(text, rows)))] == [
        "Grüße\nvom Fluß",
        "Grüße",
        "vom Fluß",
    ]


def test_mixed_encodings_are_repaired_and_counted(build, write):
    windows = "Für das Café an der Mühle „war“ es, so sagte man, ein schönes Jahr.".encode("cp1252")
    mojibake = "the cafÃ© at the mill wasn’t closed".encode()
    path = write(
        "a.jsonl",
        b'{"text": "plain"}\n{"text": "' + windows + b'"}\n{"text": "' + mojibake + b'"}\n{"text": "a\\u0000b"}\n',
    )
    out = build(ingest, config(path))
    assert [document.text for document in read_documents(out)] == [
        "plain",
        windows.decode("cp1252"),
        "the café at the mill wasn’t closed",
        "ab",
    ]
    [row] = json.loads((out / "aux" / "sources.json").read_text())
    assert row["repaired"] == 3


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("cp1251", "Мельница у реки стояла неподвижно, и никто не знал, почему колёса больше не вращаются. "),
        ("shift_jis", "川のほとりの水車は止まっていて、なぜ車輪が回らないのか誰も知らなかった。"),
        ("gb18030", "河边的磨坊静静地立着，没有人知道为什么轮子不再转动。"),
        ("cp1252", "La rivière où l’on pêchait naguère s’est tarie ; à l’été, nul n’y va désormais. "),
    ],
)
def test_files_that_do_not_say_their_encoding(build, write, encoding, text):
    path = write("a.txt", (text * 5).encode(encoding))
    [document] = read_documents(build(ingest, config(path)))
    assert document.text == text * 5


def truncated(name: str, content: bytes, cut: int) -> tuple[str, bytes]:
    return name, content[:-cut]


@pytest.mark.parametrize(
    ("name", "content", "names"),
    [
        (*truncated("a.jsonl.gz", gzip.compress(jsonl()), 40), ["a.jsonl.gz", "gzip", "download it again"]),
        (*truncated("a.jsonl.zst", zstandard.compress(jsonl()), 40), ["a.jsonl.zst", "zstd", "download it again"]),
        (*truncated("a.jsonl.xz", lzma.compress(jsonl()), 40), ["a.jsonl.xz", "xz", "download it again"]),
        (*truncated("a.parquet", parquet(), 40), ["a.parquet", "Parquet"]),
        (*truncated("a.arrow", arrow(), 300), ["a.arrow", "Arrow"]),
        (*truncated("a.warc.gz", pages(), 400), ["a.warc.gz", "gzip"]),
        (*truncated("a.warc", pages(gzipped=False), 400), ["a.warc:44", "not a complete WARC archive: record 44"]),
        ("b.warc.gz", gzip.compress(b"plain words\n"), ["b.warc.gz", "not a WARC archive"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_truncated_files_stop_the_run_or_are_put_aside_with_what_was_read_kept(build, write, name, content, names):
    path = write(name, content)
    with pytest.raises(StageError) as caught:
        build(ingest, config(path))
    assert caught.value.problems[0].code == "corrupt_file"
    assert all(part in str(caught.value) for part in names), str(caught.value)
    good = write("good.txt", GOOD[0])
    out = build(ingest, config(path, good, broken_files="quarantine", share=0.9))
    [row] = json.loads((out / "aux" / "sources.json").read_text())
    assert row["reasons"]["broken file"] == 1
    assert GOOD[0] in {document.text for document in read_documents(out)}


def test_a_parquet_file_with_another_schema_midway_is_named(build, tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    pq.write_table(pa.table({"text": GOOD}), folder / "part-0.parquet")
    pq.write_table(pa.table({"text": [1, 2]}), folder / "part-1.parquet")
    with pytest.raises(StageError, match=r"part-1\.parquet: expected text in the column text, not int64"):
        build(ingest, config(str(folder)))
    pq.write_table(pa.table({"body": GOOD}), folder / "part-1.parquet")
    with pytest.raises(StageError, match=r"part-1\.parquet: expected the column text; the columns are: body"):
        build(ingest, config(str(folder)))


def test_a_document_of_50_mb_is_put_aside_unless_it_is_asked_for(build, write, lines_of):
    path = write("a.jsonl", json.dumps({"text": "word " * 10_000_000}) + "\n" + json.dumps({"text": GOOD[0]}))
    out = build(ingest, config(path))
    assert [document.text for document in read_documents(out)] == [GOOD[0]]
    [row] = lines_of(out / "aux" / "quarantine.jsonl")
    assert row["line"] == 1 and row["reason"] == "longer than max_document_mb allows: a text of over 20 MB"
    first, _ = read_documents(build(ingest, config(path, max_document_mb=60)))
    assert len(first.text) == 50_000_000


def test_too_much_in_quarantine_names_the_most_frequent_reason_and_an_example(build, write):
    rows = [json.dumps({"text": text}) for text in GOOD]
    rows[2], rows[4], rows[6] = "{", '{"text": null}', '{"text": null}'
    with pytest.raises(StageError) as caught:
        build(ingest, config(write("a.jsonl", "\n".join(rows)), share=0.01))
    [problem] = caught.value.problems
    assert problem.path.endswith("a.jsonl:5")
    assert "3 of 40 records of ingest.read.0 cannot be read (7.50%), allowed are 1.00%" in problem.message
    assert "most of them, 2, like this one: the field text is not a string: it is null" in problem.message


def test_empty_folders_and_pages_without_text(build, write, tmp_path):
    (tmp_path / "nothing").mkdir()
    with pytest.raises(StageError, match="there is nothing to read here"):
        build(ingest, config(str(tmp_path / "nothing")))
    out = build(ingest, config(write("a.html", "<html><body></body></html>")))
    assert [document.text for document in read_documents(out)] == [""]


def test_the_result_does_not_depend_on_workers_or_the_order_of_the_files(tmp_path, write, payload, monkeypatch):
    names = ["a.jsonl.gz", "b.parquet", "c.txt", "d.jsonl", "e.warc.gz"]
    contents = [gzip.compress(jsonl()), parquet(), b"one file", jsonl(), pages()]
    paths = [write(name, content) for name, content in zip(names, contents, strict=True)]
    monkeypatch.setattr("corpus.readers.plan.PARTITION_BYTES", 1_000)
    found = []
    for workers, order in ((1, paths), (2, paths[::-1]), (3, [*paths[2:], *paths[:2]])):
        out = tmp_path / f"out-{workers}"
        out.mkdir()
        run = Run(tmp_path / f"work-{workers}", LaunchConfig(workers=workers))
        ingested = ingest(config(*order), {}, out, run)
        found.append((payload(out), (out / "aux" / "quarantine.jsonl").read_text(), ingested.figures))
    assert found[0] == found[1] == found[2]
    assert len(found[0][0]) > len(names)
