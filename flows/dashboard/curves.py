"""Curves of a stage while it is built: metrics by step, read once and followed from there."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from math import inf
from pathlib import Path

from evaluation.pages.charts import Point
from infra.process.tail import Tail
from infra.run import messages_in

MOST_POINTS = 4000
METRICS = "metrics.jsonl"
"""The file of an artifact's `aux/` that holds its metrics alone, one line per step."""


class Curves:
    """The metrics that a journal or a metrics file holds, as points (step, value) by name."""

    def __init__(self, path: Path) -> None:
        self.points: dict[str, list[Point]] = defaultdict(list)
        self.progress: dict[str, object] = {}
        self._tail = Tail(path)
        self._is_journal = path.name != METRICS

    def follow(self) -> None:
        """Read what was added since the last call."""
        lines = self._tail.lines()
        if not self._is_journal:
            lines = ['{"kind": "metric", ' + line[1:] for line in lines if line.startswith("{")]
        for message in messages_in(lines):
            match message["kind"]:
                case "metric":
                    for name, value in message["values"].items():
                        self.points[name].append((message["step"], value))
                case "rewind":
                    # Work that went back to a checkpoint records these steps again.
                    for name, points in self.points.items():
                        self.points[name] = [point for point in points if point[0] <= message["step"]]
                case "progress":
                    self.progress = message

    def between(self, name: str, first: float, last: float) -> list[Point]:
        """Return the points of a metric between two steps, at most MOST_POINTS, each the mean of its neighbours."""
        points = self.points.get(name, [])
        begin, end = bisect_left(points, (first, -inf)), bisect_right(points, (last, inf))
        width = -(-(end - begin) // MOST_POINTS)
        if width <= 1:
            return points[begin:end]
        groups = (points[at : min(at + width, end)] for at in range(begin, end, width))
        return [(group[-1][0], sum([value for _, value in group]) / len(group)) for group in groups]

    def newest(self, name: str) -> float | None:
        return self.points[name][-1][1] if self.points.get(name) else None
