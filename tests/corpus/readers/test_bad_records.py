"""A bad record costs itself alone: it is put aside with its file, its place and a reason, in bounded memory."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import brotli
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from pydantic import ValidationError

from corpus.config import IngestConfig
from corpus.documents.parts import read_documents
from corpus.ingest import ingest
from corpus.readers.formats import table_process
from corpus.readers.formats.json_lines import read_records
from corpus.readers.record import Record
from infra.errors import StageError
from infra.launch.config import LaunchConfig
from infra.run import Run
from tests.corpus.dedupe.crash import crash_after_reading
from tests.corpus.readers.test_formats import GOOD, SAMPLES, arrow, config, page, pages, parquet, warc
from tests.support.programs.command import REPOSITORY, environment


def among_good(*bad: bytes) -> bytes:
    """JSON lines of two good records around bad ones."""
    first, last = (json.dumps({"text": text}).encode() for text in GOOD[:2])
    return b"\n".join([first, *bad, last])


def table(column: pa.Array | None = None, **columns: pa.Array) -> bytes:
    out = io.BytesIO()
    columns = {"text": pa.array([GOOD[0], "middle", GOOD[1]]) if column is None else column, **columns}
    pq.write_table(pa.table(columns), out)
    return out.getvalue()


def as_text(values: list[bytes]) -> pa.Array:
    return pa.array(values, pa.binary()).view(pa.string())


def mail(text: str) -> str:
    return f"From: a@example.org\nSubject: The mill\nContent-Type: text/plain\n\n{text}"


def mails(bad: str) -> bytes:
    return among_good(json.dumps({"text": bad}).encode())


def nested_mail(depth: int) -> str:
    opening = "".join(f'Content-Type: multipart/mixed; boundary="b{n}"\n\n--b{n}\n' for n in range(depth))
    return f"Subject: deep\nMIME-Version: 1.0\n{opening}Content-Type: text/plain\n\nx"


DEEP = b"[" * 100_000 + b"]" * 100_000
DIGITS = b"7" * 5_000


def archive(damage: Callable[[bytes], bytes], content_encoding: str = "", content: bytes = page("middle")) -> bytes:
    """Three uncompressed records of pages; the second is damaged."""
    first, second, third = (
        warc(("response", f"http://a/{n}", text, "text/html" + content_encoding * (n == 1)), gzipped=False)
        for n, text in enumerate((page(GOOD[0]), content, page(GOOD[1])))
    )
    return first + damage(second) + third


def with_length(length: bytes) -> Callable[[bytes], bytes]:
    def damage(record: bytes) -> bytes:
        head, _, rest = record.partition(b"Content-Length: ")
        return head + b"Content-Length: " + length + b"\r\n" + rest.partition(b"\r\n")[2]

    return damage


def without(header: bytes) -> Callable[[bytes], bytes]:
    return lambda record: b"".join(line for line in record.splitlines(True) if header not in line)


CASES: dict[str, tuple[str, bytes, dict[str, Any], int]] = {
    "deep": ("a.jsonl", among_good(b'{"text": ' + DEEP + b"}"), {}, 2),
    "digits": ("a.jsonl", among_good(b'{"text": "x", "n": ' + DIGITS + b"}"), {}, 2),
    "deep in a list": ("a.json", b"[" + among_good(DEEP).replace(b"\n", b",\n") + b"]", {}, 2),
    "digits in a list": ("a.json", b"[" + among_good(DIGITS).replace(b"\n", b",") + b"]", {}, 2),
    "deep metadata": (
        "a.jsonl",
        among_good(b'{"text": "x", "m": ' + DEEP[:990] + DEEP[-990:] + b"}"),
        {"metadata_fields": ["m"]},
        2,
    ),
    "deep mail": ("a.jsonl", mails(nested_mail(3_000)), {"content": "email"}, 2),
    "long subject": ("a.jsonl", mails("Subject: " + "é a" * 230_000 + "\n\nx"), {"content": "email"}, 2),
    "nested comments": ("a.jsonl", mails("Content-Type: " + "(" * 19_000 + "\n\nx"), {"content": "email"}, 2),
    "bad UTF-8 in Parquet": ("a.parquet", table(as_text([GOOD[0].encode(), b"\xff\xfe", GOOD[1].encode()])), {}, 2),
    "a date past 9999": (
        "a.parquet",
        table(day=pa.array([0, 2_000_000_000, 1], pa.int32()).view(pa.date32())),
        {"metadata_fields": ["day"]},
        2,
    ),
    "no target": (
        "a.warc",
        archive(without(b"Target-URI")),
        {},
        2,
    ),
    "negative length": ("a.warc", archive(with_length(b"-5")), {}, 2),
    "no length": ("a.warc", archive(with_length(b"many")), {}, 2),
    "no type": ("a.warc", archive(without(b"WARC-Type")), {}, 2),
    "short length": ("a.warc", archive(with_length(b"100")), {"text_unit": "file"}, 3),
    "bad brotli": ("a.warc", archive(bytes, "\r\nContent-Encoding: br", b"\xff" * 4_000), {}, 2),
    "a brotli bomb": (
        "a.warc",
        archive(bytes, "\r\nContent-Encoding: br", brotli.compress(b"a" * 50_000_000, quality=1)),
        {},
        2,
    ),
    "a bomb in one line": ("a.txt.gz", gzip.compress(b"a" * 50_000_000, 1), {"text_unit": "paragraph"}, 0),
    "a bomb of lines": ("a.txt.gz", gzip.compress((b"a" * 9_999 + b"\n") * 5_000, 1), {"text_unit": "paragraph"}, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_record_is_put_aside_by_itself(build, write, lines_of, case):
    name, content, keys, kept = CASES[case]
    path = write(name, content)
    out = build(ingest, config(path, write("good.txt", "good"), share=0.7, **{"max_document_mb": 2, **keys}))
    [row] = json.loads((out / "aux" / "sources.json").read_text())
    aside = lines_of(out / "aux" / "quarantine.jsonl")
    assert (row["records"], row["quarantined"], len(aside)) == (kept + 1, 1, 1)
    assert aside[0]["file"] == path and aside[0]["reason"]
    # Of a record that is longer than it says, the rest counts as one that has no header.
    assert aside[0]["line"] == (3 if case == "short length" else 2 if kept else 1)
    texts = [document.text for document in read_documents(out)]
    assert all(any(good in text for text in texts) for good in GOOD[: min(kept, 2)])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (archive(bytes).replace(b"WARC-Type: response", b"WARC-Type: respanse"), "3 records (3 respanse)"),
        (archive(bytes).replace(b"Content-Type: text/html", b"Content-Typo: text/html"), "3 records (3 response)"),
        (warc(("warcinfo", "", b"software: x", "application/warc-fields"), gzipped=False), "1 records (1 warcinfo)"),
    ],
)
def test_an_archive_without_a_page_is_put_aside(build, write, lines_of, content, reason):
    """It gave no document and no line in the quarantine: a damaged header looks like a record of another kind."""
    path = write("a.warc", content)
    out = build(ingest, config(path, write("good.txt", "good"), share=0.7))
    [aside] = lines_of(out / "aux" / "quarantine.jsonl")
    assert aside["file"] == path and reason in aside["reason"]
    assert f"at byte {content.rfind(b'WARC/1.0'):,}" in aside["reason"]
    with pytest.raises(StageError, match="no page or text in it"):
        build(ingest, config(path))


def test_half_characters_in_metadata_and_names_are_mended(build, write, tmp_path):
    path = write("a.jsonl", b'{"text": "x", "m": "a\\ud800b", "\\udc00": 1}')
    os.rename(path, os.fsencode(path).replace(b"a.jsonl", b"a\xff.jsonl"))
    out = build(ingest, config(str(tmp_path / "sources"), metadata_fields=["m"]))
    [document] = read_documents(out)
    assert json.loads(document.metadata) == {"m": "a\ufffdb"}
    assert document.source.startswith("files/a\ufffd")


def test_metadata_are_json_and_cost_a_record_once(build, write, lines_of):
    long = {"text": "\n\n".join("word " * 30 for _ in range(5)), "m": "x" * 2_000}
    rows = f'{{"text": "good", "m": [NaN, 1.5, -Infinity, "NaN"]}}\n{json.dumps(long)}\n'
    keys = {"metadata_fields": ["m"], "cut_characters": 100, "max_document_mb": 0.001}
    out = build(ingest, config(write("a.jsonl", rows), share=0.7, **keys))
    [document] = read_documents(out)
    assert document.metadata == '{"m": [null, 1.5, null, "NaN"]}'
    [row] = json.loads((out / "aux" / "sources.json").read_text())
    assert (row["records"], row["quarantined"]) == (1, 1)
    [aside] = lines_of(out / "aux" / "quarantine.jsonl")
    assert aside["line"] == 2 and "metadata" in aside["reason"]


def test_mojibake_of_nuls_leaves_none(build, write):
    out = build(ingest, config(write("a.txt", "he said â\x80\x9cyes\xc0\x80â\x80\x9d")))
    assert [document.text for document in read_documents(out)] == ["he said “yes”"]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("configured", ["auto", "utf-16"])
def test_utf_16_without_a_byte_order_mark(build, write, encoding, configured):
    text = write("a.txt", "Die Mühle am Fluß".encode(encoding))
    rows = write("b.jsonl", '{"text": "Grüße"}\n{"text": "vom Fluß"}\n'.encode(encoding))
    out = build(ingest, config(text, rows, encoding=configured))
    assert [d.text for d in read_documents(out)] == ["Die Mühle am Fluß", "Grüße", "vom Fluß"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf16", "UTF_16LE", "u32"])
def test_a_configured_wide_encoding_is_that_of_files_lines_and_lists(build, write, encoding):
    lines = ["Die Mühle am Fluß", "ist alt.", "Grüße!"]
    text = write("a.txt", "\n".join(lines).encode(encoding))
    # One of the lists is of an even number of characters, the other of an odd one.
    items = json.dumps([{"text": line} for line in lines])
    even = write("even.json", f"{items}\n".encode(encoding))
    odd = write("odd.json", items.encode(encoding))
    rows = write("b.jsonl", "".join(json.dumps({"text": line}) + "\n" for line in lines).encode(encoding))
    for unit, expected in (("file", ["\n".join(lines)]), ("line", lines), ("paragraph", ["\n".join(lines)])):
        out = build(ingest, config(text, even, odd, rows, encoding=encoding, text_unit=unit))
        assert [d.text for d in read_documents(out)] == [*expected, *lines, *lines, *lines]


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_utf_16_without_a_byte_order_mark_is_not_read_in_parts(build, write, monkeypatch, name):
    monkeypatch.setattr("corpus.readers.plan.PARTITION_BYTES", 2000)
    texts = [f"line {number} of the text" for number in range(200)]
    rows = texts if name == "a.txt" else [json.dumps({"text": text}) for text in texts]
    path = write(name, "".join(f"{row}\n" for row in rows).encode("utf-16-le"))
    assert [d.text for d in read_documents(build(ingest, config(path, text_unit="line")))] == texts


@pytest.mark.parametrize(
    ("encoding", "text"),
    [("gbk", "模"), ("utf-7", "Grüße"), ("latin-1", "Â£ und Ã¼"), ("hz", "模"), ("shift_jis", "ｼﾀ")],
)
def test_lines_in_a_configured_encoding_are_not_taken_for_utf_8_where_they_might_be(encoding, text, tmp_path):
    rows, items = tmp_path / "a.jsonl", tmp_path / "b.json"
    rows.write_bytes(f'{{"text": "{text}"}}\n'.encode(encoding))
    # An item that is wrong has the others read one by one, and what orjson refuses is read by another parser.
    items.write_bytes(f'[{{"text": "{text}"}}, {{"text": "{text}", "n": NaN}}, {{"text": oops}}]'.encode(encoding))
    for path, count in ((rows, 1), (items, 2)):
        found = [item for item in read_records(path, encoding, (), "key", ()) if isinstance(item, Record)]
        assert [item.value["text"] for item in found] == [text] * count


@pytest.mark.parametrize("encoding", ["hex", "rot13", "zlib", "idna", "undefined", "no-such"])
def test_an_encoding_that_is_none_of_text_is_refused_in_the_config(encoding):
    with pytest.raises(ValidationError, match="expected one of text that Python knows"):
        IngestConfig(read=[{"kind": "files", "paths": ["a"], "encoding": encoding}])


def test_a_page_that_declares_no_encoding_of_text_is_read_all_the_same(build, write):
    content = page(GOOD[0]).replace(b"<head>", b"<head><meta charset='hex'>")
    [document] = read_documents(build(ingest, config(write("a.html", content))))
    assert GOOD[0] in document.text


def test_a_column_that_stands_twice(build, write):
    out = io.BytesIO()
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), out)
    path = write("a.parquet", out.getvalue())
    with pytest.raises(StageError, match="expected one column text, but it has 2 of that name"):
        build(ingest, config(path))
    out = build(ingest, config(path, write("b.txt", "b"), broken_files="quarantine"))
    assert [document.text for document in read_documents(out)] == ["b"]


def bad_offsets() -> bytes:
    """An Arrow file whose second batch says that its texts lie far outside of the file's memory."""
    out = io.BytesIO()
    batches = [pa.record_batch({"text": [text] * 50}) for text in GOOD[:3]]
    with pa.ipc.new_stream(out, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    content = bytearray(out.getvalue())
    width = len(GOOD[0])
    starts = struct.pack("<3i", 0, width, 2 * width)
    second = content.find(starts, content.find(starts) + 1)
    struct.pack_into("<i", content, second + 100, 2_000_000_000)
    return bytes(content)


def test_offsets_out_of_bounds_cost_their_rows(build, write):
    out = build(ingest, config(write("a.arrow", bad_offsets())))
    [row] = json.loads((out / "aux" / "sources.json").read_text())
    assert (row["records"], row["quarantined"]) == (148, 2)


def test_a_file_that_crashes_its_reader_costs_itself_alone(build, write, monkeypatch, lines_of):
    """What it gave before stays, and the files behind it are read."""
    monkeypatch.setattr(table_process, "read_table", crash_after_reading)
    paths = write("a.parquet", parquet()), write("b.arrow", arrow()), write("c.parquet", parquet())
    with pytest.raises(StageError, match=r"b\.arrow: reading it crashed after row 43 \(SIGSEGV\)"):
        build(ingest, config(*paths))
    out = build(ingest, config(*paths, broken_files="quarantine"))
    [row] = json.loads((out / "aux" / "sources.json").read_text())
    assert (row["records"], row["quarantined"]) == (3 * len(GOOD), 3 * 3 + 1)
    [broken] = [line for line in lines_of(out / "aux" / "quarantine.jsonl") if line["line"] == 0]
    assert broken["file"] == paths[1] and "SIGSEGV" in broken["reason"]


PEAK = """
import json, resource, sys
from pathlib import Path
from corpus.config import IngestConfig
from corpus.ingest import ingest
from infra.launch.config import LaunchConfig
from infra.run import Run
from corpus.readers.formats import table_process
from corpus.readers.formats.json_lines import read_records
from corpus.readers.record import Record
from tests.support.programs.memory import own_peak_mb
read, out = json.loads(sys.argv[1]), Path(sys.argv[2])
out.mkdir()
ingest(IngestConfig(read=read, max_quarantine_share=1), {}, out, Run(out.with_suffix(".work"), LaunchConfig(workers=1)))
table_process._end()
print(own_peak_mb(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1000)
"""


def bomb(path: Path, part: bytes, parts: int, start: bytes = b"") -> str:
    """A small file that unpacks to `parts` megabytes."""
    with path.open("wb") as file, zstandard.ZstdCompressor(level=1).stream_writer(file) as out:
        out.write(start)
        for _ in range(parts):
            out.write(part)
    return str(path)


@pytest.mark.slow
def test_what_grows_when_it_is_unpacked_is_not_held(tmp_path, lines_of):
    """Each would take gigabytes: a line, a paragraph of many lines, an item of a list, and cells of a table."""
    one, many = b"a" * 1_000_000, (b"a" * 9_999 + b"\n") * 100
    cells = pa.DictionaryArray.from_arrays(pa.array([0] * 60, pa.int32()), pa.array(["x" * 60_000_000]))
    pq.write_table(pa.table({"text": cells}), tmp_path / "cells.parquet", compression="zstd")
    each = [
        {"paths": [bomb(tmp_path / "line.jsonl.zst", one, 500, b'{"text": "')]},
        {"paths": [bomb(tmp_path / "line.txt.zst", one, 500)], "text_unit": "paragraph"},
        {"paths": [bomb(tmp_path / "lines.txt.zst", many, 500)], "text_unit": "paragraph"},
        {"paths": [bomb(tmp_path / "list.json.zst", one, 500, b'[{"text": "')], "broken_files": "quarantine"},
        {"paths": [str(tmp_path / "cells.parquet")]},
    ]
    read = [{"kind": "files", **one} for one in each]
    program = [sys.executable, "-c", PEAK, json.dumps(read), tmp_path / "out"]
    done = subprocess.run(program, env=environment(), capture_output=True, text=True, check=True, cwd=REPOSITORY)
    ours, tables = map(float, done.stdout.split())
    assert ours < 900 and tables < 1_400
    aside = lines_of(tmp_path / "out" / "aux" / "quarantine.jsonl")
    assert [line["file"] for line in aside] == [one["paths"][0] for one in each[:4] for _ in range(1)] + [
        str(tmp_path / "cells.parquet")
    ] * 60


FORMATS: dict[str, tuple[Callable[[], bytes], dict[str, Any]]] = {
    **SAMPLES,
    "a.csv": (lambda: "\n".join(f"{n},{text}" for n, text in enumerate(GOOD)).encode(), {}),
    "a.html": (lambda: page(GOOD[0]), {}),
    "mail.jsonl": (
        lambda: b"\n".join(json.dumps({"text": mail(text)}).encode() for text in GOOD),
        {"content": "email"},
    ),
    "a.eml": (lambda: mail(GOOD[0]).encode(), {"content": "email"}),
    "a.warc": (lambda: pages(gzipped=False), {}),
}


def mutated(content: bytes, rng: random.Random) -> bytes:
    """The same with some bytes flipped, taken out, doubled, or with the end cut off."""
    found = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8, 40))):
        at = rng.randrange(max(1, len(found)))
        match rng.randrange(6):
            case 0 | 1 if found:
                found[at] = rng.randrange(256)
            case 2 if found:
                found[at : at + 4] = rng.choice((b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"-999"))
            case 3:
                del found[at : at + rng.randrange(1, 30)]
            case 4:
                found[at:at] = found[at : at + rng.randrange(1, 60)]
            case 5 if rng.random() < 0.2:
                del found[at:]
    return bytes(found)


def check_mutations(name: str, count: int, tmp_path: Path, lines_of: Any) -> None:
    """So many damaged files of a format, read as one source: the run ends, and each document and each row of the
    quarantine counts as one record."""
    make, keys = FORMATS[name]
    rng, content = random.Random(f"{name} 17"), make()
    folder, out = tmp_path / "files", tmp_path / "out"
    folder.mkdir()
    out.mkdir()
    for number in range(count):
        (folder / f"{number:04}-{name}").write_bytes(mutated(content, rng))
    read = config(str(folder), share=1.0, broken_files="quarantine", metadata_fields=["url", "n"], **keys)
    try:
        result = ingest(read, {}, out, Run(tmp_path / "work", LaunchConfig(workers=1)))
    except StageError as error:
        # A column of another name is a fault of the config, and tells so.
        assert [problem.code for problem in error.problems] == ["wrong_field"], error
        return
    [row] = json.loads((out / "aux" / "sources.json").read_text())
    documents = list(read_documents(out)) if row["records"] else []
    assert row["records"] == len(documents) == result.figures["documents"]
    aside = lines_of(out / "aux" / "quarantine.jsonl")
    assert row["quarantined"] == len(aside) and all(line["file"] and line["reason"] for line in aside)
    told = {line["file"] for line in aside} | {str(folder / name) for name in row["origins"]}
    assert told >= {str(path) for path in folder.iterdir()}, "no file is passed over without a word"


@pytest.mark.parametrize("name", FORMATS)
def test_mutated_files_never_end_the_run(name, tmp_path, lines_of):
    check_mutations(name, 12, tmp_path, lines_of)


@pytest.mark.long
@pytest.mark.parametrize("name", FORMATS)
def test_many_mutated_files_never_end_the_run(name, tmp_path, lines_of):
    """The risk: a damaged file of a public crawl ends a run of days, or is passed over."""
    check_mutations(name, 600, tmp_path, lines_of)
