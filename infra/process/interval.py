"""Intervals between looks at something that another process changes, which grow while nothing changes."""

from __future__ import annotations

import time

SHARE = 0.1
"""Longest delay with which a change is seen, as a share of the time for which nothing had changed."""


class GrowingInterval:
    """Seconds until the next look: a tenth of the time since the last change, within bounds.

    Args:
        shortest_s: Lower bound, right after a change.
        longest_s: Upper bound, however long nothing has changed.
    """

    def __init__(self, shortest_s: float, longest_s: float) -> None:
        self._shortest_s = shortest_s
        self._longest_s = longest_s
        self.changed()

    def changed(self) -> None:
        """Record that something has changed just now."""
        self._since = time.monotonic()

    @property
    def seconds(self) -> float:
        return min(self._longest_s, max(self._shortest_s, SHARE * (time.monotonic() - self._since)))
