"""Intervals and tests for figures of items that come in clusters: pairs of one prompt, cases of one template.

Items of one cluster are correlated, clusters are independent. Shapes: N items, G clusters, P columns of a design.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evaluation.statistics.intervals import (
    Interval,
    binomial_p_value,
    difference_of_paired_proportions,
    score_interval,
    wilson,
)

Floats = NDArray[np.float64]
Clusters = NDArray[np.int64]
"""Number of each item's cluster (N,), from 0 on; gaps are allowed."""

_LEVERAGE = 1e-10
"""Threshold below which 1 - leverage is 0: one cluster alone determines a coefficient."""


def number_clusters(keys: Iterable[Hashable]) -> Clusters:
    """Return the number of each item's cluster (N,), in order of first appearance.

    Args:
        keys: equal within a cluster.
    """
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


def clustered_mean(values: ArrayLike, clusters: Clusters, confidence: float = 0.95) -> Interval:
    """Return the mean over items with its cluster-robust interval.

    Args:
        values: (N,).
        clusters: (N,), see `number_clusters`.
        confidence: level of the interval.
    """
    observed = np.asarray(values, dtype=np.float64)
    return clustered_ratio(observed, np.ones_like(observed), clusters, confidence)


def clustered_ratio(
    numerators: ArrayLike, denominators: ArrayLike, clusters: Clusters, confidence: float = 0.95
) -> Interval:
    """Return sum over sum, such as nats per token, with its cluster-robust interval. Bounds as in
    `clustered_intercept`.

    Args:
        numerators: (N,).
        denominators: (N,), positive.
        clusters: (N,), see `number_clusters`.
        confidence: level of the interval.
    """
    clusters = _from_zero(clusters)
    # Least squares through the origin for values whose variance grows with the denominator.
    root = np.sqrt(np.asarray(denominators, dtype=np.float64))
    fitted = _least_squares(root[:, None], np.asarray(numerators, dtype=np.float64) / root, clusters)
    return _student(*fitted, confidence)


def clustered_intercept(
    gains: ArrayLike, changes: ArrayLike, clusters: Clusters, confidence: float = 0.95
) -> tuple[Interval, float]:
    """Return the constant a of least squares gain = a + b · change, with its cluster-robust interval, and b.

    a is the part of a mean gain that no change in length explains; b is the value of one more token. If all changes are
    equal, nothing separates the two: b is 0 and a is the mean. The bounds are those of CR2 standard errors with Bell
    and McCaffrey's (2002) degrees of freedom, which hold their level with few clusters and with unequal ones (Imbens &
    Kolesár 2016); they are nan if a single cluster leaves the spread between clusters unknown.

    Args:
        gains: (N,).
        changes: (N,).
        clusters: (N,), see `number_clusters`.
        confidence: level of the interval.
    """
    outcome, change = np.asarray(gains, dtype=np.float64), np.asarray(changes, dtype=np.float64)
    if np.ptp(change) == 0:
        return clustered_mean(outcome, clusters, confidence), 0.0
    clusters = _from_zero(clusters)
    design = np.stack([np.ones_like(change), change], axis=1)
    slope = float(np.linalg.lstsq(design, outcome, rcond=None)[0][1])
    return _student(*_least_squares(design, outcome, clusters), confidence), slope


def clustered_share(hits: ArrayLike, clusters: Clusters, confidence: float = 0.95) -> Interval:
    """Return the share of hits with its score interval (Wilson 1927) at the effective number of items and Student's
    quantile.

    The effective number is that of independent items whose share has the same cluster-robust variance, at most N (Rao &
    Scott 1992, Korn & Graubard 1998). The design effect is estimated from the k clusters with a hit, or with a miss,
    whichever are fewer. With few of them it moves towards that of clusters with identical items, and it equals that if
    all items agree. If each item is a cluster, this is Wilson's interval; with fewer than two clusters it is [0, 1].

    Args:
        hits: (N,) of 0 and 1, a tie as a half.
        clusters: (N,), see `number_clusters`.
        confidence: level of the interval.
    """
    from scipy import stats

    right, clusters = np.asarray(hits, dtype=np.float64), _from_zero(clusters)
    groups = _count(clusters)
    if groups == len(right):
        return wilson(float(right.sum()), len(right), confidence)
    share = float(right.mean())
    if groups < 2:
        return Interval(share, 0.0, 1.0)
    _, error, freedom = _least_squares(np.ones((len(right), 1)), right, clusters)
    informative = min(np.unique(clusters[side]).size for side in (right > 0, right < 1))
    weight = min(1.0, 2 / informative**2) if informative else 1.0
    variance = share * (1 - share)
    effective = min(float(len(right)), variance / error**2) if informative and error > 0 else float(groups)
    if effective > groups:
        effective = 1 / ((1 - weight) / effective + weight / groups)
    return score_interval(share, effective, float(stats.t.ppf(0.5 + confidence / 2, freedom)))


def clustered_sign_test(
    signs: ArrayLike, clusters: Clusters, alternative: Literal["two-sided", "greater"] = "two-sided"
) -> float:
    """Return the exact p-value of a sum of integers if each cluster's sum were as likely to have the other sign.

    If each item is a cluster and is -1 or 1, this is the sign test, and for discordant pairs McNemar's test; for
    clusters it is the permutation test of Durkalski et al. (2003). It is 1 if all sums are 0. It cannot be below 0.05
    with fewer than six clusters (greater: five).

    Args:
        signs: (N,) integers, such as right - wrong or second - first.
        clusters: (N,), see `number_clusters`.
        alternative: the claim, a sum other than 0 or above 0.
    """
    from scipy import signal, stats

    sums = np.rint(np.bincount(clusters, np.asarray(signs, dtype=np.float64))).astype(np.int64)
    sizes, counts = np.unique(np.abs(sums[sums != 0]), return_counts=True)
    if len(sizes) <= 1:
        return binomial_p_value(int((sums > 0).sum()), int(counts.sum()), alternative=alternative)
    # Distribution of the positive part alone: the whole sum is twice that minus the sum of all sizes.
    chances = np.ones(1)
    for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        part = np.zeros(size * count + 1)
        part[::size] = stats.binom.pmf(np.arange(count + 1), count, 0.5)
        chances = signal.convolve(chances, part)
    total = int(sizes @ counts)
    reached = int(np.maximum(sums, 0).sum())
    if alternative == "two-sided":
        reached = max(reached, total - reached)
        return float(min(1.0, max(0.0, 2 * chances[reached:].sum())))
    return float(min(1.0, max(0.0, chances[reached:].sum())))


def clustered_difference(
    first: ArrayLike, second: ArrayLike, clusters: Clusters, confidence: float = 0.95
) -> tuple[Interval, float]:
    """Return the share of hits of the first minus that of the second on the same items, and the p-value against no
    difference.

    The interval is Newcombe's for pairs at the effective number of items, at most N, with the width that Student's
    quantile gives it; the p-value is that of `clustered_sign_test`. If each item is a cluster, these are Newcombe's
    interval and McNemar's exact test. With fewer than two clusters the interval is [-1, 1].

    Args:
        first: (N,) of 0 and 1.
        second: (N,) of 0 and 1.
        clusters: (N,), see `number_clusters`.
        confidence: level of the interval.
    """
    from scipy import stats

    first_scores, second_scores = (np.asarray(side, dtype=np.float64) for side in (first, second))
    both, only_first, only_second, neither = (
        float(((first_scores == a) & (second_scores == b)).sum()) for a, b in ((1, 1), (1, 0), (0, 1), (0, 0))
    )
    p_value = clustered_sign_test(first_scores - second_scores, clusters)
    clusters = _from_zero(clusters)
    groups = _count(clusters)
    if groups == len(first_scores):
        return difference_of_paired_proportions(both, only_first, only_second, neither, confidence), p_value
    gains = first_scores - second_scores
    if groups < 2:
        return Interval(float(gains.mean()), -1.0, 1.0), p_value
    _, error, freedom = _least_squares(np.ones((len(gains), 1)), gains, clusters)
    independent = gains.var() / len(gains)
    effective = min(float(len(gains)), len(gains) * independent / error**2) if error > 0 else float(groups)
    # A normal quantile on fewer items gives the same width as Student's on these.
    level = float(stats.t.ppf(0.5 + confidence / 2, freedom) / stats.norm.ppf(0.5 + confidence / 2))
    scale = effective / level**2 / len(gains)
    cells = both * scale, only_first * scale, only_second * scale, neither * scale
    return difference_of_paired_proportions(*cells, confidence), p_value


def _from_zero(clusters: Clusters) -> Clusters:
    """Return clusters without the gaps in their numbers that a selection of items leaves."""
    return np.unique(clusters, return_inverse=True)[1].astype(np.int64)


def _count(clusters: Clusters) -> int:
    return int(clusters.max()) + 1 if len(clusters) else 0


def _least_squares(design: Floats, outcome: Floats, clusters: Clusters) -> tuple[float, float, float]:
    """Return the first coefficient of ordinary least squares, its CR2 standard error, and Bell and McCaffrey's degrees
    of freedom under independent errors; the latter two are nan if fewer than two clusters determine it.

    Residuals of a cluster are multiplied by (I - H)^(-1/2), H its block of the hat matrix (Pustejovsky & Tipton 2018,
    section 2.2). All computations use P × P matrices: H has the eigenvalues of M^(1/2) X'X M^(1/2), with M = (X'X)^-1
    of all items and X'X of the cluster.
    """
    groups, width = _count(clusters), design.shape[1]
    inverse = np.linalg.inv(design.T @ design)
    coefficients = inverse @ (design.T @ outcome)
    if groups < 2:
        return float(coefficients[0]), math.nan, math.nan
    squares = np.zeros((groups, width, width))
    np.add.at(squares, clusters, design[:, :, None] * design[:, None, :])
    scores = np.zeros((groups, width))
    np.add.at(scores, clusters, design * (outcome - design @ coefficients)[:, None])

    values, vectors = np.linalg.eigh(inverse)
    root = (vectors * np.sqrt(values)) @ vectors.T
    leverage, vectors = np.linalg.eigh(root @ squares @ root)
    residual = np.where(1 - leverage > _LEVERAGE, 1 - leverage, np.inf)
    weights = root @ (vectors / np.sqrt(residual)[:, None, :]) @ vectors.transpose(0, 2, 1) @ root[:, 0, None]
    weights = weights[:, :, 0]  # (G, P): weight of a cluster's score in the first coefficient
    error = math.sqrt(float(((weights * scores).sum(axis=1) ** 2).sum()))

    # The variance estimate is a quadratic form of the errors with the matrix diag(diagonal) - shared shared'.
    diagonal = np.einsum("gp,gpq,gq->g", weights, squares, weights)
    shared = np.einsum("pq,gqr,gr->gp", root, squares, weights)
    trace = diagonal.sum() - (shared**2).sum()
    trace_of_square = (
        (diagonal**2).sum() - 2 * (diagonal * (shared**2).sum(axis=1)).sum() + ((shared.T @ shared) ** 2).sum()
    )
    freedom = min(trace**2 / trace_of_square, groups - 1) if trace_of_square > 0 else math.nan
    return float(coefficients[0]), error, float(freedom)


def _student(value: float, error: float, freedom: float, confidence: float) -> Interval:
    from scipy import stats

    half = float(stats.t.ppf(0.5 + confidence / 2, freedom)) * error
    return Interval(value, value - half, value + half)
