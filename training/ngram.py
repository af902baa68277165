"""Unigram and bigram baselines: what a model of counts alone reaches on the same tokens.

V is the vocabulary size.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array

Tokens = NDArray[np.int64]


class Unigram:
    """Token frequencies with one count added to each (Laplace)."""

    def __init__(self, sequences: Tokens, vocab_size: int) -> None:
        counts = np.bincount(sequences.ravel(), minlength=vocab_size) + 1.0
        self.probabilities = counts / counts.sum()

    def loss(self, sequences: Tokens) -> float:
        """Mean cross-entropy in nats of each token but the first of a sequence, as the language model is measured."""
        return self.loss_of(sequences[:, 1:])

    def loss_of(self, tokens: Tokens) -> float:
        """Mean cross-entropy in nats of each token."""
        return float(-np.log(self.probabilities[tokens]).mean())


class Bigram:
    """Interpolated Kneser-Ney (Kneser & Ney 1995; Chen & Goodman 1999), backing off to a uniform share.

    p(w|v) = max(c(v,w) - d, 0)/c(v) + d·n(v)/c(v)·q(w), where n(v) counts the distinct successors of v, q(w) is the
    share of distinct predecessors (with one added to each token), and d = n1/(n1 + 2·n2) from the pairs that occur once
    and twice.
    """

    def __init__(self, sequences: Tokens, vocab_size: int) -> None:
        before, after = sequences[:, :-1].ravel(), sequences[:, 1:].ravel()
        pairs = coo_array((np.ones(len(before)), (before, after)), shape=(vocab_size, vocab_size))
        self._counts = csr_array(pairs)
        self._counts.sum_duplicates()
        once, twice = (int((self._counts.data == times).sum()) for times in (1, 2))
        self.discount = once / (once + 2 * twice) if once and twice else 0.5
        self._totals = np.asarray(self._counts.sum(1)).ravel()
        self._successors = np.diff(self._counts.indptr)
        predecessors = np.bincount(self._counts.indices, minlength=vocab_size) + 1.0
        self._continuation = predecessors / predecessors.sum()

    def probability(self, before: Tokens, after: Tokens) -> NDArray[np.float64]:
        """p(after | before), elementwise over two flat arrays."""
        counts = np.asarray(self._counts[before, after]).ravel()
        totals = self._totals[before]
        safe = np.maximum(totals, 1)
        left = np.where(totals > 0, self.discount * self._successors[before] / safe, 1.0)
        return np.maximum(counts - self.discount, 0) / safe + left * self._continuation[after]

    def loss(self, sequences: Tokens) -> float:
        """Mean cross-entropy in nats of each token but the first of a sequence."""
        return float(-np.log(self.probability(sequences[:, :-1].ravel(), sequences[:, 1:].ravel())).mean())
