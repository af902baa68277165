"""The last pass over the text: the documents that are kept, those that are dropped and the reasons, and the texts shown
in the report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from corpus.documents.dropped import dropped_rows
from corpus.documents.selection import read_table, write_selection
from corpus.documents.sources import count_table
from infra.process.partitions import Summary

EXACT_RULE, NEAR_RULE, SEMANTIC_RULE = "exact_duplicate", "near_duplicate", "semantic_duplicate"
PAPERS = {
    EXACT_RULE: "C4, Raffel et al., 2020",
    NEAR_RULE: "Broder, 1997; Lee et al., 2022",
    SEMANTIC_RULE: "SemDeDup, Abbas et al., 2023",
}
DUPLICATES = pa.schema(
    [
        *((name, pa.string()) for name in ("id", "source", "rule", "original", "original_source")),
        ("similarity", pa.float32()),
    ]
)
"""aux/duplicates.parquet: one row per dropped document. original: the id of the document that was kept instead;
original_source: the name of its source."""
SHOWN_CHARACTERS = 600


@dataclass(frozen=True)
class Decisions:
    """Files over all N documents of the corpus: the documents that are kept, and the records of the others."""

    folder: Path

    def load(self, name: str) -> np.ndarray:
        """originals (N,), similarities (N,), exact (N,), ids (N,), sources (N,) as numbers, shown: sorted numbers of
        documents whose text is asked for."""
        found: np.ndarray = np.load(self.folder / f"{name}.npy", mmap_mode="r")
        return found

    def save(self, **arrays: np.ndarray) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, array in arrays.items():
            np.save(self.folder / f"{name}.npy", array)


@dataclass(frozen=True)
class DecidedPart:
    """A part whose documents are those from number `first` on."""

    part: Path
    first: int


@dataclass(frozen=True)
class WriteKept:
    """Writes of one part documents/, dropped.parquet and duplicates.parquet.

    rule: of duplicates that are not exact ones.
    """

    decisions: Decisions
    source_names: tuple[str, ...]
    threshold: float
    rule: str = NEAR_RULE

    def __call__(self, item: DecidedPart, out: Path) -> Summary:
        table = read_table(item.part, ["id", "text", "source"])
        here = slice(item.first, item.first + len(table))
        originals = self.decisions.load("originals")[here]
        kept = originals < 0
        write_selection(item.part, np.flatnonzero(kept), out)
        self._write_duplicates(table, here, np.flatnonzero(~kept), out)
        shown = self.decisions.load("shown")
        wanted = shown[np.searchsorted(shown, here.start) : np.searchsorted(shown, here.stop)] - here.start
        texts = table["text"].take(pa.array(wanted)).to_pylist()
        return {
            "counts": count_table(table, kept).as_json(),
            "documents": len(table),
            "bytes": table["text"].nbytes,
            "shown": [text[:SHOWN_CHARACTERS] for text in texts],
        }

    def _write_duplicates(self, table: pa.Table, here: slice, gone: np.ndarray, out: Path) -> None:
        again = table.take(pa.array(gone))
        originals = self.decisions.load("originals")[here][gone]
        similarities = self.decisions.load("similarities")[here][gone]
        exact = self.decisions.load("exact")[here][gone]
        rules = [EXACT_RULE if same else self.rule for same in exact]
        papers = [PAPERS[rule] for rule in rules]
        rows = dropped_rows(again, rules, papers, similarities, high=self.threshold)
        pq.write_table(rows, out / "dropped.parquet", compression="zstd")
        names = np.array(self.source_names, dtype=object)
        columns = {
            "id": again["id"],
            "source": again["source"],
            "rule": pa.array(rules, pa.string()),
            "original": pa.array(self.decisions.load("ids")[originals].astype(str), pa.string()),
            "original_source": pa.array(names[self.decisions.load("sources")[originals]], pa.string()),
            "similarity": pa.array(similarities),
        }
        pq.write_table(pa.table(columns, schema=DUPLICATES), out / "duplicates.parquet", compression="zstd")
