"""Agreement of annotators: α of Krippendorff 2011, "Computing Krippendorff's Alpha-Reliability"."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from evaluation.statistics.intervals import Interval, bootstrap


def krippendorff_alpha(units: Sequence[Sequence[str]], seed: int = 17) -> Interval | None:
    """Return α for nominal values, 1 for perfect and 0 for chance agreement, with a bootstrap interval over units.

    units: the values given to each unit, in any order; units with fewer than two values carry no information and are
    left out. None if no unit has two values, or if all values are the same: then chance alone would agree too.
    """
    values = sorted({value for unit in units for value in unit})
    index = {value: number for number, value in enumerate(values)}
    counts = np.array([np.bincount([index[value] for value in unit], minlength=len(values)) for unit in units])
    counts = counts[counts.sum(1) > 1] if len(counts) else counts
    if not len(counts) or (counts.sum(0) > 0).sum() < 2:
        return None
    ratings = counts.sum(1)
    # Pairs of unequal values within a unit, each weighted by 1 / (values of the unit - 1).
    unequal = (ratings**2 - (counts**2).sum(1)) / (ratings - 1)

    def alpha(*columns: NDArray[np.float64]) -> NDArray[np.float64]:
        observed, *totals = (column.sum(axis=-1) for column in columns)
        n = sum(totals)
        expected = (n**2 - sum(total**2 for total in totals)) / np.maximum(n - 1, 1)
        return np.where(expected > 0, 1 - observed / np.where(expected > 0, expected, 1), 1.0)

    return bootstrap(unequal, *counts.T, statistic=alpha, seed=seed)
