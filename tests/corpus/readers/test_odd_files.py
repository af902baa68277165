"""Files as other programs leave them: padded archives, one object over several lines, splits named twice."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from corpus.config import TokenizerConfig
from corpus.documents.quarantine import Rejected
from corpus.readers.config import FileDocuments
from corpus.readers.formats.json_lines import is_list
from corpus.readers.hub import dataset_files
from corpus.readers.plan import FilePart
from corpus.readers.texts import read_texts
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


def test_splits_are_listed_once(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "train"]}')
    with pytest.raises(StageError, match=r"the splits are: train( |$)"):
        dataset_files(str(tmp_path), None, "test", None)


def test_a_wordpiece_vocabulary_has_room_for_all_bytes() -> None:
    with pytest.raises(ValidationError, match="at least 518"):
        TokenizerConfig(kind="wordpiece", vocab_size=400)
    assert TokenizerConfig(kind="wordpiece", vocab_size=518).vocab_size == 518
    assert TokenizerConfig(vocab_size=400).kind == "bpe"
