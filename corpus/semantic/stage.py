"""Drops documents that say the same as another one that stays, in other words or not (SemDeDup, Abbas et al., 2023).

Each document is embedded; the embeddings are divided into clusters; within each cluster, documents whose embeddings are
similar enough are duplicates.

python -m corpus.semantic.stage --config semantic.yaml --input documents=DIR --out DIR
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from corpus.dedupe.report import cluster_rows, clusters_to_show, pair_counts, similarity_histogram
from corpus.dedupe.search import Duplicates, Indices
from corpus.dedupe.write import DUPLICATES, SEMANTIC_RULE, DecidedPart, Decisions, WriteKept
from corpus.documents.dropped import SCHEMA as DROPPED
from corpus.documents.dropped import tell_of_vanished, warning
from corpus.documents.parts import concatenate, document_parts
from corpus.documents.passes import Passes, write_json
from corpus.documents.selection import link_selections, read_table
from corpus.documents.sources import SourceCounts, read_sources, source_numbers, write_sources
from corpus.semantic.clusters import Clusters, Numbers, Similarities, find_clusters, find_duplicates
from corpus.semantic.config import SemanticDedupeConfig
from corpus.semantic.embeddings import EmbeddingFile, embed_documents
from infra.run import Result, Run


def semantic_dedupe(config: SemanticDedupeConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Writes documents/ and text/ (see `corpus.documents.selection`) and sources.json; aux/dropped.parquet,
    aux/duplicates.parquet (each duplicate with the document that stays and their similarity), aux/clusters.json
    (samples) and aux/counts.json.

    A document goes only if one that stays is as similar to it as `threshold` asks. Memory grows by about 60 bytes per
    document; embeddings are on disk. Raises StageError as `corpus.semantic.encoder.TextEncoder`.
    """
    passes = Passes(run, document_parts(inputs["documents"]))
    file, cut = embed_documents(config, passes)
    clusters = find_clusters(file, config, run.stop_if_cancelled)
    duplicates = _duplicates(file, clusters, config, run)
    names, sources, ids = _facts(passes)
    shown = clusters_to_show(duplicates)
    numbers = np.unique([*shown, *(document for members in shown.values() for document in members)]).astype(int)
    decisions = Decisions(run.work_dir / "decisions")
    decisions.save(
        originals=duplicates.originals,
        similarities=duplicates.similarities,
        exact=duplicates.exact,
        ids=ids,
        sources=sources,
        shown=numbers,
    )
    items = [DecidedPart(part, first) for part, first in zip(passes.parts, passes.firsts, strict=True)]
    written = passes.over("write", WriteKept(decisions, tuple(names), config.threshold, SEMANTIC_RULE), items)
    texts = dict(zip(numbers.tolist(), (text for summary in written for text in summary["shown"]), strict=True))

    folders, aux = passes.folders("write"), out_dir / "aux"
    counts = SourceCounts.sum(summary["counts"] for summary in written)
    link_selections(folders, out_dir)
    given = read_sources(inputs["documents"])
    write_sources(out_dir, given, counts)
    concatenate((folder / "dropped.parquet" for folder in folders), aux / "dropped.parquet", DROPPED)
    concatenate((folder / "duplicates.parquet" for folder in folders), aux / "duplicates.parquet", DUPLICATES)
    write_json(aux / "clusters.json", cluster_rows(shown, texts, duplicates, ids, names, sources))
    vanished = tell_of_vanished("semantic_dedupe", given, counts, aux / "dropped.parquet", run)
    report = _report(config, duplicates, clusters, counts, names, sources) | {"cut": cut}
    write_json(aux / "counts.json", {**report, **({"vanished": vanished} if vanished else {})})
    return _result(report, warning(vanished))


def _duplicates(file: EmbeddingFile, clusters: Clusters, config: SemanticDedupeConfig, run: Run) -> Duplicates:
    duplicates = Duplicates.none_of(file.rows)
    for cluster, members in enumerate(clusters.members()):
        ordered = in_order(members, clusters.similarities, config.keep)
        originals, similarities = find_duplicates(file, ordered, config.threshold, run.stop_if_cancelled)
        duplicates.originals[ordered], duplicates.similarities[ordered] = originals, similarities
        run.progress(cluster + 1, clusters.count, "clusters", f"{int((duplicates.originals >= 0).sum()):,} duplicates")
    return duplicates


def in_order(documents: Numbers, similarities: Similarities, keep: str) -> Numbers:
    """Return the documents of a cluster, given ascending, in the order in which they are to be kept.

    similarities (N,): of all documents of the corpus, to the centroids of their clusters.
    """
    if keep == "first":
        return documents
    here = similarities[documents]
    return documents[np.argsort(here if keep == "farthest" else -here, kind="stable")]


def _facts(passes: Passes) -> tuple[list[str], Indices, np.ndarray]:
    """The names of all sources, the number of each document's among them (N,), and the ids (N,)."""
    tables = [read_table(part, ["id", "source"]) for part in passes.parts]
    named = [source_numbers(table["source"]) for table in tables]
    names = sorted({name for some, _ in named for name in some})
    rank = {name: number for number, name in enumerate(names)}
    sources = [np.array([rank[name] for name in some], np.int32)[numbers] for some, numbers in named]
    ids = [np.array(table["id"].to_pylist(), dtype=bytes) for table in tables]
    return names, np.concatenate(sources), np.concatenate(ids)


def _report(
    config: SemanticDedupeConfig,
    duplicates: Duplicates,
    clusters: Clusters,
    counts: SourceCounts,
    names: Sequence[str],
    sources: Indices,
) -> dict[str, Any]:
    removed = duplicates.originals >= 0
    _, sizes = np.unique(duplicates.originals[removed], return_counts=True)
    return {
        "read": removed.size,
        "kept": counts.documents.total(),
        "kept_bytes": counts.bytes.total(),
        "dropped": {SEMANTIC_RULE: int(removed.sum())},
        "groups": sizes.size,
        "largest_group": int(sizes.max(initial=0)) + 1,
        "clusters": clusters.count,
        "largest_cluster": int(np.bincount(clusters.labels).max()),
        "pairs": pair_counts(duplicates, names, sources),
        "near": {"similarities": similarity_histogram(duplicates, config.threshold)},
    }


def _result(report: Mapping[str, Any], warned: str) -> Result:
    dropped = report["dropped"][SEMANTIC_RULE]
    figures = {
        "documents": report["kept"],
        "text_bytes": report["kept_bytes"],
        "dropped": dropped,
        "clusters": report["clusters"],
        "documents_cut": report["cut"],
    }
    headline = f"kept {report['kept']:,} of {report['read']:,} documents: {dropped:,} semantic duplicates"
    if report["cut"]:
        headline += f"; of {report['cut']:,} documents only the beginning was compared"
    return Result(figures, headline + warned)


if __name__ == "__main__":
    from infra.alone import main

    main(semantic_dedupe, SemanticDedupeConfig)
