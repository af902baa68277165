"""A contest of our program with another one, by turns in one process: the best times of each, ratios, and a table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Seconds = tuple[float, float]
"""Wall and processor time."""


class BestTimes:
    """The best wall and the best processor time of each contender."""

    def __init__(self) -> None:
        self._best: dict[str, Seconds] = {}

    def add(self, contender: str, wall: float, processor: float) -> None:
        best = self._best.get(contender, (float("inf"), float("inf")))
        self._best[contender] = min(best[0], wall), min(best[1], processor)

    def figures(self, theirs: Iterable[str], ours: str = "ours") -> dict[str, float]:
        """Return seconds and ratios of the fastest of `theirs` and of `ours`."""
        wall, processor = (min(self._best[name][kind] for name in theirs) for kind in (0, 1))
        our_wall, our_processor = self._best[ours]
        return {
            "theirs_s": round(wall, 2),
            "ours_s": round(our_wall, 2),
            "ratio": round(wall / our_wall, 2),
            "theirs_cpu_s": round(processor, 2),
            "ours_cpu_s": round(our_processor, 2),
            "cpu_ratio": round(processor / our_processor, 2),
        }


def report(rows: Sequence[Mapping[str, Any]], names: Mapping[str, int], *, as_json: bool) -> None:
    """Print the rows, as JSON or as a table.

    Args:
        names: widths of the columns that name a row; seconds, ratios and whether the results are the same follow.
    """
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    print(*(f"{name:<{width}}" for name, width in names.items()), " theirs    ours  ratio  of processor time  same")
    for row in rows:
        cells = [f"{row[name]:<{width}}" for name, width in names.items()]
        times = f"{row['theirs_s']:>6.2f}s {row['ours_s']:>6.2f}s {row['ratio']:>6.2f} {row['cpu_ratio']:>18.2f}"
        print(*cells, f"{times}  {row['same']}")
