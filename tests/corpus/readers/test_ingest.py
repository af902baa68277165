"""Reading from outside: what comes in is complete and the same every time; what is broken is named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from corpus.config import IngestConfig
from corpus.documents.parts import read_documents
from corpus.ingest import ingest
from corpus.recognition.first_records import first_record_problems
from infra.errors import StageError

PROSE = "It was the best of times, it was the worst of times.\n"


def files(*paths: str, **keys: object) -> IngestConfig:
    top = {name: keys.pop(name) for name in list(keys) if name == "max_quarantine_share"}
    return IngestConfig(read=[{"kind": "files", "paths": paths, **keys}], **top)


def jsonl(*texts: object) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def parquet(path: Path, **columns: list) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return str(path)


def test_formats_go_by_suffix_and_gzip_by_content(build, write, tmp_path):
    paths = [
        write("a.txt", PROSE),
        write("b.jsonl", jsonl("second")),
        write("c.jsonl.gz", gzip.compress(jsonl("third").encode())),
        write("d.txt.gz", gzip.compress(b"fourth")),
        parquet(tmp_path / "sources" / "e.parquet", text=["fifth"]),
    ]
    found = list(read_documents(build(ingest, files(*paths))))
    assert [document.text for document in found] == [PROSE, "second", "third", "fourth", "fifth"]
    assert [document.source for document in found] == [
        "files/a.txt",
        "files/b.jsonl",
        "files/c.jsonl.gz",
        "files/d.txt.gz",
        "files/e.parquet",
    ]


def test_windows_line_ends_and_byte_order_mark_are_no_part_of_the_text(build, write):
    path = write("a.txt", b"\xef\xbb\xbfone\r\ntwo\r\n")
    assert [d.text for d in read_documents(build(ingest, files(path)))] == ["one\ntwo\n"]


def test_payload_does_not_depend_on_the_order_or_folder_of_the_files(build, write, payload):
    one, two = write("here/a.txt", "first"), write("here/b.jsonl", jsonl("second", "third"))
    moved = [write("there/b.jsonl", jsonl("second", "third")), write("there/a.txt", "first")]
    first = payload(build(ingest, files(one, two)))
    assert first == payload(build(ingest, files(two, one))) == payload(build(ingest, files(*moved)))


def test_cutting_loses_nothing_and_cuts_at_paragraph_ends(build, write):
    paragraphs = [f"Paragraph {i}. {'word ' * (5 + i % 40)}".strip() for i in range(200)]
    path = write("book.txt", "\n\n".join(paragraphs))
    pieces = [d.text for d in read_documents(build(ingest, files(path, cut_characters=500)))]
    assert "\n\n".join(pieces) == "\n\n".join(paragraphs)
    assert all(len(piece) >= 500 for piece in pieces[:-1])
    assert all(piece.startswith("Paragraph") for piece in pieces)


def test_a_paragraph_without_end_is_cut_at_lines(build, write):
    path = write("log.txt", "a line of text\n" * 1000)
    pieces = [d.text for d in read_documents(build(ingest, files(path, cut_characters=500)))]
    assert max(map(len, pieces)) < 1100


def test_corrupt_lines_are_put_aside_with_file_line_and_reason(build, write, lines_of):
    lines = [json.dumps({"text": f"text {i}"}) for i in range(300)]
    lines[6], lines[99] = '{"text": "torn', '{"text": null}'
    path = write("data.jsonl", "\n".join(lines))
    out = build(ingest, files(path))
    aside = lines_of(out / "aux" / "quarantine.jsonl")
    assert [(row["file"], row["line"]) for row in aside] == [(path, 7), (path, 100)]
    assert "not JSON" in aside[0]["reason"] and "not a string" in aside[1]["reason"]
    [source] = json.loads((out / "aux" / "sources.json").read_text())
    assert source["documents"] + source["quarantined"] == 300


def test_a_folder_is_read_with_the_folders_that_its_links_lead_to_each_once(build, tmp_path):
    """Text on another disk was left out without a word. Now it is read if the config asks for it, and stops the stage
    otherwise: a folder from others may hold a link to a private file."""
    for path in ("corpus/a.txt", "corpus/inner/b.txt", "disk/shard/c.txt"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"It is {path}.")
    for link, target in (
        ("one", "../disk"),
        ("two", "../disk/shard"),
        ("inner/up", ".."),
        ("all", ".."),
        ("b", "inner"),
    ):
        (tmp_path / "corpus" / link).symlink_to(target)
    (tmp_path / "disk" / "back").symlink_to("../corpus")
    (tmp_path / "disk" / "shard" / "round").symlink_to("..")
    with pytest.raises(StageError, match=r"corpus/one is a link that leads out of .*follow_links: true"):
        build(ingest, files(str(tmp_path / "corpus")))
    out = build(ingest, files(str(tmp_path / "corpus"), follow_links=True))
    found = [document.text for document in read_documents(out)]
    assert found == ["It is corpus/a.txt.", "It is corpus/inner/b.txt.", "It is disk/shard/c.txt."]
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "disk").symlink_to("../disk")
    assert first_record_problems(files(str(tmp_path / "links"), follow_links=True)) == []
    [problem] = first_record_problems(files(str(tmp_path / "links")))
    assert problem.code == "unsafe_file"


def test_a_line_that_is_not_in_the_encoding_of_the_config_is_put_aside(build, write, lines_of):
    good = jsonl(*[f"text {i}" for i in range(200)]).encode()
    out = build(ingest, files(write("data.jsonl", good + b'{"text": "caf\xe9"}\n'), encoding="utf-8"))
    [row] = lines_of(out / "aux" / "quarantine.jsonl")
    assert row["line"] == 201 and "not valid utf-8" in row["reason"]


@pytest.mark.parametrize(
    ("name", "content", "keys", "code", "names"),
    [
        ("gone.txt", None, {}, "missing_source", ["gone.txt"]),
        ("gone.parquet", None, {}, "missing_source", ["gone.parquet"]),
        ("empty.txt", b"", {}, "empty_source", ["empty.txt"]),
        ("blank.txt", b" \n\n ", {}, "empty_source", ["blank.txt"]),
        ("empty.jsonl", b"", {}, "empty_source", ["empty.jsonl"]),
        ("empty.txt.gz", gzip.compress(b""), {}, "empty_source", ["empty.txt.gz"]),
        ("torn.jsonl", b'{"text": "a"}\n{"text": \n', {}, "too_much_quarantined", ["torn.jsonl:2", "50.00%", "1.00%"]),
        ("list.jsonl", b"[1, 2]", {}, "too_much_quarantined", ["list.jsonl:1", "a JSON object"]),
        ("image.txt", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", {}, "binary_source", ["image.txt", "NUL"]),
        ("image.jsonl", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", {}, "binary_source", ["image.jsonl", "NUL"]),
        (
            "latin.txt",
            "café".encode("latin-1"),
            {"encoding": "utf-8"},
            "wrong_encoding",
            ["latin.txt", "utf-8", "latin-1"],
        ),
        ("field.jsonl", b'{"body": "a", "id": 1}', {}, "wrong_field", ["field.jsonl:1", "text", "body, id"]),
        ("torn.txt.gz", gzip.compress(PROSE.encode() * 99)[:-20], {}, "corrupt_file", ["torn.txt.gz"]),
        ("not.parquet", b"PAR1 but not really", {}, "corrupt_file", ["not.parquet"]),
        ("broken.json", b'[{"text": "a"},\n {', {"format": "jsonl"}, "corrupt_file", ["broken.json:2"]),
    ],
    # A gzip file holds the time at which it was made: no name for a test that two processes collect.
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_is_one_line_that_names_it(build, write, tmp_path, name, content, keys, code, names):
    path = str(tmp_path / name) if content is None else write(name, content)
    with pytest.raises(StageError) as caught:
        build(ingest, files(path, **keys))
    assert caught.value.problems[0].code == code
    assert "\n" not in str(caught.value)
    assert all(part in str(caught.value) for part in names), str(caught.value)


def test_a_parquet_file_without_the_column_lists_those_it_has(build, tmp_path):
    path = parquet(tmp_path / "a.parquet", body=["x"], url=["y"])
    with pytest.raises(StageError, match=r"columns are: body, url.*ingest\.read\.0\.text_field"):
        build(ingest, files(path))


def test_one_bad_source_is_not_hidden_by_a_large_good_one(build, write):
    config = IngestConfig(
        read=[
            {"kind": "files", "paths": [write("good.jsonl", jsonl(*map(str, range(2000))))]},
            {"kind": "files", "paths": [write("bad.jsonl", '{"text": "a"}\n{')]},
        ]
    )
    with pytest.raises(StageError, match=r"bad\.jsonl:2"):
        build(ingest, config)


def test_a_higher_limit_lets_more_through(build, write):
    out = build(ingest, files(write("torn.jsonl", '{"text": "a"}\n{"text": \n'), max_quarantine_share=0.5))
    assert [document.text for document in read_documents(out)] == ["a"]


def test_unknown_package_is_named(build):
    config = IngestConfig(read=[{"kind": "docstrings", "packages": ["click", "no_such_package"]}])
    with pytest.raises(StageError, match="no_such_package"):
        build(ingest, config)
