"""Drops documents that occur more than once, exactly or nearly, and lines and passages that are repeated.

Passes over the text, each partition by partition: signatures, the shingles of candidates, and what is kept; where asked
for, two before them that find and cut boilerplate, and three after them that find and cut repeated passages.

python -m corpus.dedupe.stage --config dedupe.yaml --input documents=DIR --out DIR
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from corpus.dedupe.boilerplate import cut_boilerplate
from corpus.dedupe.config import DedupeConfig, NearDuplicates
from corpus.dedupe.minhash import choose_bands
from corpus.dedupe.report import cluster_rows, clusters_to_show, pair_counts, similarity_histogram
from corpus.dedupe.search import (
    Duplicates,
    SetFile,
    find_exact,
    find_near,
    mark_candidates,
    order_of_preference,
)
from corpus.dedupe.signatures import IDS, NAMES, PartOfMarks, SignDocuments, WriteShingles
from corpus.dedupe.substrings import RULE as SUBSTRING_RULE
from corpus.dedupe.substrings import cut_substrings
from corpus.dedupe.write import DUPLICATES, EXACT_RULE, NEAR_RULE, DecidedPart, Decisions, WriteKept
from corpus.documents.dropped import SCHEMA as DROPPED
from corpus.documents.dropped import tell_of_vanished, warning
from corpus.documents.parts import concatenate, document_parts
from corpus.documents.passes import Passes, write_json
from corpus.documents.selection import link_selections
from corpus.documents.sources import SourceCounts, read_sources, write_sources
from infra.errors import stage_error
from infra.process.partitions import Summary
from infra.run import Result, Run


def dedupe(config: DedupeConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Writes documents/ and text/ (see `corpus.documents.selection`) and sources.json; aux/dropped.parquet,
    aux/duplicates.parquet (each duplicate with its original and their similarity), aux/clusters.json (samples) and
    aux/counts.json.

    Raises StageError `nothing_left` if every document is boilerplate, or too short without what it repeats. The first
    of similar documents by `keep` stays. A document goes only if one that stays is as similar to it as `near.threshold`
    asks. Memory grows by about 300 bytes per document, not with the text.
    """
    read = Passes(run, document_parts(inputs["documents"]))
    parts, boilerplate = cut_boilerplate(config.boilerplate, read) if config.boilerplate else (read.parts, None)
    if not parts:
        raise stage_error("nothing_left", "dedupe.boilerplate", "every document is boilerplate", "raise max_documents")
    passes = Passes(run, parts)
    signed = passes.over_all("signatures", SignDocuments(config))
    names = sorted({name for summary in signed for name in summary["names"]})
    found = find_duplicates(config, passes)
    clusters = clusters_to_show(found)
    ids, sources = passes.joined("signatures", IDS), _numbers(passes.folders("signatures"), signed, names)
    shown = np.unique([*clusters, *(document for members in clusters.values() for document in members)]).astype(int)
    decisions = Decisions(run.work_dir / "decisions")
    decisions.save(
        originals=found.originals,
        similarities=found.similarities,
        exact=found.exact,
        ids=ids,
        sources=sources,
        shown=shown,
    )
    threshold = config.near.threshold if config.near else 1.0
    items = [DecidedPart(part, first) for part, first in zip(passes.parts, passes.firsts, strict=True)]
    written = passes.over("write", WriteKept(decisions, tuple(names), threshold), items)
    texts = dict(zip(shown.tolist(), (text for summary in written for text in summary["shown"]), strict=True))

    folders = passes.folders("write")
    counts = SourceCounts.sum(summary["counts"] for summary in written)
    dropping = [*(read.folders("boilerplate") if boilerplate else ()), *folders]
    substrings: dict[str, Any] = {}
    if config.substrings:
        kept = [folder / "documents" / "part-00000.parquet" for folder in folders]
        cut = cut_substrings(config.substrings, config.across_sources, config.seed, kept, run)
        folders, counts, substrings = cut.folders, cut.counts, cut.report
        dropping += folders
        if not counts.documents.total():
            message = "every document is too short after repeated passages are cut"
            raise stage_error("nothing_left", "dedupe.substrings", message, "raise min_bytes, or lower min_characters")
    link_selections(folders, out_dir)
    given = read_sources(inputs["documents"])
    write_sources(out_dir, given, counts)
    aux = out_dir / "aux"
    concatenate((folder / "dropped.parquet" for folder in dropping), aux / "dropped.parquet", DROPPED)
    duplicates = (folder / "duplicates.parquet" for folder in passes.folders("write"))
    concatenate(duplicates, aux / "duplicates.parquet", DUPLICATES)
    write_json(aux / "clusters.json", cluster_rows(clusters, texts, found, ids, names, sources))
    report = _counts(config, found, counts, names, sources)
    if boilerplate:
        report["read"] += boilerplate["dropped"]
        report["dropped"]["boilerplate"] = boilerplate["dropped"]
        report["boilerplate"] = boilerplate
    if substrings:
        report["dropped"][SUBSTRING_RULE] = substrings["dropped"]
        report["substrings"] = substrings
    vanished = tell_of_vanished("dedupe", given, counts, aux / "dropped.parquet", run)
    write_json(aux / "counts.json", {**report, **({"vanished": vanished} if vanished else {})})
    return _result(report, warning(vanished))


def find_duplicates(config: DedupeConfig, passes: Passes) -> Duplicates:
    """Duplicates among signed documents, each with the document that is kept instead."""
    folders = passes.folders("signatures")
    order = order_of_preference(folders, config.keep)
    found = Duplicates.none_of(sum(passes.rows))
    if config.exact:
        find_exact(folders, order, found)
    if near := config.near:
        bands = choose_bands(near.threshold, near.min_recall, near.max_hashes)
        assert bands is not None
        sets = _sets_of_candidates(near, mark_candidates(folders, bands.bands, found, passes.run), passes)
        find_near(folders, bands.bands, sets, order, near.threshold, found, passes.run)
    return found


def _sets_of_candidates(near: NearDuplicates, marks: np.ndarray, passes: Passes) -> SetFile:
    file = passes.run.work_dir / "marks.npy"
    np.save(file, marks)
    items = [PartOfMarks(part, file, first) for part, first in zip(passes.parts, passes.firsts, strict=True)]
    passes.over("shingles", WriteShingles(near), items)
    return SetFile(passes.run.work_dir / "shingles.bin", passes.folders("shingles"), marks)


def _numbers(folders: Sequence[Path], signed: Sequence[Summary], names: Sequence[str]) -> np.ndarray:
    """The number of each document's source among `names`, (N,)."""
    place = {name: number for number, name in enumerate(names)}
    local = [np.array([place[name] for name in summary["names"]], np.int32) for summary in signed]
    return np.concatenate([here[np.load(folder / NAMES)] for here, folder in zip(local, folders, strict=True)])


def _counts(
    config: DedupeConfig, found: Duplicates, counts: SourceCounts, names: Sequence[str], sources: np.ndarray
) -> dict[str, Any]:
    gone = found.originals >= 0
    _, sizes = np.unique(found.originals[gone], return_counts=True)
    report: dict[str, Any] = {
        "read": gone.size,
        "kept": counts.documents.total(),
        "kept_bytes": counts.bytes.total(),
        "dropped": {EXACT_RULE: int(found.exact.sum()), NEAR_RULE: int((gone & ~found.exact).sum())},
        "clusters": sizes.size,
        "largest_cluster": int(sizes.max(initial=0)) + 1,
        "pairs": pair_counts(found, names, sources),
    }
    if near := config.near:
        bands = choose_bands(near.threshold, near.min_recall, near.max_hashes)
        assert bands is not None
        chosen = {"bands": bands.bands, "rows": bands.rows, "chance_at_threshold": bands.chance(near.threshold)}
        report |= {"near": {**chosen, "similarities": similarity_histogram(found, near.threshold)}}
    return report


def _result(report: Mapping[str, Any], warned: str) -> Result:
    exact, near = report["dropped"][EXACT_RULE], report["dropped"][NEAR_RULE]
    figures = {
        "documents": report["kept"],
        "text_bytes": report["kept_bytes"],
        "dropped": sum(report["dropped"].values()),
        **{f"dropped_{rule}": count for rule, count in report["dropped"].items()},
    }
    headline = f"kept {report['kept']:,} of {report['read']:,} documents: {exact:,} exact and {near:,} near duplicates"
    if cut := report.get("substrings"):
        figures["bytes_cut"] = cut["bytes_cut"]
        headline += f"; cut {cut['passages']:,} repeated passages, {cut['bytes_cut'] / 1e6:,.1f} MB"
    headline += warned
    return Result(figures, headline)


if __name__ == "__main__":
    from infra.alone import main

    main(dedupe, DedupeConfig)
