"""Progress, speed and remaining time of long work, reported once per second."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

from infra.io.json import read_own_json
from infra.run import Run

EVERY_S = 1.0
STEADY_S, STEADY_SHARE = 5.0, 0.01
"""A rate is reported after this time from the first progress on, and a time left after this share of the work too: what
comes before is imports, compilation and the start of workers."""

Amount = tuple[float, float]
"""Amount done, in the unit of the progress and in bytes of text."""


class Pace:
    """Report the progress of some work from its own thread: amount done, MB/s, time left.

        with Pace(run, "documents", total) as pace:
            for document in documents:
                …
                pace.add(1, len(document.text))

    total: how much there is to do; None when it cannot be known. done: how much an earlier run did.
    """

    def __init__(self, run: Run, unit: str, total: float | None, done: float = 0) -> None:
        self._run = run
        self._unit = unit
        self._total = total
        self._before = done
        self._done = 0.0
        self._bytes = 0.0
        self._documents = 0
        self._under_way: Callable[[], Amount] = lambda: (0, 0)
        self._first: tuple[float, float, float] | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._report_periodically, name="pace", daemon=True)

    def add(self, amount: float, text_bytes: float = 0, documents: int = 0) -> None:
        """Add an amount.

        Args:
            documents: number reported in addition to the amount, if that counts something else.
        """
        self._done += amount
        self._bytes += text_bytes
        self._documents += documents

    def watch(self, under_way: Callable[[], Amount]) -> None:
        """Include work in progress that was not passed to `add` yet."""
        self._under_way = under_way

    def __enter__(self) -> Pace:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._report()

    def _report_periodically(self) -> None:
        while not self._ended.wait(EVERY_S):
            self._report()

    def _report(self) -> None:
        in_progress, more_bytes = self._under_way()
        done = self._done + in_progress
        notes = [f"{self._documents:,} documents"] if self._documents else []
        notes += self._speed(time.monotonic(), done, self._bytes + more_bytes)
        if self._total is not None:
            done = min(done, self._total - self._before)
        self._run.progress(self._before + done, self._total, self._unit, ", ".join(notes))

    def _speed(self, now: float, done: float, text_bytes: float) -> list[str]:
        """The rate and the time left since the first progress, once they mean something.

        Args:
            now: seconds of a monotonic clock.
            done: amount done by this run.
            text_bytes: bytes of text done by this run.
        """
        if self._first is None and done > 0:
            self._first = now, done, text_bytes
        if self._first is None or (seconds := now - self._first[0]) < STEADY_S:
            return []
        amount, read = done - self._first[1], text_bytes - self._first[2]
        notes = [_rate(read / seconds)] if read > 0 else []
        if self._total is not None:
            remaining = self._total - self._before - done
            if amount > 0 and remaining > 0 and done >= STEADY_SHARE * (done + remaining):
                notes.append(f"{duration(seconds * remaining / amount)} left")
        return notes


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:.1f} MB/s" if bytes_per_s >= 95e3 else f"{bytes_per_s / 1e3:.1f} kB/s"


def duration(seconds: float) -> str:
    """Return a time left in words, no more exact than an estimate is."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


_reported_at = 0.0


def report(out: Path, amount: float, text_bytes: float = 0) -> None:
    """Report progress from inside a partition's function; cheap enough to call for each document."""
    global _reported_at
    now = time.monotonic()
    if now - _reported_at < EVERY_S:
        return
    _reported_at = now
    file = report_file(out)
    temporary = file.with_suffix(".fresh")
    temporary.write_text(json.dumps([amount, text_bytes]), encoding="utf8")
    os.replace(temporary, file)


def report_file(out: Path) -> Path:
    """Return the file that `report` writes: next to the partition's folder, visible to all workers and the parent."""
    return out.with_suffix(".progress")


def read_reports(files: Iterable[Path]) -> Amount:
    """Return the sum of the reports that have not been removed since."""
    amounts = [0.0, 0.0]
    for file in files:
        try:
            values = read_own_json(file)
        except OSError:
            continue
        amounts = [amounts[0] + values[0], amounts[1] + values[1]]
    return amounts[0], amounts[1]
