"""Folders as programs leave them: side files are no data, and a test split is left out by default."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from corpus.config import IngestConfig
from corpus.documents.parts import read_documents
from corpus.ingest import ingest
from corpus.readers.config import FileDocuments
from corpus.readers.hub import dataset_files
from corpus.recognition.first_records import first_record_problems
from infra.errors import StageError

LINE = json.dumps({"text": "A sentence about pears."}) + "\n"


def read_of(folder: Path | str, **keys: str) -> list[str]:
    return sorted(place.name for place in FileDocuments(paths=[str(folder)], **keys).places())


@pytest.mark.parametrize(
    "side",
    [
        "_SUCCESS", ".part-0.crc", ".DS_Store", "._a.jsonl", "a.jsonl~", ".a.jsonl.swp", "Thumbs.db", ".gitattributes",
        ".cache/huggingface/download/a.jsonl.metadata", "__MACOSX/a.jsonl", "README.md", "b.jsonl.incomplete",
        "__pycache__/a.pyc", "__pycache__/a.jsonl", "b.jsonl.partial", "@eaDir/a.jsonl", "$RECYCLE.BIN/a.jsonl",
        "~$letter.docx", "a.jsonl.bak", "a.jsonl.lock",
        "LICENSE", "NOTICE.txt", "CITATION.cff", "dataset_infos.json", "SHA256SUMS", "a.jsonl.md5",
    ],
)  # fmt: skip
def test_a_side_file_is_counted_and_no_document(
    side: str, write: Callable[..., str], build: Callable[..., Path]
) -> None:
    folder = Path(write("a.jsonl", LINE)).parent
    write(side, b"\0\0\1 no text")
    config = IngestConfig(read=[{"kind": "files", "paths": [str(folder)]}])
    assert first_record_problems(config) == []
    out = build(ingest, config)
    assert [document.text for document in read_documents(out)] == ["A sentence about pears."]
    [row] = json.loads((out / "aux" / "sources.json").read_text())
    assert row["skipped_files"] == 1 and row["quarantined"] == 0


def test_what_is_named_itself_is_read_whatever_its_name(write: Callable[..., str]) -> None:
    assert read_of(write(".hidden.jsonl", LINE)) == [".hidden.jsonl"]
    folder = Path(write("test.jsonl", LINE)).parent
    assert read_of(folder / "test.jsonl") == ["test.jsonl"] == read_of(folder / "tes*.jsonl")
    assert read_of(folder / ".h*") == [".hidden.jsonl"]


def test_a_readme_among_texts_is_a_text(write: Callable[..., str]) -> None:
    write("README.md", "Text.")
    assert read_of(Path(write("a.txt", "Text.")).parent) == ["README.md", "a.txt"]


def test_a_folder_of_side_files_alone_is_refused_before_a_run(write: Callable[..., str]) -> None:
    folder = Path(write("_SUCCESS", "")).parent
    [problem] = first_record_problems(IngestConfig(read=[{"kind": "files", "paths": [str(folder)]}]))
    assert problem.code == "empty_source" and "_SUCCESS" in problem.message


@pytest.mark.parametrize(
    ("names", "read"),
    [
        (["train.jsonl", "validation.jsonl", "test.jsonl"], ["train.jsonl"]),
        (["train/a.jsonl", "test/b.jsonl"], ["a.jsonl"]),
        (["data/train-00000-of-00002.parquet", "data/test-00000-of-00001.parquet"], ["train-00000-of-00002.parquet"]),
        (["wiki_train.jsonl.gz", "wiki_dev.jsonl.gz"], ["wiki_train.jsonl.gz"]),
        (["news.jsonl", "test.jsonl"], ["news.jsonl"]),
        (["news.jsonl", "test_pilots.jsonl"], ["news.jsonl", "test_pilots.jsonl"]),
        (["news.jsonl", "train_timetables.jsonl"], ["news.jsonl", "train_timetables.jsonl"]),
        (["test.jsonl"], ["test.jsonl"]),
        (["train.py", "test.py"], ["test.py", "train.py"]),
        (["news.jsonl", "holdout.jsonl", "eval.jsonl", "dev.csv"], ["news.jsonl"]),
        (["trainset.jsonl", "held_out.jsonl", "DevSet.jsonl"], ["trainset.jsonl"]),
        (["Train.csv", "Test.csv"], ["Train.csv"]),
        (["split=train/a.parquet", "split=test/b.parquet"], ["a.parquet"]),
        (["wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"], ["wiki.train.tokens"]),
    ],
)  # fmt: skip
def test_a_test_split_is_left_out_unless_all_splits_are_asked_for(
    names: list[str], read: list[str], write: Callable[..., str], tmp_path: Path
) -> None:
    for name in names:
        write(name, LINE)
    assert read_of(tmp_path / "sources") == read
    assert read_of(tmp_path / "sources" / "**" / "*.*") == read
    assert len(read_of(tmp_path / "sources", splits="all")) == len(names)


def test_the_note_names_the_files_that_are_left_out(write: Callable[..., str]) -> None:
    write("train.jsonl", LINE)
    folder = Path(write("test.jsonl", LINE)).parent
    note = FileDocuments(paths=[str(folder)]).selection().note
    assert note == (
        f"files left out: 1 of a validation or test split (`splits: all` reads them), e.g. {folder / 'test.jsonl'}"
    )


def test_train_in_the_name_of_one_file_of_a_dataset_takes_no_other_file_out(write: Callable[..., str]) -> None:
    write("train_timetables.jsonl", LINE)
    folder = Path(write("news.jsonl", LINE)).parent
    assert [file.name for file in dataset_files(str(folder), None, "train", None)] == [
        "news.jsonl",
        "train_timetables.jsonl",
    ]
    write("test.jsonl", LINE)
    with pytest.raises(StageError, match=r"every data file to name its split.*news\.jsonl"):
        dataset_files(str(folder), None, "train", None)
