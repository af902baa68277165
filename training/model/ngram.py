"""Unigram and bigram baselines: losses of count-based models on the same tokens.

Both count a stream of batches, so that no text has to be held in memory. V is the vocabulary size.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]


class Unigram:
    """Token frequencies with one count added to each (Laplace).

    batches: token ids of any shape.
    """

    def __init__(self, batches: Iterable[Tokens], vocab_size: int) -> None:
        counts = np.zeros(vocab_size)
        for tokens in batches:
            counts += np.bincount(tokens.ravel(), minlength=vocab_size)
        self.probabilities = (counts + 1) / (counts + 1).sum()

    def losses(self, tokens: Tokens) -> NDArray[np.float64]:
        """Cross-entropy in nats of each token."""
        return -np.log(self.probabilities[tokens])


class Bigram:
    """Interpolated Kneser-Ney (Kneser & Ney 1995; Chen & Goodman 1999), backing off to a uniform share.

    p(w|v) = max(c(v,w) - d, 0)/c(v) + d·n(v)/c(v)·q(w), where n(v) counts the distinct successors of v, q(w) is the
    share of distinct predecessors (with one added to each token), and d = n1/(n1 + 2·n2) from the pairs that occur once
    and twice.

    Counts are a sorted array of the pairs that occur, v·V + w: 8 bytes for each of them up to a vocabulary of 65,536
    (12 beyond), and at most 30 bytes for each counted pair while counting, plus 24 bytes for each entry of the
    vocabulary.

    batches: sequences (B, T).
    pairs: upper bound on the number of pairs in all batches: B·(T - 1), summed.
    """

    def __init__(self, batches: Iterable[Tokens], vocab_size: int, pairs: int) -> None:
        self._vocab_size = vocab_size
        self._type: Any = np.uint32 if vocab_size <= 1 << 16 else np.uint64
        seen_pairs: NDArray[Any] = np.empty(pairs, self._type)
        count = 0
        for tokens in batches:
            keys = self._pairs(tokens[:, :-1].ravel(), tokens[:, 1:].ravel())
            seen_pairs[count : count + len(keys)] = keys
            count += len(keys)
        seen_pairs = seen_pairs[:count]
        seen_pairs.sort()
        begins = np.ones(count, bool)
        np.not_equal(seen_pairs[1:], seen_pairs[:-1], out=begins[1:])
        starts = np.flatnonzero(begins)
        self._keys = seen_pairs[starts]
        del seen_pairs, begins
        self._counts = np.diff(starts, append=count).astype(np.uint32)
        del starts
        once, twice = (int((self._counts == times).sum()) for times in (1, 2))
        self.discount = once / (once + 2 * twice) if once and twice else 0.5
        before = (self._keys // self._type(vocab_size)).astype(np.int64)
        self._totals = np.bincount(before, self._counts, minlength=vocab_size)
        self._successors = np.bincount(before, minlength=vocab_size)
        del before
        predecessors = np.bincount((self._keys % self._type(vocab_size)).astype(np.int64), minlength=vocab_size) + 1.0
        self._continuation = predecessors / predecessors.sum()

    @property
    def nbytes(self) -> int:
        """Return the bytes that the counts take."""
        arrays = (self._keys, self._counts, self._totals, self._successors, self._continuation)
        return sum(array.nbytes for array in arrays)

    def probability(self, before: Tokens, after: Tokens) -> NDArray[np.float64]:
        """Return p(after | before), elementwise over two flat arrays."""
        # Keys of another type would make searchsorted convert all of the counts.
        keys = self._pairs(before, after)
        positions = np.minimum(np.searchsorted(self._keys, keys), max(0, len(self._keys) - 1))
        counts = np.where(self._keys[positions] == keys, self._counts[positions], 0) if len(self._keys) else 0
        totals = self._totals[before]
        safe = np.maximum(totals, 1)
        left = np.where(totals > 0, self.discount * self._successors[before] / safe, 1.0)
        probabilities: NDArray[np.float64] = (
            np.maximum(counts - self.discount, 0) / safe + left * self._continuation[after]
        )
        return probabilities

    def shares(self, before: Tokens, width: int) -> NDArray[np.float32]:
        """Share of each pair that begins with these tokens, among all counted pairs: (N, width) from (N,)."""
        first, last = np.zeros_like(before), np.full_like(before, self._vocab_size - 1)
        begins = np.searchsorted(self._keys, self._pairs(before, first))
        ends = np.searchsorted(self._keys, self._pairs(before, last), side="right")
        shares = np.zeros((len(before), width), np.float32)
        for row, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            shares[row, (self._keys[begin:end] % self._type(self._vocab_size)).astype(np.int64)] = self._counts[
                begin:end
            ]
        return shares / np.float32(max(1, self._totals.sum()))

    def losses(self, sequences: Tokens) -> NDArray[np.float64]:
        """Cross-entropy in nats of each token but the first of a sequence: (B·(T - 1),) of sequences (B, T)."""
        return -np.log(self.probability(sequences[:, :-1].ravel(), sequences[:, 1:].ravel()))

    def _pairs(self, before: Tokens, after: Tokens) -> NDArray[Any]:
        keys: NDArray[Any] = before.astype(self._type)
        keys *= self._type(self._vocab_size)
        keys += after.astype(self._type)
        return keys
