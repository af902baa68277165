"""Best of n: the highest-scoring of n answers of the model that training began from. Every training is compared with
it, since it needs no training.

Shapes: P prompts, N answers to each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from evaluation.statistics.clustered import clustered_mean


def counts(most: int) -> list[int]:
    """Return 1, 2, 4, … and `most` itself."""
    return sorted({*(2**power for power in range(most.bit_length()) if 2**power <= most), most})


def kl_of_best(n: int) -> float:
    """Return log n − (n − 1)/n nats: the KL divergence of the best of n from one (Stiennon et al. 2020, appendix G); an
    upper bound where answers repeat (Beirami et al. 2024)."""
    return math.log(n) - (n - 1) / n


def chances(drawn: int, n: int) -> NDArray[np.float64]:
    """The chance (drawn,) that each of `drawn` answers, from the worst to the best, is the best of n among them."""
    ways = [math.comb(worse, n - 1) for worse in range(drawn)]
    return np.array(ways, float) / math.comb(drawn, n)


def best_of(scores: NDArray[np.float64], by: NDArray[np.float64], n: int) -> NDArray[np.float64]:
    """Return the expected score (P,) of the best of n by `by`, over all draws of n among N answers, so that sampling
    adds no avoidable noise.

    Args:
        scores, by (P, N): where answers are equal in `by`, the mean of their scores counts.
    """
    order = np.argsort(by, axis=1, kind="stable")
    ranked = np.take_along_axis(scores, order, 1)
    ordered = np.take_along_axis(by, order, 1)
    weight = chances(scores.shape[1], n)
    expected = np.empty(len(scores))
    for row, (values, judged) in enumerate(zip(ranked, ordered, strict=True)):
        _, group = np.unique(judged, return_inverse=True)
        means = np.bincount(group, values) / np.bincount(group)
        expected[row] = float((weight * means[group]).sum())
    return expected


def best_of_figures(
    by: NDArray[np.float64], scores: Mapping[str, NDArray[np.float64]], most: int, clusters: NDArray[np.int64]
) -> dict[str, float]:
    """Return best_of_4_kl and, for each of `scores`, best_of_4_reward with its interval over prompts.

    Args:
        by: values that choose the answer (P, N).
        scores: by name, each (P, N).
        clusters (P,): the number of the conversation of each prompt.
    """
    figures: dict[str, float] = {}
    for n in counts(most):
        figures[f"best_of_{n}_kl"] = kl_of_best(n)
        for name, values in scores.items():
            figures |= clustered_mean(best_of(values, by, n), clusters).as_figures(f"best_of_{n}_{name}")
    return figures
