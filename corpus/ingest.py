"""Reads documents from outside the store into Parquet.

python -m corpus.ingest --config ingest.yaml --out DIR
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from corpus.config import IngestConfig
from corpus.demo.comments import comment_documents
from corpus.demo.config import CommentDocuments, DocstringDocuments
from corpus.demo.texts import ALL_DOCSTRINGS_MB, documents
from corpus.documents.parts import Document, DocumentWriter, link_parts, make_document
from corpus.documents.quarantine import Rejected, Tally
from corpus.documents.sources import SourceCounts, SourceFacts, write_sources
from corpus.readers.encodings import whole_characters
from corpus.readers.plan import FilePart, partitions_of
from corpus.readers.record import Text, Unreadable, too_long
from corpus.readers.selected import note_left_out
from corpus.readers.texts import read_texts
from infra.io.json import parse_own_json
from infra.process.pace import report
from infra.process.partitions import Summary, map_partitions, partition_folder
from infra.run import Result, Run

STEP = "read"
QUARANTINE = "quarantine.jsonl"


@dataclass(frozen=True)
class IngestPart:
    """One partition: some pieces of the source with this index in `read`; the docstrings are one by themselves."""

    source: int
    pieces: tuple[FilePart, ...]
    megabytes: float


def ingest(config: IngestConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Write documents/part-*.parquet and sources.json; aux/quarantine.jsonl and aux/sources.json.

    Of each source, the records read and those quarantined add up to all that it has.
    Raises StageError: what `corpus.readers.texts.read_texts`, `corpus.demo.docstrings.installed_files` and
    `corpus.documents.quarantine.Tally.check` raise.
    """
    left_out = note_left_out(config.read, "ingest", run)
    readings = _readings(config)
    sizes = [reading.megabytes for reading in readings]
    unit, scale = ("MB", 1) if sum(sizes) >= 10 else ("kB", 1000)
    read = map_partitions(
        run,
        STEP,
        partial(read_partition, config),
        readings,
        unit=f"{unit} of files",
        sizes=[scale * megabytes for megabytes in sizes],
    )
    folders = [partition_folder(run, STEP, index) for index in range(len(readings))]
    by_source: list[list[Summary]] = [[] for _ in config.read]
    for reading, summary in zip(readings, read, strict=True):
        by_source[reading.source].append(summary)

    rows = [
        {**_row(config, index, summaries), "skipped_files": left_out[index]}
        for index, summaries in enumerate(by_source)
    ]
    aux = out_dir / "aux"
    aux.mkdir(parents=True, exist_ok=True)
    _join_quarantines(readings, read, folders, aux / QUARANTINE)
    for row, summaries in zip(rows, by_source, strict=True):
        Tally.sum(summary["quarantined"] for summary in summaries).check(
            row["records"], config.max_quarantine_share, row["source"]
        )
    (aux / "sources.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf8")
    link_parts(folders, out_dir)
    facts = {
        name: SourceFacts(source.licence, source.weight, source.language)
        for name, source in zip(config.names(), config.read, strict=True)
    }
    write_sources(out_dir, facts, SourceCounts.sum(summary["counts"] for summary in read))
    figures = {name: sum(row[name] for row in rows) for name in ("documents", "bytes", "quarantined", "repaired")}
    figures["text_bytes"] = figures.pop("bytes")
    return Result(figures, f"{figures['documents']:,} documents, {figures['text_bytes'] / 1e6:.1f} MB of text")


def read_partition(config: IngestConfig, reading: IngestPart, out: Path) -> Summary:
    """Write documents/ and quarantine.jsonl of one partition, and count the records that it read."""
    counts, tally, origins = SourceCounts(), Tally(), Counter[str]()
    records, repaired = 0, 0
    with DocumentWriter(out / "documents") as writer, (out / QUARANTINE).open("w", encoding="utf8") as quarantine:
        for item in _items(config, reading):
            if isinstance(item.what, Rejected):
                tally.add(item.what)
                if not item.what.is_skipped:
                    quarantine.write(item.what.as_line(piece=item.piece))
                continue
            writer.write(item.what)
            counts.add(item.what)
            origins[item.origin] += 1
            records += item.is_new_record
            repaired += item.is_repaired
            report(out, min(writer.text_bytes / 1e6, reading.megabytes), writer.text_bytes)
    return {
        "records": records,
        "documents": writer.documents,
        "bytes": writer.text_bytes,
        "repaired": repaired,
        "quarantined": tally.as_json(),
        "origins": dict(origins),
        "counts": counts.as_json(),
        "lines": [piece.span.lines if piece.span else 0 for piece in reading.pieces],
    }


@dataclass(frozen=True, slots=True)
class _Item:
    """A document, or a record that was put aside; and the package or file that it is counted under."""

    what: Document | Rejected
    piece: int = 0
    origin: str = ""
    is_new_record: bool = True
    is_repaired: bool = False


def _items(config: IngestConfig, reading: IngestPart) -> Iterator[_Item]:
    source, name = config.read[reading.source], config.names()[reading.source]
    if isinstance(source, DocstringDocuments | CommentDocuments):
        yield from _of_packages(source, name)
        return
    for number, piece in enumerate(reading.pieces):
        origin = whole_characters(piece.file.name)  # a name on disk need not be UTF-8
        for text in read_texts(source, piece, f"ingest.read.{reading.source}"):
            if isinstance(text, Rejected):
                yield _Item(text, number)
                continue
            try:
                metadata = whole_characters(_metadata_of(text, int(source.max_document_mb * 1e6)))
            except Unreadable as error:
                if text.part == 0:  # reported once, for the first piece of a record
                    yield _Item(Rejected(str(text.file), text.line, str(error)), number)
                continue
            document = make_document(text.text, f"{name}/{origin}", None, source.language, metadata)
            yield _Item(document, number, origin, text.part == 0, text.is_repaired)


def _metadata_of(text: Text, max_characters: int) -> str:
    """Return the other requested fields of a record as JSON; numbers that JSON does not have, such as NaN, are null.
    Raises Unreadable."""
    if not text.metadata:
        return ""
    try:
        metadata = json.dumps(text.metadata, ensure_ascii=False, default=str)
        if "NaN" in metadata or "Infinity" in metadata:
            parsed = json.loads(metadata, parse_constant=lambda _: None)  # noqa: TID251  text of the line above
            metadata = json.dumps(parsed, ensure_ascii=False)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"metadata that are not JSON: {error}") from None
    if len(metadata) > max_characters:
        raise Unreadable(too_long(max_characters, "metadata"))
    return metadata


def _of_packages(source: DocstringDocuments | CommentDocuments, name: str) -> Iterator[_Item]:
    read = comment_documents(source, name) if isinstance(source, CommentDocuments) else documents(source, name)
    for item in read:
        yield _Item(item) if isinstance(item, Rejected) else _Item(item, origin=item.source.split("/")[1])


def _readings(config: IngestConfig) -> list[IngestPart]:
    readings = []
    for index, source in enumerate(config.read):
        if isinstance(source, DocstringDocuments | CommentDocuments):
            readings.append(IngestPart(index, (), source.limit_mb or ALL_DOCSTRINGS_MB))
            continue
        for pieces in partitions_of(source, source.places()):
            readings.append(IngestPart(index, tuple(pieces), sum(piece.size for piece in pieces) / 1e6))
    return readings


def _row(config: IngestConfig, index: int, summaries: Sequence[Summary]) -> dict[str, Any]:
    """Return the row of a source in aux/sources.json."""
    origins: Counter[str] = Counter()
    for summary in summaries:
        origins.update(summary["origins"])
    tally = Tally.sum(summary["quarantined"] for summary in summaries)
    totals = ("documents", "records", "bytes", "repaired")
    return {
        "source": f"ingest.read.{index}",
        "name": config.names()[index],
        "kind": config.read[index].kind,
        **{name: sum(summary[name] for summary in summaries) for name in totals},
        "quarantined": tally.total,
        "reasons": dict(tally.counts.most_common()),
        "skipped_records": dict(tally.skipped.most_common()),
        "origins": dict(sorted(origins.items())),
    }


def _join_quarantines(
    readings: Sequence[IngestPart], read: Sequence[Summary], folders: Sequence[Path], out: Path
) -> None:
    """Join the rows of all partitions; lines of a file that was read in parts are counted from its start."""
    before = 0
    with out.open("w", encoding="utf8") as joined:
        for reading, summary, folder in zip(readings, read, folders, strict=True):
            offsets = []
            for piece, lines in zip(reading.pieces, summary["lines"], strict=True):
                before = before if piece.span and piece.span.start else 0
                offsets.append(before)
                before += lines
            for line in (folder / QUARANTINE).read_text(encoding="utf8").splitlines():
                row = parse_own_json(line)
                piece_number = row.pop("piece")
                if row["line"] and offsets:
                    row["line"] += offsets[piece_number]
                joined.write(json.dumps({"source": f"ingest.read.{reading.source}", **row}) + "\n")


if __name__ == "__main__":
    from infra.alone import main

    main(ingest, IngestConfig)
