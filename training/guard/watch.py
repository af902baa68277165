"""What is usual for a figure of training, and how far a new value of it lies above that."""

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
    """An estimate of the standard deviation that a few outliers do not move, and that a heavy upper tail does.

    The larger of 1.4826 × MAD and of the upper 3 % quantile's distance from the median over 1.88, which are equal for
    a normal distribution. A reward model's losses are near 0 but for a few: their MAD alone says nothing of those.
    """
    middle = median(values)
    deviation = MAD_TO_DEVIATION * median([abs(one - middle) for one in values])
    upper = sorted(values)[-math.ceil(_TAIL * len(values))]
    return max(deviation, (upper - middle) / _TAIL_Z)


class Watch:
    """One figure over a window of healthy batches.

    A value is judged by its distance from the median of the `least` values before it, against such distances of the
    whole window: so a loss that falls steeply does not widen what counts as usual.

    least_spread: below this a spread counts as this: relative to the median, or of the logarithm.
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
        """Whether the window has enough to judge by."""
        return len(self._distances) >= self._least

    def spread(self) -> float:
        """Standard deviation of a healthy value from the median of those before it; of the logarithm if so asked."""
        least = self._least_spread * (1 if self._logarithmic else abs(median(self._recent)))
        return max(spread_of(list(self._distances)), least, 1e-12)

    def z(self, value: float) -> float:
        """Spreads by which `value` (finite) lies above what is usual; 0 below, and while nothing is known.

        What does not lie above the median of the last values is not above what is usual, however steep their fall.
        """
        if not self.knows:
            return 0.0
        distance = self._scaled(value) - median(self._recent)
        if distance <= 0:
            return 0.0
        return (distance - max(0.0, median(self._distances))) / self.spread()

    def accept(self, value: float) -> None:
        """Counts a healthy batch's value among the usual ones."""
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
