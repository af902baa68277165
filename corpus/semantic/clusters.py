"""Clusters of embeddings by spherical k-means, and the duplicates within each.

All embeddings have length 1, so a product of two is their cosine similarity. Memory holds a sample of the embeddings,
the centroids, and 12 bytes per document; the rest is read in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from corpus.semantic.config import DOCUMENTS_PER_CLUSTER, SemanticDedupeConfig
from corpus.semantic.embeddings import EmbeddingFile
from corpus.semantic.encoder import Embeddings

SIMILARITIES_AT_ONCE = 1 << 24
"""Similarities that are computed at a time, 64 MB."""
BLOCK = 2048
"""Documents that are compared at a time with those kept before."""
Labels = NDArray[np.int32]
Numbers = NDArray[np.int64]
Similarities = NDArray[np.float32]


@dataclass(frozen=True)
class Clusters:
    """labels (N,): the cluster of each document; similarities (N,): to its centroid; count: of clusters."""

    labels: Labels
    similarities: Similarities
    count: int

    def members(self) -> Iterator[Numbers]:
        """The documents of each cluster, ascending."""
        order = np.argsort(self.labels, kind="stable")
        yield from np.split(order, np.searchsorted(self.labels[order], np.arange(1, self.count)))


def find_clusters(file: EmbeddingFile, config: SemanticDedupeConfig, tick: Callable[[], None]) -> Clusters:
    """Divide all documents into clusters of at most some `max_cluster_documents`. tick: called between pieces of work.

    A larger cluster is divided again, but for one that k-means cannot divide since nearly all its embeddings are equal:
    there one document is kept of all, so that it takes little time at any size.
    """
    generator = np.random.default_rng(config.seed)
    requested = config.clusters or max(1, -(-file.rows // DOCUMENTS_PER_CLUSTER))
    labels, similarities = np.zeros(file.rows, np.int32), np.zeros(file.rows, np.float32)
    pending = [(np.arange(file.rows), requested)]
    count = 0
    while pending:
        documents, parts = pending.pop()
        chosen = generator.choice(documents.size, min(documents.size, config.sample_documents), replace=False)
        chosen.sort()
        centroids = spherical_kmeans(file.of(documents[chosen]), parts, config.iterations, generator, tick)
        at_once = max(1, SIMILARITIES_AT_ONCE // max(len(centroids), file.width))
        here = np.empty(documents.size, np.int32)
        for start in range(0, documents.size, at_once):
            tick()
            some = documents[start : start + at_once]
            here[start : start + at_once], similarities[some] = nearest(file.of(some), centroids)
        for cluster in range(len(centroids)):
            members = documents[here == cluster]
            is_divided = parts == 1 or members.size < 0.95 * documents.size
            if members.size > config.max_cluster_documents and is_divided:
                pending.append((members, -(-2 * members.size // config.max_cluster_documents)))
            elif members.size:
                labels[members] = count
                count += 1
    return Clusters(labels, similarities, count)


def spherical_kmeans(
    sample: Embeddings, clusters: int, iterations: int, generator: np.random.Generator, tick: Callable[[], None]
) -> Embeddings:
    """Return centroids (k, width) of length 1 for a sample (n, width); k is at most n.

    Lloyd's iterations from centroids that are drawn from the sample. A centroid without documents moves to the document
    that is least similar to its own.
    """
    count = min(clusters, len(sample))
    centroids = sample[np.sort(generator.choice(len(sample), count, replace=False))]
    before = np.full(len(sample), -1, np.int32)
    for _ in range(iterations):
        tick()
        labels, similarities = nearest(sample, centroids)
        sizes = np.bincount(labels, minlength=count)
        if not (empty := np.flatnonzero(sizes == 0)).size and np.array_equal(labels, before):
            break
        before = labels
        order = np.argsort(labels, kind="stable")
        filled = np.flatnonzero(sizes)
        starts = np.concatenate([[0], np.cumsum(sizes[filled])[:-1]])
        centroids = np.zeros_like(centroids)
        centroids[filled] = np.add.reduceat(sample[order], starts, axis=0)
        centroids[empty] = sample[np.argsort(similarities, kind="stable")[: empty.size]]
        lengths = np.linalg.norm(centroids, axis=1, keepdims=True)
        centroids /= np.where(lengths > 0, lengths, 1)
    return centroids


def nearest(embeddings: Embeddings, centroids: Embeddings) -> tuple[Labels, Similarities]:
    """The most similar centroid of each embedding, the first of equal ones, and the similarity; both (n,)."""
    labels, similarities = np.empty(len(embeddings), np.int32), np.empty(len(embeddings), np.float32)
    at_once = max(1, SIMILARITIES_AT_ONCE // len(centroids))
    for start in range(0, len(embeddings), at_once):
        products = embeddings[start : start + at_once] @ centroids.T
        best = products.argmax(1)
        labels[start : start + at_once] = best
        similarities[start : start + at_once] = products[np.arange(len(best)), best]
    return labels, similarities


def find_duplicates(
    file: EmbeddingFile, documents: Numbers, threshold: float, tick: Callable[[], None]
) -> tuple[Numbers, Similarities]:
    """Find the duplicates in one cluster. documents: (n,), those to keep first.

    Returns the kept document that each duplicates, the most similar one of those ahead of it, -1 for those that are
    kept; and the similarity to it. A document goes only if one that stays is as similar to it as `threshold`.
    """
    originals, best = np.full(documents.size, -1, np.int64), np.full(documents.size, -1, np.float32)
    for start in range(0, documents.size, BLOCK):
        here = slice(start, min(start + BLOCK, documents.size))
        block = file.of(documents[here])
        kept = documents[:start][originals[:start] < 0]
        for first in range(0, kept.size, BLOCK):
            tick()
            some = kept[first : first + BLOCK]
            products = block @ file.of(some).T
            likest = products.argmax(1)
            values = products[np.arange(len(block)), likest]
            is_better = values > best[here]
            best[here][is_better] = values[is_better]
            originals[here][is_better & (values >= threshold)] = some[likest[is_better & (values >= threshold)]]
        products = block @ block.T
        for number in range(len(block)):
            if best[start + number] >= threshold:
                continue
            behind = slice(start + number + 1, here.stop)
            values = products[number, number + 1 :]
            is_better = values > best[behind]
            best[behind][is_better] = values[is_better]
            originals[behind][is_better & (values >= threshold)] = documents[start + number]
    best[originals < 0] = 0
    return originals, best
