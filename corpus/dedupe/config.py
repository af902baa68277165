"""Config of the stage dedupe. Importing this module loads nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from corpus.dedupe.minhash import choose_bands
from infra.config import Config, Seed, StageConfig
from infra.io.json import read_own_json


class NearDuplicates(Config):
    """Near duplicates: found by MinHash and locality-sensitive hashing (Broder, 1997; Lee et al., 2022), then verified.

    Bands and rows follow from `threshold`, `min_recall` and `max_hashes`; see docs/corpus/duplicates.md.
    """

    threshold: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Minimum Jaccard similarity of the word n-grams of near duplicates (0.8: Lee et al., 2022)."""
    ngram: int = Field(5, ge=1, le=32)
    """Words in an n-gram (5: Lee et al., 2022, and datatrove). In scripts without spaces between words, characters
    stand for them: 7 for 5 words of Chinese, 9 of Japanese, 17 of Thai, Lao, Khmer and Burmese."""
    marks: bool = True
    """Count marks that carry meaning as part of the words: operators and brackets of code, signs of numbers, + and # of
    C++ and C#, vowel and tone signs. Code, formulas and texts that differ only in these marks are then not duplicates.
    false compares letters and digits only."""
    min_recall: Annotated[float, Field(gt=0, lt=1)] = 0.99
    """Probability that a pair of exactly this similarity becomes a candidate; it is higher for more similar pairs."""
    max_hashes: int = Field(128, ge=1, le=1024)
    """Maximum number of hashes per signature, bands times rows. FineWeb (Penedo et al., 2024) uses 112."""

    @model_validator(mode="after")
    def _bands_exist(self) -> NearDuplicates:
        if choose_bands(self.threshold, self.min_recall, self.max_hashes) is None:
            raise ValueError(
                f"max_hashes: {self.max_hashes} hashes cannot find {self.min_recall:.0%} of the pairs of similarity "
                f"{self.threshold:g}; raise it, or the threshold"
            )
        return self


class Boilerplate(Config):
    """Removes lines or paragraphs that many documents share (CCNet, Wenzek et al., 2020)."""

    unit: Literal["line", "paragraph"] = "line"
    """line: up to a line break. paragraph: up to a blank line."""
    max_documents: int = Field(10, ge=1)
    """Maximum number of documents that may contain a unit; one that occurs in more is removed."""
    min_characters: int = Field(20, ge=1)
    """Shorter units, in bytes of UTF-8, are kept: closing brackets and headings."""


SUBSTRING_DISK_SHARE = 4.8
"""Bytes that `substrings` writes to disk per byte of text, as benchmarks/corpus/bench_substrings.py measures it."""


class Substrings(Config):
    """Removes passages that occurred before, in the same document or an earlier one (ExactSubstr, Lee et al., 2022)."""

    min_bytes: int = Field(200, ge=16, le=100_000)
    """Minimum length of a repeated passage, in bytes of UTF-8. The paper has 50 tokens, which are some 200 bytes of
    English, and of Chinese too."""
    min_characters: int = Field(100, ge=1)
    """A document that is cut to fewer characters is dropped; one that is not cut stays, however short."""


class DedupeConfig(StageConfig):
    """Drops exact and near-duplicate documents, and lines and passages that occur across documents."""

    exact: bool = True
    """Keep one of the texts that are equal but for white space (C4, Raffel et al., 2020; Lee et al., 2022)."""
    near: NearDuplicates | None = NearDuplicates()
    """Remove near duplicates; null keeps them."""
    boilerplate: Boilerplate | None = None
    """Remove lines or paragraphs that many documents share, before documents are compared; null keeps them."""
    substrings: Substrings | None = None
    """Remove passages that occurred before, after documents are compared; null keeps them."""
    keep: Literal["first", "longest"] = "first"
    """Copy to keep: the one read first, so that sources listed earlier win, or the longest (the first of equally long
    ones)."""
    across_sources: bool = True
    """Compare documents of different sources."""
    seed: Seed = 17
    """Seed of the hash functions."""

    def disk_bytes(self, inputs: Mapping[str, Path]) -> int:
        """Bytes of disk that a build takes until it is done: what `substrings` writes, by the text of all sources."""
        sources = inputs["documents"] / "sources.json"
        if not self.substrings or not sources.is_file():
            return 0
        return int(SUBSTRING_DISK_SHARE * sum(row["bytes"] for row in read_own_json(sources).values()))

    @model_validator(mode="after")
    def _does_something(self) -> DedupeConfig:
        if not (self.exact or self.near or self.boilerplate or self.substrings):
            raise ValueError(
                "expected at least one of exact, near, boilerplate and substrings; to use none, leave the section out"
            )
        return self
