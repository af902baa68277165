"""Config of the stage semantic_dedupe. Importing this module loads nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from infra.config import Seed, StageConfig, outside_identity
from infra.io.json import read_json, read_own_json
from infra.io.sources import Source, SourcePath, expand

DOCUMENTS_PER_CLUSTER = 8_800
"""The paper has 50,000 clusters for the 440 million examples of LAION-440M."""


class SemanticDedupeConfig(StageConfig):
    """Drops semantic duplicates: documents that an encoder finds alike, in other words or not (SemDeDup, Abbas et al.,
    2023).

    Embeddings are divided into clusters by k-means. Within a cluster, documents whose cosine similarity reaches
    `threshold` are duplicates, of which one stays.
    """

    model: SourcePath = outside_identity(examples=["models/all-MiniLM-L6-v2"])
    """Folder of a Hugging Face encoder; the mean of its last hidden states over the tokens is the embedding. Its bytes
    are part of the identity."""
    threshold: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Minimum cosine similarity of duplicates: 1 − ε of the paper, which chooses ε by the share of the data to keep.
    Suitable values depend on the model: see aux/clusters.json."""
    keep: Literal["farthest", "nearest", "first"] = "farthest"
    """Document of a group to keep: the one least similar to the centroid of its cluster, as in the paper; the most
    similar one; or the one read first, so that sources listed earlier win."""
    clusters: int | None = Field(None, ge=1)
    """Number of clusters. null: one per 8,800 documents, as the paper has for LAION-440M. Duplicates in different
    clusters are not found; more clusters are faster."""
    max_cluster_documents: int = Field(50_000, ge=2)
    """A cluster of more documents is divided by k-means again, since time grows by the square of its size."""
    sample_documents: int = Field(100_000, ge=1)
    """Number of randomly drawn documents from which the centroids are computed."""
    iterations: int = Field(100, ge=1)
    """Maximum number of iterations of k-means (100: the paper's code); it ends earlier where no document changes its
    cluster."""
    max_tokens: int = Field(2048, ge=8)
    """Tokens of a document that are read, from its beginning, in windows of as many as the model has positions for.
    Documents that differ only after them count as equal; the stage reports the number of longer documents."""
    batch_windows: int = outside_identity(32, ge=1)
    """Windows per forward pass; similarities change by rounding."""
    seed: Seed = 17
    """Seed for the sample and the initial centroids."""

    def sources(self) -> list[Source]:
        return [Source("semantic_dedupe.model", paths=expand([self.model]))]

    def disk_bytes(self, inputs: Mapping[str, Path]) -> int:
        """Bytes of disk that a build takes until it is done: the embeddings."""
        sources, shape = inputs["documents"] / "sources.json", Path(self.model) / "config.json"
        if not sources.is_file() or not shape.is_file():
            return 0
        documents: int = sum(row["documents"] for row in read_own_json(sources).values())
        width = read_json(shape, nan=True).get("hidden_size")
        return 4 * width * documents if isinstance(width, int) else 0
