"""Reads documents from outside the store into Parquet.

python -m corpus.ingest --config ingest.yaml --out DIR
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from corpus.config import DocstringDocuments, FileDocuments, IngestConfig
from corpus.docstrings import Unparsed, group_of, read_docstrings
from corpus.documents import Document, DocumentWriter, make_document
from corpus.quarantine import Quarantine, Rejected
from corpus.readers import by_name, read_texts
from infra.run import Result, Run
from infra.sources import expand

PROGRESS_EVERY = 500


def ingest(config: IngestConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Writes documents/part-*.parquet (id, text, source, group), aux/quarantine.jsonl and aux/sources.json.

    Of each source, the records read and those quarantined add up to all that it has.
    Raises StageError: what `corpus.readers.read_texts`, `corpus.docstrings.installed_files` and
    `corpus.quarantine.Quarantine.finish_source` raise.
    """
    rows = []
    with (
        Quarantine(out_dir / "aux" / "quarantine.jsonl", config.max_quarantine_share) as quarantine,
        DocumentWriter(out_dir / "documents") as writer,
    ):
        for index, source in enumerate(config.read):
            key = f"ingest.read.{index}"
            quarantine.start_source(key)
            documents_before, bytes_before = writer.documents, writer.text_bytes
            origins: Counter[str] = Counter()
            for item in _items(source, key):
                if isinstance(item, Rejected):
                    quarantine.add(item)
                    continue
                writer.write(item)
                origins[_origin(item, source)] += 1
                if writer.documents % PROGRESS_EVERY == 0:
                    run.stop_if_cancelled()
                    run.progress(writer.documents, None, "documents", f"{writer.text_bytes / 1e6:.1f} MB")
            read = writer.documents - documents_before
            rows.append(
                {
                    "source": key,
                    "kind": source.kind,
                    "documents": read,
                    "quarantined": quarantine.finish_source(read),
                    "bytes": writer.text_bytes - bytes_before,
                    "origins": dict(sorted(origins.items())),
                }
            )
    (out_dir / "aux" / "sources.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf8")
    run.progress(writer.documents, writer.documents, "documents", f"{writer.text_bytes / 1e6:.1f} MB")
    figures = {"documents": writer.documents, "text_bytes": writer.text_bytes, "quarantined": quarantine.total}
    return Result(figures, f"{writer.documents:,} documents, {writer.text_bytes / 1e6:.1f} MB of text")


def _items(source: DocstringDocuments | FileDocuments, key: str) -> Iterator[Document | Rejected]:
    if isinstance(source, DocstringDocuments):
        yield from _docstring_documents(source)
        return
    for path in by_name(expand(source.paths)):
        for item in read_texts(source, path, key):
            yield item if isinstance(item, Rejected) else make_document(item.text, item.file.name)


def _docstring_documents(source: DocstringDocuments) -> Iterator[Document | Rejected]:
    limit = float("inf") if source.limit_mb is None else source.limit_mb * 1e6
    taken = 0
    for item in read_docstrings(source.packages, source.exclude_packages):
        if isinstance(item, Unparsed):
            yield Rejected(item.source, item.line, item.reason)
        elif len(item.text) >= source.min_characters:
            text = f"{item.signature}\n\n{item.text}" if source.signatures else item.text
            yield make_document(text, f"docstrings/{item.source}", group_of(item.text))
            taken += len(text.encode())
            if taken >= limit:
                return


def _origin(document: Document, source: DocstringDocuments | FileDocuments) -> str:
    """The package or file that a document is counted under."""
    return document.source.split("/")[1] if source.kind == "docstrings" else document.source


if __name__ == "__main__":
    from infra.alone import main

    main(ingest, IngestConfig)
