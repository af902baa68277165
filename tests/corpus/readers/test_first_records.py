"""What is wrong with the first record of a source is told before anything runs: all of it, with path and remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from corpus.config import IngestConfig, InstructionsConfig, PreferencesConfig
from corpus.recognition.first_records import first_record_problems


def lines(path: Path, *records: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def files(*paths: str, **keys: Any) -> dict[str, Any]:
    return {"kind": "files", "paths": list(paths), **keys}


def test_everything_wrong_with_the_first_records_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    pq.write_table(pa.table({"txt": ["a"], "url": ["b"]}), tmp_path / "rows.parquet")
    config = IngestConfig(
        read=[
            files(str(tmp_path / "empty")),
            files(lines(tmp_path / "a.jsonl", {"title": "A", "content": "A long text."})),
            files(str(tmp_path / "rows.parquet")),
            files(lines(tmp_path / "whole.jsonl", {"text": "right"})),
            files(lines(tmp_path / "numbers.jsonl", *({"text": number} for number in range(9)))),
            {"kind": "docstrings"},
        ]
    )
    told = [(problem.code, problem.path, problem.message, problem.fix) for problem in first_record_problems(config)]
    assert told == [
        (
            "empty_source",
            "ingest.read.0.paths.0",
            f"expected files, found an empty folder: {tmp_path / 'empty'}",
            "correct the path, or put the files there",
        ),
        (
            "wrong_field",
            f"{tmp_path / 'a.jsonl'}:1",
            "expected the field text, there are: content, title",
            "set ingest.read.1.text_field: content",
        ),
        (
            "wrong_field",
            str(tmp_path / "rows.parquet"),
            "expected the column text, there are: txt, url",
            "set ingest.read.2.text_field: txt; files of another kind need a separate source",
        ),
        (
            "unreadable_source",
            f"{tmp_path / 'numbers.jsonl'}:1",
            "none of its first 9 records can be read: the field text is not a string: it is a number",
            "see ingest.read.4: its format, encoding and fields",
        ),
    ]


@pytest.mark.parametrize(
    ("config", "record", "fix"),
    [
        (InstructionsConfig, {"instruction": "a", "outputs": "b"}, "set instructions.read.0.response_field: outputs"),
        (
            PreferencesConfig,
            {"ask": "a", "chosen": "b", "rejected": "c"},
            "set preferences.read.0.prompt_field: ask",
        ),
    ],
)
def test_pairs_name_the_setting_of_the_field_that_is_missing(
    tmp_path: Path, config: Any, record: dict[str, str], fix: str
) -> None:
    (problem,) = first_record_problems(config(read=[files(lines(tmp_path / "pairs.jsonl", record))]))
    assert (problem.code, problem.fix) == ("wrong_field", fix)


def test_a_folder_whose_first_file_is_empty_is_read_at_the_next(tmp_path: Path) -> None:
    (tmp_path / ".gitkeep").touch()
    lines(tmp_path / "a.jsonl", {"body": "text"})
    (problem,) = first_record_problems(IngestConfig(read=[files(str(tmp_path))]))
    assert problem.path == f"{tmp_path / 'a.jsonl'}:1"
    (tmp_path / "a.jsonl").write_text("")
    (problem,) = first_record_problems(IngestConfig(read=[files(str(tmp_path))]))
    assert problem.code == "empty_source"


def test_files_that_no_reader_reads_are_counted_by_format(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name, start in {
        "a.txt": b"A text.",
        "b.pdf": b"%PDF-1.7",
        "c.pdf": b"%PDF-1.7",
        "d": b"%PDF-1.7",
        "e.zip": b"PK\x03\x04",
        "f.png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
    }.items():
        (tmp_path / "in" / name).write_bytes(start)
    problems = first_record_problems(IngestConfig(read=[files(str(tmp_path / "in"))]))
    unread = "of 6 files no reader supports"
    assert [(problem.code, problem.path, problem.message) for problem in problems] == [
        ("unread_format", "ingest.read.0.paths", f"{unread} 3 PDF files, e.g. {tmp_path}/in/b.pdf"),
        ("unread_format", "ingest.read.0.paths", f"{unread} 1 ZIP archive, e.g. {tmp_path}/in/e.zip"),
        ("binary_source", "ingest.read.0.paths", f"{unread} 1 binary file, e.g. {tmp_path}/in/f.png"),
    ]
    assert "docling" in problems[0].fix and "unpack" in problems[1].fix
    (tmp_path / "in" / "0.pdf").write_bytes(b"%PDF-1.7")  # the first by name
    aside = IngestConfig(read=[files(str(tmp_path / "in"), broken_files="quarantine")])
    assert first_record_problems(aside) == []
    named = IngestConfig(read=[files(str(tmp_path / "in" / "*.txt"))])
    assert first_record_problems(named) == []
