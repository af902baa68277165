"""The intervals of training's figures that weigh by tokens or allow for length; the rest are evaluation's."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evaluation.statistics import RESAMPLED_AT_ONCE, Interval

_RESAMPLES = 2000


def gain_at_equal_length(gains: ArrayLike, changes: ArrayLike, seed: int) -> tuple[Interval, float]:
    """What is left of a mean gain where nothing changed in length, and what a change of one is worth.

    Least squares of gain = a + b · change over the pairs; a with its bootstrap interval over pairs, b. Where all pairs
    changed alike nothing tells a gain from length, and b is 0.

    gains, changes (pairs,): of each pair the second's value less the first's, and its length less the first's.
    """
    gain, change = np.asarray(gains, float), np.asarray(changes, float)

    def fitted(picks: NDArray[np.int64]) -> NDArray[np.float64]:
        """a and b of each row of picks (R, pairs): (2, R)."""
        y, x = gain[picks], change[picks]
        from_mean = x - x.mean(1, keepdims=True)
        spread = (from_mean**2).sum(1)
        slope = np.where(spread > 0, (from_mean * y).sum(1) / np.where(spread > 0, spread, 1), 0.0)
        return np.stack([y.mean(1) - slope * x.mean(1), slope])

    found = np.concatenate([fitted(picks)[0] for picks in _resamples(len(gain), seed)])
    [value], [slope] = fitted(np.arange(len(gain))[None])
    low, high = np.quantile(found, [0.025, 0.975])
    return Interval(float(value), float(low), float(high)), float(slope)


def _resamples(units: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Which units each resample draws, some resamples at a time (R, units)."""
    generator = np.random.default_rng(seed)
    rows = max(1, RESAMPLED_AT_ONCE // units)
    for start in range(0, _RESAMPLES, rows):
        yield generator.integers(0, units, (min(rows, _RESAMPLES - start), units))


def bootstrap_ratio(numerators: ArrayLike, denominators: ArrayLike, seed: int) -> Interval:
    """Sum over sum, resampled by unit (Efron & Tibshirani 1993, percentile interval): a token-weighted mean loss.

    Both (units,): for example the summed loss and the tokens of each sequence. Memory does not grow with the resamples.
    """
    top, bottom = np.asarray(numerators, float), np.asarray(denominators, float)
    means = np.concatenate([top[picks].sum(1) / bottom[picks].sum(1) for picks in _resamples(len(top), seed)])
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(float(top.sum() / bottom.sum()), float(low), float(high))


def bootstrap_mean(values: ArrayLike, seed: int) -> Interval:
    """The mean of `values (units,)`; give it differences of pairs for a paired comparison."""
    values = np.asarray(values, float)
    return bootstrap_ratio(values, np.ones_like(values), seed)


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))
