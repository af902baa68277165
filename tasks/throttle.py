"""Lets a stage's printed lines into the page's log without flooding it."""

from __future__ import annotations

import time
from collections.abc import Callable

LINES = 40
WINDOW_S = 10.0


class Throttle:
    """At most LINES lines each WINDOW_S; the next window says how many were held back, and where they are.

    Of a progress bar, which rewrites its line after a carriage return, only the last state is a line.
    """

    def __init__(self, where: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._where = where
        self._clock = clock
        self._since = clock()
        self._let = 0
        self._held = 0

    def let_through(self, line: str) -> list[str]:
        """The lines to show now that this one has come."""
        shown: list[str] = []
        now = self._clock()
        if now - self._since >= WINDOW_S:
            if self._held:
                shown.append(f"… {self._held:,} more lines: {self._where}")
            self._since, self._let, self._held = now, 0, 0
        text = line.rstrip("\r").rpartition("\r")[2].rstrip()
        if not text:
            return shown
        if self._let < LINES:
            self._let += 1
            shown.append(text)
        else:
            self._held += 1
        return shown
