"""Report of the duplicates in a corpus: samples of clusters, the sources that repeat each other, and similarities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from corpus.dedupe.search import Duplicates, Indices

LARGEST, DOUBTFUL, SHOWN_OF_A_CLUSTER = 10, 10, 3
HISTOGRAM_BINS = 20


def clusters_to_show(found: Duplicates) -> dict[int, list[int]]:
    """The largest clusters and those of the least similar duplicates: the kept document → some of its duplicates."""
    gone = np.flatnonzero(found.originals >= 0)
    kept, sizes = np.unique(found.originals[gone], return_counts=True)
    largest = kept[np.argsort(-sizes, kind="stable")[:LARGEST]]
    doubtful = gone[np.argsort(found.similarities[gone], kind="stable")[:DOUBTFUL]]
    shown = {int(original): np.flatnonzero(found.originals == original)[:SHOWN_OF_A_CLUSTER] for original in largest}
    for document in doubtful:
        shown.setdefault(int(found.originals[document]), np.array([document]))
    return {original: members.tolist() for original, members in shown.items()}


def cluster_rows(
    clusters: Mapping[int, Sequence[int]],
    texts: Mapping[int, str],
    found: Duplicates,
    ids: np.ndarray,
    names: Sequence[str],
    sources: Indices,
) -> list[dict[str, Any]]:
    """Rows of aux/clusters.json: the kept document, how many duplicates of it were dropped, and some of them."""

    def row(document: int) -> dict[str, Any]:
        return {"id": ids[document].decode(), "source": names[sources[document]], "text": texts[document]}

    return [
        {
            "kept": row(original),
            "dropped": int((found.originals == original).sum()),
            "samples": [
                {**row(document), "similarity": round(float(found.similarities[document]), 4)} for document in members
            ],
        }
        for original, members in clusters.items()
    ]


def pair_counts(found: Duplicates, names: Sequence[str], sources: Indices) -> list[dict[str, Any]]:
    """Count the documents of each source that were dropped as duplicates of one of each source, most first."""
    gone = np.flatnonzero(found.originals >= 0)
    pairs = np.stack([sources[gone], sources[found.originals[gone]]])
    kinds, counts = np.unique(pairs, axis=1, return_counts=True)
    rows = [
        {"source": names[source], "original_source": names[original], "documents": int(count)}
        for source, original, count in zip(*kinds, counts, strict=True)
    ]
    return sorted(rows, key=lambda row: (-int(row["documents"]), row["source"], row["original_source"]))


def similarity_histogram(found: Duplicates, threshold: float) -> list[dict[str, float]]:
    """Count the near duplicates in each interval of similarity."""
    near = found.similarities[(found.originals >= 0) & ~found.exact]
    counts, edges = np.histogram(near, HISTOGRAM_BINS, (threshold, 1))
    return [
        {"from": round(float(edge), 4), "documents": int(count)} for edge, count in zip(edges[:-1], counts, strict=True)
    ]
