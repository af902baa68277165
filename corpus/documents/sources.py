"""Facts about each source of a corpus: passed from stage to stage in `sources.json`, with each stage's own counts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from corpus.documents.parts import Document
from infra.io.json import read_own_json

SOURCES = "sources.json"


@dataclass(frozen=True)
class SourceFacts:
    """A source's settings in the config, and its counts at this stage.

    licence: as the config has it; "" where it gives none.
    weight: number of times its documents are to be seen, relative to the other sources.
    language: ISO 639-1 code, "" where the config gives none.
    bytes: UTF-8 bytes of text.
    """

    licence: str = ""
    weight: float = 1.0
    language: str = ""
    documents: int = 0
    bytes: int = 0


def source_name(source: str) -> str:
    """The name of the source in the `source` of a document: all before the first slash."""
    return source.partition("/")[0]


class SourceCounts:
    """Counts documents and bytes of text by source; adds up over partitions through `as_json`."""

    def __init__(self) -> None:
        self.documents: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def add(self, document: Document) -> None:
        name = source_name(document.source)
        self.documents[name] += 1
        self.bytes[name] += len(document.text.encode())

    def as_json(self) -> dict[str, dict[str, int]]:
        return {"documents": dict(self.documents), "bytes": dict(self.bytes)}

    @classmethod
    def sum(cls, parts: Iterable[Mapping[str, Mapping[str, int]]]) -> SourceCounts:
        total = cls()
        for part in parts:
            total.documents.update(part["documents"])
            total.bytes.update(part["bytes"])
        return total


def source_numbers(sources: pa.ChunkedArray) -> tuple[list[str], NDArray[np.int32]]:
    """The names of the sources in a column of documents, sorted, and the number of each document's among them (N,)."""
    first = pc.list_element(pc.split_pattern(pc.cast(sources, pa.large_string()), "/", max_splits=1), 0)
    encoded = first.combine_chunks().dictionary_encode()
    names = encoded.dictionary.to_pylist()
    order = sorted(range(len(names)), key=names.__getitem__)
    rank = np.empty(len(names), np.int32)
    rank[order] = np.arange(len(names))
    return [names[i] for i in order], rank[encoded.indices.to_numpy()]


def count_table(documents: pa.Table, kept: NDArray[np.bool_]) -> SourceCounts:
    """Count the kept ones (N,) of the documents of a table, without making Python texts of them."""
    names, numbers = source_numbers(documents["source"])
    return count_by_source(names, numbers[kept], pc.binary_length(documents["text"]).to_numpy()[kept])


def count_by_source(names: Sequence[str], numbers: NDArray[np.integer], sizes: NDArray[np.integer]) -> SourceCounts:
    """Count documents (N,) by source: the number of its source among `names`, and its bytes."""
    documents = np.bincount(numbers, minlength=len(names)).tolist()
    by_name = np.bincount(numbers, weights=sizes, minlength=len(names)).astype(np.int64).tolist()
    counts = SourceCounts()
    for name, count, size in zip(names, documents, by_name, strict=True):
        if count:
            counts.documents[name], counts.bytes[name] = count, size
    return counts


def read_sources(artifact: Path) -> dict[str, SourceFacts]:
    """The sources of a documents artifact by name. One without sources.json, made by hand, has none."""
    file = artifact / SOURCES
    rows = read_own_json(file) if file.exists() else {}
    return {name: SourceFacts(**row) for name, row in rows.items()}


def write_sources(out_dir: Path, facts: Mapping[str, SourceFacts], counts: SourceCounts) -> None:
    """Write sources.json: the facts about the sources, with their current counts. A source of which nothing is left
    stays, with zeros."""
    names = [*facts, *sorted(set(counts.documents) - set(facts))]
    rows = {
        name: asdict(
            replace(facts.get(name, SourceFacts()), documents=counts.documents[name], bytes=counts.bytes[name])
        )
        for name in names
    }
    (out_dir / SOURCES).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf8")
