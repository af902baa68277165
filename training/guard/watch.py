"""Usual values of a training figure, and the deviation of a new value from them."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Any

# Makes the median absolute deviation an estimate of a normal distribution's standard deviation.
MAD_TO_DEVIATION = 1.4826
# The upper quantile that widens the spread where the upper tail is heavier than a normal one, and its normal z-score.
_TAIL, _TAIL_Z = 0.03, 1.8808


def spread_of(values: list[float]) -> float:
    """Estimate the standard deviation, robust against a few outliers but sensitive to a heavy upper tail.

    The estimate is the larger of 1.4826 × MAD and of the upper 3 % quantile's distance from the median over 1.88, which
    are equal for a normal distribution. Most losses of a reward model are near 0: their MAD does not reflect the rest.
    """
    middle = median(values)
    deviation = MAD_TO_DEVIATION * median([abs(value - middle) for value in values])
    upper = sorted(values)[-math.ceil(_TAIL * len(values))]
    return max(deviation, (upper - middle) / _TAIL_Z)


class LossWatch:
    """One figure over a window of healthy batches.

    A value is judged by its distance from the median of the `least` values before it, relative to these distances in
    the whole window, so that a steeply falling loss does not widen the usual range.

    least_spread: lower bound on the spread, relative to the median, or of the logarithm.
    logarithmic: for figures that vary by factors, such as norms.
    """

    def __init__(self, name: str, window: int, least: int, least_spread: float, *, logarithmic: bool = False) -> None:
        self.name = name
        self._recent: deque[float] = deque(maxlen=least)
        self._distances: deque[float] = deque(maxlen=window)
        self._least = least
        self._least_spread = least_spread
        self._logarithmic = logarithmic

    @property
    def knows(self) -> bool:
        """True if the window has enough values for a judgement."""
        return len(self._distances) >= self._least

    def spread(self) -> float:
        """Standard deviation of a healthy value, or its logarithm, from the median of those before it."""
        least = self._least_spread * (1 if self._logarithmic else abs(median(self._recent)))
        return max(spread_of(list(self._distances)), least, 1e-12)

    def z(self, value: float) -> float:
        """Number of spreads by which `value` (finite) exceeds the usual value; 0 if below, and while unknown.

        A value at or below the median of the last values never exceeds the usual value, however steep their fall.
        """
        if not self.knows:
            return 0.0
        distance = self._scaled(value) - median(self._recent)
        if distance <= 0:
            return 0.0
        return (distance - max(0.0, median(self._distances))) / self.spread()

    def accept(self, value: float) -> None:
        """Add a healthy batch's value to the usual ones."""
        scaled = self._scaled(value)
        if self._recent:
            self._distances.append(scaled - median(self._recent))
        self._recent.append(scaled)

    def usual(self) -> float:
        """The median of the last healthy values; NaN before there are any."""
        if not self._recent:
            return math.nan
        middle = median(self._recent)
        return math.exp(middle) if self._logarithmic else middle

    def _scaled(self, value: float) -> float:
        return math.log(max(value, 1e-30)) if self._logarithmic else value

    def state_dict(self) -> dict[str, Any]:
        return {"recent": list(self._recent), "distances": list(self._distances)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for kept, saved in ((self._recent, state["recent"]), (self._distances, state["distances"])):
            kept.clear()
            kept.extend(saved)
