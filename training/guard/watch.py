"""What is usual for a figure of training, and whether a new value of it is suspicious."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Any

# Makes the median absolute deviation an estimate of a normal distribution's standard deviation.
MAD_TO_DEVIATION = 1.4826


def robust_z(value: float, usual: list[float], least_deviation: float = 0.0) -> float:
    """How many deviations `value` lies above the median of `usual`; the deviation is 1.4826 × MAD."""
    middle = median(usual)
    deviation = MAD_TO_DEVIATION * median([abs(one - middle) for one in usual])
    return (value - middle) / max(deviation, least_deviation, 1e-12)


class Watch:
    """One figure over a window of healthy batches.

    A value is judged by its distance from the median of the `least` values before it, against such distances of the
    whole window: so a loss that falls steeply does not widen what counts as usual.

    least_deviation: below this a spread counts as this: relative to the median, or of the logarithm.
    logarithmic: for figures that vary by factors, such as norms.
    """

    def __init__(
        self, name: str, window: int, least: int, limit: float, least_deviation: float, *, logarithmic: bool = False
    ) -> None:
        self.name = name
        self._recent: deque[float] = deque(maxlen=least)
        self._distances: deque[float] = deque(maxlen=window)
        self._least = least
        self._limit = limit
        self._least_deviation = least_deviation
        self._logarithmic = logarithmic

    def suspicious(self, value: float) -> bool:
        """Whether `value` (finite) lies too far above what is usual; never before the window has enough."""
        if len(self._distances) < self._least:
            return False
        middle = median(self._recent)
        least = self._least_deviation * (1 if self._logarithmic else abs(middle))
        return robust_z(self._scaled(value) - middle, list(self._distances), least) > self._limit

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
