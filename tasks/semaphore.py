"""How many stages of a pipeline run at once, the one that most others wait for first."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

from infra.errors import Cancelled

PATIENCE_S = 10.0
"""For so long a stage gives way to one that more others wait for and that is still looking its inputs up."""


class PrioritySemaphore:
    """At most `at_once` holders; of those that wait, the one with the longest chain of work behind it goes first.

    coming: the stages that may ask for a turn at any moment, since all that they need is there. Stages that become
    ready together ask some milliseconds to seconds apart, as long as their sources take to be told apart; one that asks
    first does not take the place of one that more others wait for.
    """

    def __init__(
        self,
        at_once: int,
        weights: Mapping[str, int],
        is_cancelled: Callable[[], bool],
        coming: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._free = at_once
        self._weights = weights
        self._is_cancelled = is_cancelled
        self._coming = coming
        self._asked: set[str] = set()
        self._waiting: list[tuple[int, int]] = []
        self._arrival = itertools.count()
        self._changed = threading.Condition()

    @contextmanager
    def __call__(self, node: str) -> Iterator[None]:
        """Waits for a turn. Raises Cancelled if the run is cancelled meanwhile."""
        with self._changed:
            self._asked.add(node)
            self._changed.notify_all()
            weight = self._weights.get(node, 0)
            place = (-weight, next(self._arrival))
            gives_way_until = time.monotonic() + PATIENCE_S
            heapq.heappush(self._waiting, place)
            try:
                while self._waiting[0] != place or self._free <= self._kept(weight, gives_way_until):
                    if self._is_cancelled():
                        raise Cancelled
                    self._changed.wait(0.2)
            finally:
                self._waiting.remove(place)
                heapq.heapify(self._waiting)
            self._free -= 1
        try:
            yield
        finally:
            with self._changed:
                self._free += 1
                self._changed.notify_all()

    def _kept(self, weight: int, until: float) -> int:
        """How many places are kept for stages that weigh more than this and have not asked yet."""
        if self._free == 0 or time.monotonic() > until:
            return 0
        return sum(self._weights.get(one, 0) > weight for one in self._coming() if one not in self._asked)
