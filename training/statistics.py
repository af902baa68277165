"""The intervals of training's figures that weigh by tokens; the rest are evaluation's."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from evaluation.statistics import RESAMPLED_AT_ONCE, Interval

_RESAMPLES = 2000


def bootstrap_ratio(numerators: ArrayLike, denominators: ArrayLike, seed: int) -> Interval:
    """Sum over sum, resampled by unit (Efron & Tibshirani 1993, percentile interval): a token-weighted mean loss.

    Both (units,): for example the summed loss and the tokens of each sequence. Memory does not grow with the resamples.
    """
    top, bottom = np.asarray(numerators, float), np.asarray(denominators, float)
    generator = np.random.default_rng(seed)
    rows = max(1, RESAMPLED_AT_ONCE // len(top))
    means = []
    for start in range(0, _RESAMPLES, rows):
        picks = generator.integers(0, len(top), (min(rows, _RESAMPLES - start), len(top)))
        means.append(top[picks].sum(1) / bottom[picks].sum(1))
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return Interval(float(top.sum() / bottom.sum()), float(low), float(high))


def bootstrap_mean(values: ArrayLike, seed: int) -> Interval:
    """The mean of `values (units,)`; give it differences of pairs for a paired comparison."""
    values = np.asarray(values, float)
    return bootstrap_ratio(values, np.ones_like(values), seed)


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))
