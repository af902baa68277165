"""Confidence intervals: bootstrap for means, Wilson for shares."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import binomtest

_RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def figures(self, name: str) -> dict[str, float]:
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


def bootstrap_ratio(numerators: ArrayLike, denominators: ArrayLike, seed: int) -> Interval:
    """Sum over sum, resampled by unit (Efron & Tibshirani 1993, percentile interval): a token-weighted mean loss.

    Both (units,): for example the summed loss and the tokens of each sequence.
    """
    top, bottom = np.asarray(numerators, float), np.asarray(denominators, float)
    picks = np.random.default_rng(seed).integers(0, len(top), (_RESAMPLES, len(top)))
    means = top[picks].sum(1) / bottom[picks].sum(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(float(top.sum() / bottom.sum()), float(low), float(high))


def bootstrap_mean(values: ArrayLike, seed: int) -> Interval:
    """The mean of `values (units,)`; give it differences of pairs for a paired comparison."""
    values = np.asarray(values, float)
    return bootstrap_ratio(values, np.ones_like(values), seed)


def wilson(successes: int, trials: int) -> Interval:
    """A share with Wilson's score interval (Wilson 1927)."""
    interval = binomtest(successes, trials).proportion_ci(0.95, method="wilson")
    return Interval(successes / trials, float(interval.low), float(interval.high))


def p_above_chance(successes: int, trials: int) -> float:
    """Exact one-sided binomial p-value against a share of one half."""
    return float(binomtest(successes, trials, 0.5, alternative="greater").pvalue)


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))
