"""Intervals and tests for figures computed from samples: proportions, means, paired differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

BOOTSTRAP_RESAMPLES = 2000
CLUSTER_MEANS, CLUSTER_CORRELATIONS = 1000, 40
"""Points of the grid on which `share_of_clusters` integrates; twice as many change no bound by 1/100 of it."""
RESAMPLED_AT_ONCE = 4_000_000  # numbers held in memory at a time: 32 MB

Statistic = Callable[..., NDArray[np.float64]]


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval."""

    value: float
    low: float
    high: float

    def as_figures(self, name: str) -> dict[str, float]:
        """Return {"x": value, "x_low": low, "x_high": high} for the figures of a stage; without unknown bounds."""
        bounds = {f"{name}_low": self.low, f"{name}_high": self.high}
        return {name: self.value, **{key: bound for key, bound in bounds.items() if not math.isnan(bound)}}

    def as_json(self, digits: int = 6) -> dict[str, float]:
        return {"value": round(self.value, digits), "low": round(self.low, digits), "high": round(self.high, digits)}

    def includes(self, value: float) -> bool:
        return self.low <= value <= self.high


def normal_quantile(confidence: float) -> float:
    """Return the two-sided quantile of the standard normal: 1.96 for 0.95."""
    # Every run imports this module; importing scipy's statistics takes a second, so it is imported here.
    from scipy import stats

    return float(stats.norm.ppf(0.5 + confidence / 2))


def wilson(successes: float, n: float, confidence: float = 0.95) -> Interval:
    """Return the score interval of a proportion (Wilson 1927), which holds its level at small n and near 0 and 1.

    With n = 0 the value is nan and the interval is [0, 1]. Raises ValueError unless 0 <= successes <= n.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n}")
    if n == 0:
        return Interval(math.nan, 0.0, 1.0)
    share = successes / n
    interval = score_interval(share, n, normal_quantile(confidence))
    # At the ends, rounding leaves the bound slightly off the share itself.
    return Interval(share, 0.0 if successes == 0 else interval.low, 1.0 if successes == n else interval.high)


def score_interval(share: float, n: float, quantile: float) -> Interval:
    """Return Wilson's interval of a share among n items, perhaps an effective number, from a two-sided quantile."""
    squared = quantile**2 / n
    centre = (share + squared / 2) / (1 + squared)
    half = math.sqrt(squared * share * (1 - share) + squared**2 / 4) / (1 + squared)
    return Interval(share, max(0.0, centre - half), min(1.0, centre + half))


def share_of_clusters(counts: ArrayLike, size: int, confidence: float = 0.95) -> Interval:
    """Return the share of successes among clustered draws, where the draws of one cluster may be similar.

    The clusters' own shares are assumed to follow a beta distribution. The interval is the equal-tailed one of their
    mean, with Jeffreys' prior on the mean and a uniform prior on the correlation within a cluster. If clusters are
    single draws, it is Jeffreys' interval (Brown, Cai & DasGupta 2001, section 4.3), and as there it ends at 0 without
    a success and at 1 without a failure. Unlike a bootstrap, it keeps its width if all counts are 0.

    Args:
        counts (N,): successes of each cluster, of `size` draws.

    Raises ValueError without clusters.
    """
    from scipy.special import betaln

    values, times = np.unique(np.asarray(counts, dtype=np.int64), return_counts=True)
    if not values.size or values[0] < 0 or values[-1] > size:
        raise ValueError(f"expected at least one count from 0 to {size}")
    # The mean sin² of a uniform angle has Jeffreys' prior.
    edges = np.sin(np.linspace(0, np.pi / 2, CLUSTER_MEANS + 1)) ** 2
    mean = np.sin((np.arange(CLUSTER_MEANS) + 0.5) * np.pi / 2 / CLUSTER_MEANS)[:, None] ** 2
    correlation = (np.arange(CLUSTER_CORRELATIONS) + 0.5) / CLUSTER_CORRELATIONS
    a, b = mean * (1 / correlation - 1), (1 - mean) * (1 / correlation - 1)
    likelihood = sum(
        n * (betaln(count + a, size - count + b) - betaln(a, b)) for count, n in zip(values, times, strict=True)
    )
    weights = np.exp(likelihood - likelihood.max()).sum(axis=1)
    below = np.concatenate([[0], np.cumsum(weights)]) / weights.sum()
    low, high = np.interp([(1 - confidence) / 2, (1 + confidence) / 2], below, edges)
    total, possible = int((values * times).sum()), size * int(times.sum())
    return Interval(total / possible, 0.0 if total == 0 else float(low), 1.0 if total == possible else float(high))


def from_standard_error(value: float, standard_error: float, confidence: float = 0.95) -> Interval:
    """Return the normal interval value ± z · standard error; nan bounds if the standard error is unknown."""
    half = normal_quantile(confidence) * standard_error
    return Interval(value, value - half, value + half)


def _mean(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    return rows.mean(axis=-1)


def bootstrap(
    *columns: ArrayLike,
    statistic: Statistic = _mean,
    confidence: float = 0.95,
    resamples: int = BOOTSTRAP_RESAMPLES,
    seed: int = 17,
) -> Interval:
    """Return the percentile bootstrap (Efron 1979) of a statistic of independent units; scipy draws.

    columns, each (N,): observations of each unit (a prompt, a document; not a token). Units are drawn whole.

    Args:
        statistic: of arrays (..., N), one for each column, along their last axis; the mean by default.

    Raises ValueError without values, and for columns of different lengths.
    """
    from scipy import stats

    observed = [np.asarray(column, dtype=np.float64) for column in columns]
    shapes = {column.shape for column in observed}
    if len(shapes) != 1 or observed[0].ndim != 1 or not observed[0].size:
        raise ValueError(f"expected lists of one length with at least one number, got shapes {sorted(shapes)}")
    value = float(statistic(*observed))
    if observed[0].size == 1:
        return Interval(value, value, value)
    result = stats.bootstrap(
        observed,
        lambda *rows, axis: statistic(*rows),
        paired=True,
        vectorized=True,
        n_resamples=resamples,
        batch=max(1, RESAMPLED_AT_ONCE // observed[0].size),
        confidence_level=confidence,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(value, float(result.low), float(result.high))


def bootstrap_ratio(numerators: ArrayLike, denominators: ArrayLike, seed: int, confidence: float = 0.95) -> Interval:
    """Return sum over sum, resampled by unit, such as a token-weighted mean loss.

    Both (N,): for example the summed loss and the tokens of each sequence.
    """

    def ratio(top: NDArray[np.float64], bottom: NDArray[np.float64]) -> NDArray[np.float64]:
        return top.sum(axis=-1) / bottom.sum(axis=-1)

    return bootstrap(numerators, denominators, statistic=ratio, confidence=confidence, seed=seed)


def binomial_p_value(
    successes: int, n: int, chance: float = 0.5, alternative: Literal["two-sided", "greater"] = "two-sided"
) -> float:
    """Return the exact p-value of a number of successes if each had the probability `chance`; 1 with n = 0.

    Args:
        alternative: the claim, different from chance or better than chance.
    """
    from scipy import stats

    return float(stats.binomtest(successes, n, chance, alternative).pvalue) if n else 1.0


def difference_of_independent(a: Interval, b: Interval) -> Interval:
    """Return the interval of a - b from those of two independent samples, at their level (Zou & Donner 2008)."""
    difference = a.value - b.value
    low = difference - math.hypot(a.value - a.low, b.high - b.value)
    high = difference + math.hypot(a.high - a.value, b.value - b.low)
    return Interval(difference, low, high)


def difference_of_proportions(
    successes_a: int, n_a: int, successes_b: int, n_b: int, confidence: float = 0.95
) -> Interval:
    """Return Newcombe's interval (1998, method 10) of share a - share b for independent samples, from Wilson's."""
    return difference_of_independent(wilson(successes_a, n_a, confidence), wilson(successes_b, n_b, confidence))


def difference_of_paired_proportions(
    both: float, only_first: float, only_second: float, neither: float, confidence: float = 0.95
) -> Interval:
    """Return Newcombe's interval (1998, paired data, method 10) of share of first - share of second on the same items.

    The counts may be those of an effective number of items.
    Unlike a bootstrap, it keeps a width if no item distinguishes the two. With no items the value is nan.
    """
    n = both + only_first + only_second + neither
    a, b = wilson(both + only_first, n, confidence), wilson(both + only_second, n, confidence)
    if n == 0:
        return Interval(math.nan, -1.0, 1.0)
    margins = (both + only_first) * (only_second + neither) * (both + only_second) * (only_first + neither)
    association: float = both * neither - only_first * only_second
    if association > 0:  # continuity correction, never past zero
        association = max(association - n / 2, 0)
    phi = association / math.sqrt(margins) if margins else 0.0

    def distance(x: float, y: float) -> float:
        return math.sqrt(max(0.0, x * x - 2 * phi * x * y + y * y))

    difference = (only_first - only_second) / n
    return Interval(
        difference,
        difference - distance(a.value - a.low, b.high - b.value),
        difference + distance(a.high - a.value, b.value - b.low),
    )


def paired_proportions(pairs: Sequence[tuple[float, float]], confidence: float = 0.95) -> tuple[Interval, float]:
    """Return the second's share of successes minus the first's over the same items, and McNemar's p-value.

    Args:
        pairs: results of each item, 0 or 1.
    """
    better = sum(second > first for first, second in pairs)
    worse = sum(second < first for first, second in pairs)
    both = sum(first == second == 1 for first, second in pairs)
    neither = len(pairs) - both - better - worse
    interval = difference_of_paired_proportions(both, better, worse, neither, confidence)
    return interval, mcnemar_p_value(better, worse)


def mcnemar_p_value(only_first: int, only_second: int) -> float:
    """Return the exact p-value of McNemar's test from the two counts of discordant pairs."""
    return binomial_p_value(only_first, only_first + only_second)
