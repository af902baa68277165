"""Intervals and tests for figures that are read off samples: proportions, means, paired differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

BOOTSTRAP_RESAMPLES = 2000
RESAMPLED_AT_ONCE = 4_000_000  # numbers held in memory at a time: 32 MB

Statistic = Callable[[NDArray[np.float64]], NDArray[np.float64]]


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval."""

    value: float
    low: float
    high: float

    def as_figures(self, name: str) -> dict[str, float]:
        """{"x": value, "x_low": low, "x_high": high} for the figures of a stage."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}

    def as_json(self, digits: int = 6) -> dict[str, float]:
        return {"value": round(self.value, digits), "low": round(self.low, digits), "high": round(self.high, digits)}

    def includes(self, value: float) -> bool:
        return self.low <= value <= self.high


def normal_quantile(confidence: float) -> float:
    """The two-sided quantile of the standard normal: 1.96 for 0.95."""
    # Every run imports this file for its words; importing scipy's statistics takes a second.
    from scipy import stats

    return float(stats.norm.ppf(0.5 + confidence / 2))


def wilson(successes: int, n: int, confidence: float = 0.95) -> Interval:
    """The score interval of a proportion (Wilson 1927): holds its level at small n and near 0 and 1.

    With n = 0 the value is nan and the interval is [0, 1]. Raises ValueError unless 0 <= successes <= n.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n}")
    if n == 0:
        return Interval(math.nan, 0.0, 1.0)
    share, z = successes / n, normal_quantile(confidence)
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # At the ends rounding leaves the bound a hair off the share itself.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return Interval(share, low, high)


def from_standard_error(value: float, standard_error: float, confidence: float = 0.95) -> Interval:
    """The normal interval value ± z · standard error; nan bounds where the standard error is unknown."""
    half = normal_quantile(confidence) * standard_error
    return Interval(value, value - half, value + half)


def _mean_of_rows(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    return rows.mean(axis=-1)


def bootstrap(
    values: ArrayLike,
    statistic: Statistic = _mean_of_rows,
    *,
    confidence: float = 0.95,
    resamples: int = BOOTSTRAP_RESAMPLES,
    seed: int = 17,
) -> Interval:
    """The percentile bootstrap (Efron 1979) of a statistic of independent values.

    values (N,): what was observed, one an independent unit (a prompt, a document; not a token).
    statistic: maps samples (R, N) to their statistics (R,); the mean by default.
    Raises ValueError without values.
    """
    observed = np.asarray(values, dtype=np.float64)
    if observed.ndim != 1 or observed.size == 0:
        raise ValueError(f"expected a list of at least one number, got shape {observed.shape}")
    generator = np.random.default_rng(seed)
    rows = max(1, RESAMPLED_AT_ONCE // observed.size)
    resampled = np.concatenate(
        [
            statistic(observed[generator.integers(0, observed.size, (min(rows, resamples - start), observed.size))])
            for start in range(0, resamples, rows)
        ]
    )
    low, high = np.quantile(resampled, [0.5 - confidence / 2, 0.5 + confidence / 2])
    return Interval(float(statistic(observed[None])[0]), float(low), float(high))


def binomial_p_value(
    successes: int, n: int, chance: float = 0.5, alternative: Literal["two-sided", "greater"] = "two-sided"
) -> float:
    """The exact p-value of a number of successes if each had the probability `chance`; 1 with n = 0.

    alternative: what is claimed, other than chance or better than chance.
    """
    from scipy import stats

    return float(stats.binomtest(successes, n, chance, alternative).pvalue) if n else 1.0


def difference_of_proportions(
    successes_a: int, n_a: int, successes_b: int, n_b: int, confidence: float = 0.95
) -> Interval:
    """Newcombe's interval (1998, method 10) of share a - share b for independent samples, from the Wilson intervals."""
    a, b = wilson(successes_a, n_a, confidence), wilson(successes_b, n_b, confidence)
    difference = a.value - b.value
    low = difference - math.hypot(a.value - a.low, b.high - b.value)
    high = difference + math.hypot(a.high - a.value, b.value - b.low)
    return Interval(difference, low, high)


def difference_of_paired_proportions(
    both: int, only_first: int, only_second: int, neither: int, confidence: float = 0.95
) -> Interval:
    """Newcombe's interval (1998, paired data, method 10) of share of first - share of second on the same items.

    Unlike a bootstrap it keeps a width where no item tells the two apart. With no items the value is nan.
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

    def reach(x: float, y: float) -> float:
        return math.sqrt(max(0.0, x * x - 2 * phi * x * y + y * y))

    difference = (only_first - only_second) / n
    return Interval(
        difference,
        difference - reach(a.value - a.low, b.high - b.value),
        difference + reach(a.high - a.value, b.value - b.low),
    )


def mcnemar_p_value(only_first: int, only_second: int) -> float:
    """The exact p-value of McNemar's test from the two counts of discordant pairs."""
    return binomial_p_value(only_first, only_first + only_second)
