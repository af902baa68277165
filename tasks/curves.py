"""The curves of a build, drawn from the metrics that it wrote."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from evaluation.page.charts import Line, Point, line_chart
from evaluation.page.parts import loss_lines

Curves = dict[str, list[Point]]


@dataclass(frozen=True)
class Chart:
    """One picture: the metrics it shows, the first of them as noisy training figures with their moving mean."""

    title: str
    metrics: tuple[str, ...]
    y_label: str
    noisy: bool = False
    from_zero: bool = False


CHARTS = (
    Chart("Loss", ("train/loss", "validation/sample_loss"), "nats a token or pair", noisy=True),
    Chart("Reward", ("rlhf/reward",), "reward of the sampled answers"),
    Chart("KL", ("rlhf/kl",), "nats an answer, from the SFT model", from_zero=True),
    Chart("Learning rate", ("train/lr",), "learning rate", from_zero=True),
    Chart("Gradient norm", ("train/grad_norm",), "before clipping", noisy=True, from_zero=True),
)


def read_curves(lines: Iterable[str]) -> Curves:
    """Metric name → (step, value) points, from JSON lines {"step", "values"}; lines without a step are left out."""
    curves: Curves = defaultdict(list)
    for text in lines:
        line = json.loads(text)
        if line.get("step") is None:
            continue
        for name, value in line["values"].items():
            curves[name].append((float(line["step"]), float(value)))
    return dict(curves)


def curves_of(artifact: Path) -> Curves:
    """The curves of a finished artifact; none for a stage that wrote no metrics."""
    path = artifact / "aux" / "metrics.jsonl"
    if not path.exists():
        return {}
    with path.open(encoding="utf8") as lines:
        return read_curves(lines)


def drawings(curves: Curves) -> list[tuple[str, str]]:
    """(title, inline SVG) of each chart that has points."""
    made = []
    for chart in CHARTS:
        lines: list[Line] = []
        for place, name in enumerate(chart.metrics):
            points = curves.get(name, [])
            if place == 0 and chart.noisy:
                lines += loss_lines(points)
            else:
                lines.append(Line(name, points, "train" if place == 0 else "validation"))
        svg = line_chart(chart.title, lines, x_label="batch", y_label=chart.y_label, from_zero=chart.from_zero)
        if svg:
            made.append((chart.title, str(svg)))
    return made
