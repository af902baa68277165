"""IsoFLOP profiles: at each of several budgets, the loss against the size, and the size that a parabola finds best.

As approach 2 of Hoffmann et al. 2022 (section 3.2): a parabola of the loss in the logarithm of the parameters at each
budget, and a power law through its minima. Where no run of a size has the budget exactly, its loss there is
interpolated between its own runs of other lengths, never beyond them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from training.planner.laws.law_fit import RunPoint

LEAST_SIZES = 3
"""Number of sizes that a parabola needs."""
MOST_BUDGETS = 6
_ALIKE = np.log(1.1)
"""Budgets closer than this are taken for one, and a size may be this far from the lengths that it was trained for."""

Runs = Mapping[float, Mapping[float, float]]
"""Parameters → tokens → loss."""


def isoflop(points: Sequence[RunPoint]) -> dict[str, Any] | None:
    """Fit the runs at equal compute; None if no budget has three sizes.

    {"budgets": [{"flops", "points": [{"parameters", "tokens", "loss"}], "parabola": [c0, c1, c2] of the loss in the
    natural logarithm of parameters, lowest power first, "best": {"parameters", "tokens", "loss"} or None where its
    minimum is outside of the range of sizes}], "exponent": exponent of the best size in the compute, None for fewer
    than two minima, "coefficient": best size = coefficient · compute^exponent}.
    """
    runs = _runs(points)
    budgets = [budget for flops in _budgets(runs) if (budget := _profile(runs, flops))]
    if not budgets:
        return None
    best = [budget for budget in budgets if budget["best"]]
    logs = np.log([budget["flops"] for budget in best])
    sizes = np.log([budget["best"]["parameters"] for budget in best])
    slope, level = np.polyfit(logs, sizes, 1) if len(best) > 1 else (None, None)
    return {
        "budgets": budgets,
        "exponent": None if slope is None else float(slope),
        "coefficient": None if level is None else float(np.exp(level)),
    }


def _runs(points: Sequence[RunPoint]) -> Runs:
    """Group runs by size and length; runs that differ only in their seed are averaged."""
    losses: dict[float, dict[float, list[float]]] = {}
    for point in points:
        losses.setdefault(point.parameters, {}).setdefault(point.tokens, []).append(point.loss)
    return {size: {tokens: fmean(all_) for tokens, all_ in sorted(of.items())} for size, of in sorted(losses.items())}


def _budgets(runs: Runs) -> list[float]:
    """Amounts of compute that runs were given and that three sizes reach, those of most sizes first where they are too
    many; in order."""
    logs = sorted(float(np.log(6 * size * tokens)) for size, of in runs.items() for tokens in of)
    groups: list[list[float]] = []
    for log in logs:
        if groups and log - groups[-1][0] < _ALIKE:
            groups[-1].append(log)
        else:
            groups.append([log])
    reached = {}
    for group in groups:
        flops = float(np.exp(fmean(group)))
        sizes = sum(_loss_at(of, flops / (6 * size)) is not None for size, of in runs.items())
        if sizes >= LEAST_SIZES:
            reached[flops] = sizes
    ordered = sorted(reached)
    if len(ordered) > MOST_BUDGETS:
        indices = np.linspace(0, len(ordered) - 1, MOST_BUDGETS).round().astype(int)
        ordered = [ordered[index] for index in indices]
    return ordered


def _profile(runs: Runs, flops: float) -> dict[str, Any] | None:
    points = []
    for size, of in runs.items():
        tokens = flops / (6 * size)
        loss = _loss_at(of, tokens)
        if loss is not None:
            points.append({"parameters": size, "tokens": tokens, "loss": loss})
    if len(points) < LEAST_SIZES:
        return None
    logs = np.log([point["parameters"] for point in points])
    middle = logs.mean()  # the fit is worse conditioned about zero
    c2, c1, c0 = map(float, np.polyfit(logs - middle, [point["loss"] for point in points], 2))
    best = None
    if c2 > 0 and logs[0] <= (at := middle - c1 / (2 * c2)) <= logs[-1]:
        size = float(np.exp(at))
        best = {"parameters": size, "tokens": flops / (6 * size), "loss": c0 - c1**2 / (4 * c2)}
    parabola = [float(c0 - c1 * middle + c2 * middle**2), float(c1 - 2 * c2 * middle), c2]
    return {"flops": flops, "points": points, "parabola": parabola, "best": best}


def _loss_at(of: Mapping[float, float], tokens: float) -> float | None:
    """The loss of a size at a length: through the three nearest runs, in the logarithm of tokens; None beyond them."""
    lengths, losses = np.log(list(of)), np.array(list(of.values()))
    at = float(np.log(tokens))
    if not lengths[0] - _ALIKE <= at <= lengths[-1] + _ALIKE:
        return None
    near = np.argsort(np.abs(lengths - at), kind="stable")[:3]
    if abs(lengths[near[0]] - at) < 1e-9:
        return float(losses[near[0]])
    return float(np.polyval(np.polyfit(lengths[near] - at, losses[near], len(near) - 1), 0.0))
