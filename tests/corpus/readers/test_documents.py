"""Documents on disk: parts as partitions, what is known of their sources, and joining what partitions gave."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from corpus.clean import clean
from corpus.cleaning.config import CleanConfig
from corpus.config import IngestConfig
from corpus.documents.parts import (
    DocumentWriter,
    concatenate,
    document_parts,
    link_parts,
    make_document,
    read_documents,
)
from corpus.documents.sources import read_sources
from corpus.ingest import ingest

PROSE = (
    "The quiet river of the north bends twice before it reaches the old mill, and that is all there is to say of it."
)


def write_part(folder: Path, *texts: str) -> Path:
    with DocumentWriter(folder / "documents") as writer:
        for text in texts:
            writer.write(make_document(text, "here/file", language="en", metadata='{"page": 1}'))
    return folder


def test_what_is_written_is_read_again(tmp_path):
    [document] = read_documents(write_part(tmp_path, PROSE))
    assert document == make_document(PROSE, "here/file", language="en", metadata='{"page": 1}')
    assert document.group == document.id


def test_a_part_is_full_of_metadata_too_and_texts_may_be_empty(tmp_path, monkeypatch):
    with DocumentWriter(tmp_path / "metadata" / "documents", part_bytes=4_000_000) as writer:
        for index in range(20):
            writer.write(make_document(f"{index}", "here", metadata=f'{{"page": "{"x" * 1_000_000}"}}'))
    assert [pq.read_metadata(part).num_rows for part in document_parts(tmp_path / "metadata")] == [4] * 5
    monkeypatch.setattr("corpus.documents.parts.BATCH_DOCUMENTS", 10)
    with DocumentWriter(tmp_path / "empty" / "documents") as writer:
        for _ in range(30):
            writer.write(make_document("", "here"))
    [part] = document_parts(tmp_path / "empty")
    assert pq.read_metadata(part).num_row_groups == 3


def test_a_part_is_closed_when_it_is_full(tmp_path):
    with DocumentWriter(tmp_path / "documents", part_bytes=4_000_000) as writer:
        for index in range(90):
            writer.write(make_document(f"{index} " + "x" * 100_000, "here"))
    sizes = [pq.read_metadata(part).num_rows for part in document_parts(tmp_path)]
    assert sum(sizes) == 90 and len(sizes) == 3


def test_parts_of_partitions_are_numbered_anew_and_empty_ones_left_out(tmp_path):
    folders = [write_part(tmp_path / "0", "a"), write_part(tmp_path / "1"), write_part(tmp_path / "2", "b", "c")]
    pq.write_table(pa.table({"id": []}), tmp_path / "1" / "documents" / "part-00000.parquet")
    linked = link_parts(folders, tmp_path / "out")
    assert [part.name for part in linked] == ["part-00000.parquet", "part-00001.parquet"]
    assert [document.text for document in read_documents(tmp_path / "out")] == ["a", "b", "c"]


def test_concatenating_keeps_rows_and_order(tmp_path):
    schema = pa.schema([("n", pa.int64())])
    files = [tmp_path / f"{index}.parquet" for index in range(3)]
    for index in (0, 2):
        pq.write_table(pa.table({"n": [index, index + 10]}), files[index])
    assert concatenate(files, tmp_path / "aux" / "all.parquet", schema) == 4
    assert pq.read_table(tmp_path / "aux" / "all.parquet")["n"].to_pylist() == [0, 10, 2, 12]


def test_what_the_config_says_of_sources_is_passed_on_with_each_stages_own_counts(build, write):
    described = {"name": "river", "licence": "CC0-1.0", "weight": 2, "language": "en"}
    config = IngestConfig(
        read=[
            {"kind": "files", "paths": [write("a.txt", PROSE)], **described},
            {"kind": "files", "paths": [write("b.txt", "Too short.")]},
        ]
    )
    ingested = build(ingest, config)
    assert {d.source: d.language for d in read_documents(ingested)} == {"river/a.txt": "en", "files/b.txt": ""}
    river, files = read_sources(ingested).values()
    assert (river.licence, river.weight, river.language) == ("CC0-1.0", 2, "en")
    assert (river.documents, river.bytes, files.documents) == (1, len(PROSE), 1)
    cleaned = read_sources(build(clean, CleanConfig(gopher_quality=None, gopher_repetition=None), documents=ingested))
    assert cleaned["river"] == river
    assert (cleaned["files"].documents, cleaned["files"].bytes) == (0, 0)


def test_sources_without_a_name_are_told_apart_and_names_stand_once():
    files = {"kind": "files", "paths": ["a"]}
    config = IngestConfig(read=[files, {**files, "name": "files-2"}, files, {"kind": "docstrings"}])
    assert config.names() == ["files", "files-2", "files-3", "docstrings"]
    with pytest.raises(ValueError, match="wiki is listed more than once"):
        IngestConfig(read=[{**files, "name": "wiki"}, {**files, "name": "wiki"}])
