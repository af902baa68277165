"""Near-duplicate prompts, so that none has a twin on the other side of the split."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from corpus.dedupe.config import NearDuplicates, choose_bands
from corpus.dedupe.kernels import Sets, join_alike, sign_sets
from corpus.dedupe.minhash import hash_functions, sets_of_shingles
from corpus.dedupe.search import buckets_of
from corpus.documents.words import text_buffers

TEMPLATE_SHARE, TEMPLATE_PROMPTS = 0.01, 10
"""Word n-grams of more than this share of the prompts, and of more than this many, are a template's: prompts that have
nothing else in common are different prompts."""
_SEED = 17


class PromptGroups:
    """Prompts, each once, as sets of hashed word n-grams (Broder, 1997). Memory grows by some 8 bytes per word."""

    def __init__(self, config: NearDuplicates) -> None:
        self._config = config
        self._shingles = [np.zeros(0, np.uint32)]
        self._sizes = [np.zeros(0, np.int64)]

    def add(self, prompts: Sequence[str]) -> None:
        """Add prompts after those that were added before."""
        data, begins = text_buffers(pa.chunked_array([pa.array(prompts, pa.large_string())]))
        numbers = np.arange(len(prompts))
        shingles = sets_of_shingles(data, begins, numbers, self._config.ngram, self._config.marks)
        self._shingles.append(shingles.astype(np.uint32))
        self._sizes.append(np.bincount((shingles >> np.uint64(32)).astype(np.int64), minlength=len(prompts)))

    def firsts(self) -> NDArray[np.int64]:
        """The first prompt of the group of each prompt, (N,). Two prompts are in one group if they are similar, or if a
        chain of similar prompts joins them."""
        sets = self._without_templates()
        bands = choose_bands(self._config.threshold, self._config.min_recall, self._config.max_hashes)
        assert bands is not None
        signed = np.empty((bands.bands, sets.sizes.size), np.uint64)
        sign_sets(sets, *hash_functions(bands, _SEED), signed)
        filled = np.flatnonzero(sets.sizes)
        parents = np.arange(sets.sizes.size)
        for band in signed:
            join_alike(*buckets_of(band[filled], filled), sets, self._config.threshold, parents)
        return parents

    def _without_templates(self) -> Sets:
        shingles, sizes = np.concatenate(self._shingles), np.concatenate(self._sizes)
        _, number, prompts = np.unique(shingles, return_inverse=True, return_counts=True)
        keep = prompts[number] <= max(TEMPLATE_PROMPTS, TEMPLATE_SHARE * sizes.size)
        owners = np.repeat(np.arange(sizes.size), sizes)[keep]
        kept = np.bincount(owners, minlength=sizes.size)
        return Sets(shingles[keep], np.cumsum(kept) - kept, kept)
