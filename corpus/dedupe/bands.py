"""Bands and rows of MinHash: which texts become candidates, and with what chance."""

from __future__ import annotations

import math
from typing import NamedTuple


class Bands(NamedTuple):
    """Texts with all `rows` hashes of any one band in common are candidates."""

    bands: int
    rows: int

    def chance(self, similarity: float) -> float:
        """Return the probability that two texts of this Jaccard similarity are candidates (Leskovec et al., Mining of
        Massive Datasets, section 3.4.2)."""
        return 1 - (1 - similarity**self.rows) ** self.bands


def choose_bands(threshold: float, min_recall: float, max_hashes: int) -> Bands | None:
    """The most rows with which texts of similarity `threshold` are candidates with a chance of `min_recall`, and as
    many bands as that takes; None if no division of `max_hashes` does.

    More rows mean fewer pairs to compare in vain. What the usual integral over false candidates would trade recall for
    is settled by comparing each candidate, so only recall counts here.
    """
    best = None
    for rows in range(1, max_hashes + 1):
        bands = _bands_needed(threshold**rows, min_recall)
        if bands * rows <= max_hashes:
            best = Bands(int(bands), rows)
    return best


def _bands_needed(chance: float, min_recall: float) -> float:
    """Bands of which at least one agrees with a chance of `min_recall`, where each does with `chance`."""
    if chance >= min_recall:
        return 1
    # A tiny chance is lost in 1 - chance, so the logarithm is taken of the two together.
    needed = math.log1p(-min_recall) / math.log1p(-chance) if chance > 0 else math.inf
    return math.ceil(needed) if math.isfinite(needed) else math.inf
