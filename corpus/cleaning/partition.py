"""Cleans one partition of documents and counts the outcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from corpus.cleaning.config import CleanConfig
from corpus.cleaning.rules import Broken, CleaningStep
from corpus.cleaning.steps import steps_of
from corpus.documents.dropped import SCHEMA as DROPPED
from corpus.documents.parts import Document, DocumentWriter, read_part
from corpus.documents.sources import SourceCounts
from infra.process.pace import report

CHANGED = pa.schema([(name, pa.string()) for name in ("id", "new_id", "source", "by")])
BATCH_CHARACTERS = 1_000_000
BATCH_DOCUMENTS = 1000
SAMPLES = 5
SAMPLE_CHARACTERS = 600


@dataclass
class PartitionOutcome:
    """Outcome of the documents of a partition."""

    read: int = 0
    dropped: list[dict[str, Any]] = field(default_factory=list)
    changed: list[dict[str, str]] = field(default_factory=list)
    by_rule: Counter[str] = field(default_factory=Counter)
    samples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def drop(self, document: Document, broken: Broken) -> None:
        rule = broken.rule
        self.by_rule[rule.name] += 1
        self.dropped.append(
            {
                "id": document.id,
                "source": document.source,
                "rule": rule.name,
                "paper": rule.paper,
                "value": broken.value,
                "low": rule.low,
                "high": rule.high,
                "text": document.text,
            }
        )
        self._sample(rule.name, document, value=broken.value)

    def keep(self, original: Document, document: Document, by: Sequence[str]) -> None:
        if by:
            self.changed.append(
                {"id": original.id, "new_id": document.id, "source": document.source, "by": " ".join(by)}
            )
            self._sample("changed", document, by=" ".join(by))
        self._sample("kept", document)

    def _sample(self, kind: str, document: Document, **extra: Any) -> None:
        """Keep those with the smallest ids: a sample that no order and no number of workers changes."""
        rows = self.samples.setdefault(kind, [])
        if len(rows) == SAMPLES and _position(rows[-1]) <= (document.id, document.source):
            return
        rows.append({"id": document.id, "source": document.source, "text": document.text[:SAMPLE_CHARACTERS], **extra})
        rows.sort(key=_position)
        del rows[SAMPLES:]


@cache
def _steps(config: str, classifier: Path | None) -> list[CleaningStep]:
    """Return the steps of a config given as JSON. They are kept from partition to partition of a process: their tables
    then make them faster."""
    return steps_of(CleanConfig.model_validate_json(config), classifier)


def clean_partition(part: Path, out: Path, *, config: CleanConfig, classifier: Path | None = None) -> dict[str, Any]:
    """Write out/documents/, out/dropped.parquet and out/changed.parquet; return counts and samples."""
    steps = _steps(config.model_dump_json(), classifier)
    for step in steps:
        step.counts.clear()
    account, sources = PartitionOutcome(), SourceCounts()
    with DocumentWriter(out / "documents") as writer:
        for batch in _batches(part):
            for document in _clean(batch, steps, account):
                writer.write(document)
                sources.add(document)
            report(out, account.read, writer.text_bytes)
    pq.write_table(pa.Table.from_pylist(account.dropped, DROPPED), out / "dropped.parquet", compression="zstd")
    pq.write_table(pa.Table.from_pylist(account.changed, CHANGED), out / "changed.parquet", compression="zstd")
    return {
        "read": account.read,
        "documents": writer.documents,
        "bytes": writer.text_bytes,
        "dropped": dict(account.by_rule),
        "changed": len(account.changed),
        "counts": {name: count for step in steps for name, count in step.counts.items()},
        "sources": sources.as_json(),
        "samples": account.samples,
    }


def _clean(batch: list[Document], steps: Sequence[CleaningStep], account: PartitionOutcome) -> Iterator[Document]:
    account.read += len(batch)
    current: list[tuple[Document, Document, tuple[str, ...]]] = [(document, document, ()) for document in batch]
    for step in steps:
        if not current:
            break
        standing = []
        outcomes = step([document for _, document, _ in current])
        for (original, document, step_names), outcome in zip(current, outcomes, strict=True):
            if isinstance(outcome, Broken):
                account.drop(document, outcome)
                continue
            for new in outcome if isinstance(outcome, list) else [outcome]:
                standing.append((original, new, step_names if new.text == document.text else (*step_names, step.name)))
        current = standing
    for original, document, step_names in current:
        account.keep(original, document, step_names)
        yield document


def _batches(part: Path) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in read_part(part):
        batch.append(document)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS or len(batch) == BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def merge_samples(summaries: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    merged: dict[str, list[dict[str, Any]]] = {}
    for summary in summaries:
        for kind, rows in summary["samples"].items():
            merged[kind] = sorted([*merged.get(kind, ()), *rows], key=_position)[:SAMPLES]
    return merged


def _position(row: dict[str, Any]) -> tuple[str, str]:
    return row["id"], row["source"]
