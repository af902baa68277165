"""A custom scaling law: L(N, D) = E + A/N^alpha + B/D^beta, fitted to runs of a sweep.

As approach 3 of Hoffmann et al. 2022 (appendix D.2): the Huber loss, delta 1e-3, of the log of the loss, minimised by
L-BFGS from a grid of starts. Unlike there the loss is summed and minimised to the end, without which the fit stops too
early (Besiroglu et al. 2024); and of the grid only the best starts are followed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import logsumexp, softmax

from infra.errors import ConfigError, Problem

DELTA = 1e-3
LEAST = 6
"""Minimum number of runs for a fit of five numbers."""
_GRID = {
    "a": np.arange(0, 26, 5.0),
    "b": np.arange(0, 26, 5.0),
    "e": np.arange(-1, 1.1, 0.5),
    "alpha": np.arange(0, 2.1, 0.5),
    "beta": np.arange(0, 2.1, 0.5),
}
"""The starts of Hoffmann et al.: log A, log B, log E, alpha, beta."""
_FOLLOWED = 24
_BOOTSTRAPS = 200

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class RunPoint:
    """A finished pretraining: parameters with embeddings, tokens trained on, validation loss in nats per token."""

    parameters: float
    tokens: float
    loss: float

    @property
    def flops(self) -> float:
        return 6 * self.parameters * self.tokens


@dataclass(frozen=True)
class FittedLaw:
    """E, A, B, alpha, beta, as `stemma plan --law` reads them."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        return float(self.E + self.A / parameters**self.alpha + self.B / tokens**self.beta)


def fit(points: Sequence[RunPoint], starts: Sequence[Floats] | None = None) -> FittedLaw:
    """Fit the law to runs.

    Raises ConfigError for fewer than LEAST runs, or of one size or one length alone.

    Args:
        starts: (log A, log B, log E, alpha, beta) instead of the grid's best.
    """
    problem = missing_points(points)
    if problem:
        raise ConfigError(problem)
    return _law(_best(points, _starts(points) if starts is None else starts))


def missing_points(points: Sequence[RunPoint]) -> Problem | None:
    """Return the problem that prevents fitting a law to runs. Runs with equal results count as one, for example if an
    axis does not affect the result."""
    sizes, lengths = {point.parameters for point in points}, {point.tokens for point in points}
    different = len(set(points))
    if different >= LEAST and min(len(sizes), len(lengths)) > 1:
        return None
    message = f"{different} runs of {len(sizes)} sizes and {len(lengths)} lengths give no law"
    fix = f"sweep sizes and durations, {LEAST} runs at least in addition to the largest, which is held out"
    return Problem("too_few_runs", "--law", message, fix)


def _best(points: Sequence[RunPoint], starts: Sequence[Floats]) -> Floats:
    fits = (
        minimize(
            _objective,
            start,
            args=(_columns(points),),
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": 2000, "ftol": 1e-14, "gtol": 1e-9},
        )
        for start in starts
    )
    best: Floats = min(fits, key=lambda fit: fit.fun).x
    return best


def _columns(points: Sequence[RunPoint]) -> Floats:
    """Return logs of parameters, tokens and loss (runs, 3)."""
    return np.log([[point.parameters, point.tokens, point.loss] for point in points])


def _objective(at: Floats, columns: Floats) -> tuple[float, Floats]:
    """Sum of the Huber losses, in units of delta², and its gradient. columns (runs, 3)."""
    a, b, e, alpha, beta = at
    size, length, target = columns.T
    terms = np.stack([a - alpha * size, b - beta * length, np.full_like(size, e)])  # (3, runs)
    off = (logsumexp(terms, axis=0) - target) / DELTA
    near = np.abs(off) <= 1
    value = np.where(near, 0.5 * off**2, np.abs(off) - 0.5).sum()
    slope = np.clip(off, -1, 1) / DELTA * softmax(terms, axis=0)  # (3, runs)
    gradient = np.array(
        [slope[0].sum(), slope[1].sum(), slope[2].sum(), -(slope[0] * size).sum(), -(slope[1] * length).sum()]
    )
    return float(value), gradient


def _starts(points: Sequence[RunPoint]) -> list[Floats]:
    """Starts of the grid with the lowest objective before the fit."""
    columns = _columns(points)
    grid = [np.array(start, dtype=np.float64) for start in product(*_GRID.values())]
    return sorted(grid, key=lambda start: _objective(start, columns)[0])[:_FOLLOWED]


def _law(at: Floats) -> FittedLaw:
    a, b, e, alpha, beta = map(float, at)
    return FittedLaw(float(np.exp(e)), float(np.exp(a)), float(np.exp(b)), alpha, beta)


def _logs(law: FittedLaw) -> Floats:
    return np.array([np.log(law.A), np.log(law.B), np.log(law.E), law.alpha, law.beta])


def fit_and_predict(points: Sequence[RunPoint], seed: int = 17) -> dict[str, Any]:
    """The law of all runs but the one of most compute, which it predicts.

    {"law": {"E", "A", "B", "alpha", "beta"}, "intervals": {each: [low, high]}, "runs", "rmse_log", "held_out":
    {"parameters", "tokens", "flops", "loss", "predicted", "low", "high", "miss"}}. Intervals are of 95 %, by 200
    bootstraps over runs, of which each has five different ones at least; that of the prediction is of the law alone,
    not of the noise of one run. miss: measured over predicted, less one. Raises ConfigError as `fit` does.
    """
    # A copy of the one that is predicted would be fitted to.
    ordered = sorted(dict.fromkeys(points), key=lambda point: point.flops)
    used, held = ordered[:-1], ordered[-1]
    law = fit(used)
    draw = np.random.default_rng(seed)
    others: list[FittedLaw] = []
    while len(others) < _BOOTSTRAPS:
        picked = [used[number] for number in draw.integers(0, len(used), len(used))]
        sizes, lengths = {point.parameters for point in picked}, {point.tokens for point in picked}
        # Five numbers want five runs that differ: what fewer leave open is no uncertainty of these.
        if len(set(picked)) >= 5 and len(sizes) > 1 and len(lengths) > 1:
            others.append(_law(_best(picked, [_logs(law)])))
    off = [np.log(law.loss(point.parameters, point.tokens) / point.loss) for point in used]
    predicted = law.loss(held.parameters, held.tokens)
    low, high = _bounds([other.loss(held.parameters, held.tokens) for other in others])
    return {
        "law": asdict(law),
        "intervals": {name: _bounds([getattr(other, name) for other in others]) for name in asdict(law)},
        "runs": len(used),
        "rmse_log": float(np.sqrt(np.mean(np.square(off)))),
        "held_out": {
            **asdict(held),
            "flops": held.flops,
            "predicted": predicted,
            "low": low,
            "high": high,
            "miss": held.loss / predicted - 1,
        },
    }


def _bounds(values: Sequence[float]) -> list[float]:
    return [float(bound) for bound in np.quantile(values, [0.025, 0.975])]


def write(path: Path, fitted: dict[str, Any]) -> None:
    """Write a file for `stemma plan --law`, with intervals and the held-out run next to the five numbers."""
    rest = {key: value for key, value in fitted.items() if key != "law"}
    path.write_text(json.dumps({**fitted["law"], **rest}, indent=1) + "\n", encoding="utf8")
