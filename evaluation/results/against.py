"""A model's figures minus those of the promoted model: over the same items if both kept them, else by intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from evaluation.results.artifacts import Artifact, read_artifacts, snake_case
from evaluation.results.comparison import paired_accuracy, paired_toxicity
from evaluation.statistics.intervals import Interval
from infra.store.manifest import folder_of, known_manifest

SAME = 1e-4
"""Tolerance within which a paired difference matches the difference of the two values, and so belongs to the figure."""

METRICS = {"_accuracy_normalised": "acc_norm", "_accuracy": "acc", "_score": None}
"""Metric of lm-eval by the end of a figure's name; None for the one of the task that is to be read first."""


@dataclass(frozen=True)
class Against:
    """One figure compared with the promoted model's.

    registration: that of the promoted model, as its artifact's address. promoted: its value.
    difference: this model's value minus the promoted one, with a 95 % interval.
    by: the same items; intervals of both figures, assumed to be independent; or the two values alone, which have no
    interval.
    """

    registration: str
    promoted: float
    difference: Interval
    by: Literal["items", "intervals", "values"]

    def as_json(self) -> dict[str, Any]:
        document = {"registration": self.registration, "promoted": self.promoted, "by": self.by}
        return {**document, **self.difference.as_json()}


def against_promoted(
    names: Sequence[str], figures: Mapping[str, float], artifacts: Mapping[str, Artifact], promoted: Path
) -> dict[str, Against]:
    """Return each wanted figure that the promoted model also has.

    Args:
        names: by `step.figure`.
        figures, artifacts: of the current model, by `step.figure` and by input name.
        promoted: the promoted model's registration.
    """
    registration = read_artifacts({"register": promoted})["register"]
    promoted_figures: Mapping[str, float] = (registration.read_json("registration.json") or {}).get("figures", {})
    evaluated = _inputs(registration)
    if model := evaluated.get("model"):
        promoted_figures = {**{f"model.{figure}": value for figure, value in model.figures.items()}, **promoted_figures}
    address = f"{promoted.parent.name}/{promoted.name}"
    comparisons = {}
    for name in names:
        if name not in promoted_figures or name not in figures:
            continue
        step, _, figure = name.partition(".")
        values = figures[name], promoted_figures[name]
        paired = _paired(figure, evaluated.get(step), artifacts.get(step))
        if paired is not None and abs(paired.value - (values[0] - values[1])) < SAME:
            comparisons[name] = Against(address, values[1], paired, "items")
        else:
            current, before = (_interval(name, side) for side in (figures, promoted_figures))
            basis: Literal["intervals", "values"] = "intervals" if current and before else "values"
            difference = _difference_of_independent(current or _point(values[0]), before or _point(values[1]))
            comparisons[name] = Against(address, values[1], difference, basis)
    return comparisons


def _inputs(registration: Artifact) -> dict[str, Artifact]:
    """Return the inputs of the promoted model's registration that are still unchanged in the store."""
    if registration.manifest is None:
        return {}
    root = registration.folder.parent.parent
    return {
        name: Artifact(name, folder_of(root, reference, manifest), manifest)
        for name, reference in registration.manifest.inputs.items()
        if (manifest := known_manifest(root, reference))
    }


def _paired(figure: str, first: Artifact | None, second: Artifact | None) -> Interval | None:
    """Return the second's figure minus the first's over the same items, for the figures whose items are kept."""
    if first is None or second is None or first.stage != second.stage:
        return None
    if first.stage.startswith("benchmarks"):
        for suffix, metric in METRICS.items():
            if figure.endswith(suffix):
                compared = paired_accuracy(first, second, metric)
                return next((pair.difference for pair in compared if snake_case(pair.task) + suffix == figure), None)
    if first.stage.startswith("safety") and figure in ("expected_max_toxicity", "toxicity_probability"):
        toxicity = paired_toxicity(first, second)
        return (toxicity.worst if figure == "expected_max_toxicity" else toxicity.toxic) if toxicity else None
    return None


def _interval(name: str, figures: Mapping[str, float]) -> Interval | None:
    bounds = [figures.get(f"{name}{end}") for end in ("_low", "_high")]
    if bounds[0] is None or bounds[1] is None:
        return None
    return Interval(figures[name], bounds[0], bounds[1])


def _point(value: float) -> Interval:
    return Interval(value, value, value)


def _difference_of_independent(current: Interval, before: Interval) -> Interval:
    """Return the interval of a difference of independent estimates from their own intervals (Zou & Donner 2008)."""
    value = current.value - before.value
    low = value - math.hypot(current.value - current.low, before.high - before.value)
    return Interval(value, low, value + math.hypot(current.high - current.value, before.value - before.low))
