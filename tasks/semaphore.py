"""How many stages of a pipeline run at once, the one that most others wait for first."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from infra.errors import Cancelled


class PrioritySemaphore:
    """At most `at_once` holders; of those that wait, the one with the longest chain of work behind it goes first."""

    def __init__(self, at_once: int, weights: Mapping[str, int], is_cancelled: Callable[[], bool]) -> None:
        self._free = at_once
        self._weights = weights
        self._is_cancelled = is_cancelled
        self._waiting: list[tuple[int, int]] = []
        self._arrival = itertools.count()
        self._changed = threading.Condition()

    @contextmanager
    def __call__(self, node: str) -> Iterator[None]:
        """Waits for a turn. Raises Cancelled if the run is cancelled meanwhile."""
        with self._changed:
            place = (-self._weights.get(node, 0), next(self._arrival))
            heapq.heappush(self._waiting, place)
            try:
                while self._free == 0 or self._waiting[0] != place:
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
