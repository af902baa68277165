"""Limit on the stages of a pipeline that run at once; the stage that most others wait for goes first."""

from __future__ import annotations

import itertools
import threading
import time
from bisect import insort
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

from infra.errors import Cancelled

PATIENCE_S = 10.0
"""Seconds for which a stage gives way to one that more others wait for and that is still looking up its inputs."""


class PrioritySemaphore:
    """At most `at_once` holders; the waiting stage with the longest chain of work behind it goes first.

    coming: the stages that may ask for a turn at any moment, since all that they need exists. Stages that become ready
        together ask some milliseconds to seconds apart, depending on how long their sources take to fingerprint; one
        that asks first does not take the place of one that more others wait for.
    scarce: stages of which at most `scarce_at_once` hold a turn. One that waits for another of these lets others pass.
    """

    def __init__(
        self,
        at_once: int,
        weights: Mapping[str, int],
        is_cancelled: Callable[[], bool],
        coming: Callable[[], Collection[str]] = tuple,
        scarce: Collection[str] = (),
        scarce_at_once: int = 1,
    ) -> None:
        self._free = at_once
        self._scarce, self._scarce_free = scarce, scarce_at_once
        self._weights = weights
        self._is_cancelled = is_cancelled
        self._coming = coming
        self._asked: set[str] = set()
        self._waiting: list[tuple[int, int, str]] = []
        self._arrival = itertools.count()
        self._changed = threading.Condition()

    @contextmanager
    def __call__(self, node: str) -> Iterator[None]:
        """Wait for a turn. Raises Cancelled if the run is cancelled meanwhile."""
        with self._changed:
            self._asked.add(node)
            self._changed.notify_all()
            weight = self._weights.get(node, 0)
            ticket = (-weight, next(self._arrival), node)
            gives_way_until = time.monotonic() + PATIENCE_S
            insort(self._waiting, ticket)
            try:
                while ticket != self._next() or not self._has_place(node, weight, gives_way_until):
                    if self._is_cancelled():
                        raise Cancelled
                    self._changed.wait(0.2)
            finally:
                self._waiting.remove(ticket)
            self._take(node, 1)
        try:
            yield
        finally:
            with self._changed:
                self._take(node, -1)
                self._changed.notify_all()

    def _take(self, node: str, slots: int) -> None:
        self._free -= slots
        if node in self._scarce:
            self._scarce_free -= slots

    def _may_begin(self, node: str) -> bool:
        """Return True unless other scarce stages hold all scarce places that this one needs."""
        return node not in self._scarce or self._scarce_free > 0

    def _next(self) -> tuple[int, int, str] | None:
        return next((ticket for ticket in self._waiting if self._may_begin(ticket[2])), None)

    def _has_place(self, node: str, weight: int, until: float) -> bool:
        """Return True if a place is left after those kept for stages that weigh more and have not asked yet."""
        if self._free == 0 or time.monotonic() > until:
            return self._free > 0
        kept = [other for other in self._coming() if self._weights.get(other, 0) > weight and other not in self._asked]
        if node in self._scarce and self._scarce_free <= sum(other in self._scarce for other in kept):
            return False
        return self._free > sum(map(self._may_begin, kept))
