"""Files as other programs leave them: padded archives, one object over several lines, splits named twice."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from corpus.config import IngestConfig, InstructionsConfig, TokenizerConfig
from corpus.documents.quarantine import Rejected
from corpus.readers.config import FileDocuments
from corpus.readers.formats.json_lines import is_list
from corpus.readers.hub import dataset_files
from corpus.readers.plan import FilePart
from corpus.readers.texts import read_texts
from corpus.recognition.first_records import first_record_problems
from corpus.recognition.forms import groups_of
from corpus.recognition.readings import Wish
from evaluation.config import BenchmarkTask
from evaluation.harness.task_rows import task_rows
from infra.errors import StageError
from infra.io.bounded import opened


def read(path: Path, **options: object) -> list[str | None]:
    """Texts of a file; None for what is put aside."""
    source = FileDocuments.model_validate({"paths": [str(path)], **options})
    found = read_texts(source, FilePart(path, path.stat().st_size), "ingest.read.0")
    return [None if isinstance(one, Rejected) else one.text for one in found]


@pytest.mark.parametrize("zeros", [1, 512, 400_000])
def test_gzip_may_be_padded_with_zeros(zeros: int, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    members = gzip.compress(b'{"text": "one"}\n') + gzip.compress(b"") + gzip.compress(b'{"text": "two"}\n')
    path.write_bytes(members + bytes(zeros))
    assert read(path) == ["one", "two"]
    path.write_bytes(members + bytes(zeros) + b"junk")
    with pytest.raises(StageError, match="not a complete gzip file"):
        read(path)


@pytest.mark.parametrize("module", [bz2, lzma])
def test_other_streams_may_be_padded_too(module: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    stream = module.compress(b'{"text": "one"}\n')
    path.write_bytes(stream + bytes(512) + stream + bytes(512))
    assert read(path) == ["one", "one"]


def test_a_large_gzip_member_comes_whole(tmp_path: Path) -> None:
    content = b"".join(b"%d of many lines\n" % number for number in range(60_000))
    (tmp_path / "a.gz").write_bytes(gzip.compress(content + bytes(2_000_000)))
    with opened(tmp_path / "a.gz") as stream:
        assert stream.read() == content + bytes(2_000_000)


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_objects_over_several_lines_are_one_record_each(mark: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    first, second = ({"text": f"{word}\n}}\nbehind", "more": {"a": [1]}} for word in ("one", "two"))
    path.write_text(mark + json.dumps(first, indent=2) + "\n", encoding="utf8")
    assert read(path) == [first["text"]] and is_list(path)
    path.write_text(mark + json.dumps(first, indent="\t") + "\n\n" + json.dumps(second, indent=1), encoding="utf8")
    assert read(path) == [first["text"], second["text"]]
    path.write_text(json.dumps(first, indent=2)[:-1], encoding="utf8")
    assert read(path) == [None]
    path.write_text(json.dumps({"text": "long " * 400_000}, indent=2) + "\n" + json.dumps(second, indent=2))
    assert read(path, max_document_mb=0.4) == [None, second["text"]]


def test_lines_of_json_are_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    assert read(tmp_path / "a.jsonl") == ["one", "two"] and not is_list(tmp_path / "a.jsonl")


ROWS = [{"text": f"The river runs past {at}, and boats wait.", "id": at} for at in ("Ulm", "Linz", "Graz")]
JSON_LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
TABLE = b"id,text\n" + b"".join(f'{row["id"]},"{row["text"]}"\n'.encode() for row in ROWS)
PAGE = b"<!DOCTYPE html><html><body><p>The river runs past Ulm.</p></body></html>"
PROSE = "\n\n".join(row["text"] for row in ROWS).encode()


def parquet() -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS), sink)
    return sink.getvalue()


MISNAMED = [
    *((name, JSON_LINES, "jsonl") for name in ("a.txt", "a", "a.log", "a.md", "a.tex", "a.srt", "a.html", "a.csv")),
    *((name, JSON_LINES, "jsonl") for name in ("a.parquet", "a.arrow", "a.warc", "a.csv.gz")),
    *((name, gzip.compress(JSON_LINES), "jsonl") for name in ("b.txt", "b.gz", "b.txt.gz")),
    ("c.txt", JSON_LINES.decode().encode("utf-16"), "jsonl"),
    *((name, json.dumps(ROWS, indent=1).encode(), "jsonl") for name in ("d.txt", "d.csv", "d.tsv.gz")),
    ("e.txt", json.dumps(ROWS[0], indent=1).encode(), "jsonl"),
    ("f.txt", json.dumps({"text": "word " * 40_000}).encode(), "jsonl"),
    *((name, TABLE, "csv") for name in ("g.txt", "g.json", "g.jsonl", "g.parquet")),
    *((name, parquet(), "parquet") for name in ("h.txt", "h.json", "h.csv", "h.arrow")),
    *((name, PAGE, "html") for name in ("i.txt", "i.md", "i.json", "i.csv", "i.docx")),
]


@pytest.mark.parametrize(("name", "content", "kind"), MISNAMED, ids=[name for name, _, _ in MISNAMED])
def test_a_file_that_holds_another_format_than_its_name_says_is_refused(
    name: str, content: bytes, kind: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    config = IngestConfig.model_validate({"read": [{"kind": "files", "paths": [str(tmp_path)]}]})
    with pytest.raises(StageError) as caught:
        read(tmp_path / name)
    for problem in (*caught.value.problems, *first_record_problems(config)):
        assert problem.code == "misnamed_file" and name in problem.path
        assert f"set ingest.read.0.format: {kind}" in problem.fix
    assert len(first_record_problems(config)) == 1
    assert read(tmp_path / name, format=kind)[0]
    assert read(tmp_path / name, broken_files="quarantine") == [None]
    # init recognises it by itself; what needs a format of another kind it refuses or takes as documents.
    if name not in ("a.html", "a.md", "a.tex", "a.srt", "a.warc", "i.md", "i.docx"):
        groups, _ = groups_of(str(tmp_path / name), Wish(kind="documents"))
        assert [group.format for group in groups] == [kind]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", PROSE),
        ("a.txt", PROSE.decode().encode("utf-16")),
        ("a.txt.gz", PROSE),
        ("a.txt", b'{"a": 1} is how JSON writes it.\n{"b": 2} is another.\n'),
        ("a.txt", b'[{"name" and so on\n'),
        ("a.txt", b'{"version": 3, "names": []}'),
        ("a.txt", b"To name, to answer\nTo wait, to ask\nTo rest, to rise\n"),
        ("a.txt", b"We write <html> for a page.\n"),
        ("package.lock", b'{"text": "a lock file", "version": 1}\n{"text": "b"}\n'),
        ("a.py", b'{"text": 1}\n{"text": 2}\n'),
        ("a.md", b"<h1 align=center>Title</h1>\n"),
        ("a.md", b"title, text\none, two\n"),
    ],
)
def test_prose_and_code_are_read_as_their_names_say(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    [text] = read(tmp_path / name)
    assert text and text == read(tmp_path / name, format="markdown" if name.endswith(".md") else "text")[0]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.txt", "a.csv"])
def test_pairs_and_test_items_are_refused_under_the_name_of_another_format(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(parquet())
    instructions = InstructionsConfig.model_validate({"read": [{"kind": "files", "paths": [str(path)]}]})
    [problem] = first_record_problems(instructions)
    assert problem.code == "misnamed_file" and "set instructions.read.0.format: parquet" in problem.fix
    task = BenchmarkTask(name="own", kind="multiple_choice", path=str(path))
    with pytest.raises(StageError, match="found a Parquet file") as caught:
        list(task_rows(task))
    assert "rename the file" in caught.value.problems[0].fix


def test_splits_are_listed_once(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "train"]}')
    with pytest.raises(StageError, match=r"the splits are: train( |$)"):
        dataset_files(str(tmp_path), None, "test", None)


def test_a_wordpiece_vocabulary_has_room_for_all_bytes() -> None:
    with pytest.raises(ValidationError, match="at least 518"):
        TokenizerConfig(kind="wordpiece", vocab_size=400)
    assert TokenizerConfig(kind="wordpiece", vocab_size=518).vocab_size == 518
    assert TokenizerConfig(vocab_size=400).kind == "bpe"
