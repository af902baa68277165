"""Damaged documents of other programs, each as small as fuzzing found it: put aside, or refused by a plain error."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import pytest

from corpus.documents.quarantine import Rejected
from corpus.documents.selection import read_batches
from corpus.readers.config import FileDocuments
from corpus.readers.plan import FilePart
from corpus.readers.texts import read_texts
from infra.errors import StageError

CELL = {"cell_type": "code", "source": "print(1)"}


def read(path: Path) -> list[object]:
    source = FileDocuments.model_validate({"paths": [str(path)]})
    return list(read_texts(source, FilePart(path, path.stat().st_size), "ingest.read.0"))


@pytest.mark.parametrize(
    "notebook",
    [
        {"cells": [None, CELL]},
        {"cells": [{"source": ["a", None]}]},
        {"cells": [{"source": None}]},
        {"worksheets": [3]},
        {"worksheets": 3},
        {"cells": 3},
        [],
    ],
    ids=str,
)
def test_a_notebook_of_another_form_is_put_aside(notebook: object, tmp_path: Path) -> None:
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps(notebook))
    [item] = read(path)
    assert isinstance(item, Rejected) and "not a notebook" in item.reason


@pytest.mark.parametrize("metadata", [[], {"kernelspec": []}, {"kernelspec": None, "language_info": 3}], ids=str)
def test_the_language_of_a_notebook_may_be_anything(metadata: object, tmp_path: Path) -> None:
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps({"cells": [CELL], "metadata": metadata}))
    [item] = read(path)
    assert not isinstance(item, Rejected)


@pytest.mark.parametrize(("name", "member"), [("a.docx", "word/document.xml"), ("a.epub", "a.xhtml")])
def test_an_archive_that_lacks_its_beginning_is_refused_by_name(name: str, member: str, tmp_path: Path) -> None:
    """zipfile raises ValueError for it: "negative seek value"."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(member, "<p>a</p>")
    path = tmp_path / name
    for cut in (1, 20):
        path.write_bytes(file.getvalue()[cut:])
        with pytest.raises(StageError, match=name):
            read(path)


def test_a_word_document_that_is_nested_too_deep_is_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "a.docx"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", "<w:a>" * 5_000 + "</w:a>" * 5_000)
    [item] = read(path)
    assert isinstance(item, Rejected) and "nested" in item.reason


def test_a_part_of_documents_that_is_no_longer_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "part-00000.parquet").write_bytes(b"x")
    with pytest.raises(StageError, match=r"part-00000.parquet: this file is damaged"):
        list(read_batches(tmp_path / "part-00000.parquet", 10, ["id"]))
