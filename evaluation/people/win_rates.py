"""Rate at which one model's answers are preferred to another's, and the strength of each model among several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import expit

from evaluation.statistics.clustered import clustered_share, number_clusters
from evaluation.statistics.intervals import Interval

ELO = 400 / np.log(10)
"""Points per unit of natural log-odds, as in chess."""
_RESAMPLES = 200


@dataclass(frozen=True)
class Contest:
    """All judgements of one pair of answers to `prompt`. won: the share of `first` over `second`, a tie as a half."""

    first: str
    second: str
    won: float
    prompt: str


def win_rates(contests: Sequence[Contest]) -> dict[tuple[str, str], tuple[Interval, int]]:
    """Return, for every two models that met, the rate of preference for the first and the number of answer pairs.

    The interval is that of `clustered_share` over pairs of answers, clustered by prompt, so several judgements of one
    pair and several pairs of one prompt do not count as independent; it keeps a width if all pairs have the same
    result. A tie counts as a half there, which makes the interval too wide rather than too narrow.
    """
    met: dict[tuple[str, str], list[tuple[str, float]]] = {}
    for contest in contests:
        if contest.first != contest.second:
            names = tuple(sorted((contest.first, contest.second)))
            won = contest.won if contest.first == names[0] else 1 - contest.won
            met.setdefault((names[0], names[1]), []).append((contest.prompt, won))
    return {
        names: (
            clustered_share([won for _, won in outcomes], number_clusters(prompt for prompt, _ in outcomes)),
            len(outcomes),
        )
        for names, outcomes in sorted(met.items())
    }


def strengths(contests: Sequence[Contest], seed: int = 17) -> Mapping[str, Interval]:
    """Return each model's strength (Bradley & Terry 1952) in Elo points around their mean, with bootstrap intervals
    over prompts.

    Every two models count as having met once more with an even result; otherwise a model that always won would be
    infinitely strong.
    """
    met = [contest for contest in contests if contest.first != contest.second]
    names = sorted({name for contest in met for name in (contest.first, contest.second)})
    if len(names) < 2:
        return {}
    index = {name: number for number, name in enumerate(names)}
    rows = np.array([(index[contest.first], index[contest.second], contest.won) for contest in met])
    fitted = _fit(rows, len(names))
    random = np.random.default_rng(seed)
    clusters = number_clusters(contest.prompt for contest in met)
    rows_by_prompt = [np.flatnonzero(clusters == number) for number in range(clusters.max() + 1)]
    drawn = [
        _fit(
            rows[
                np.concatenate(
                    [rows_by_prompt[i] for i in random.integers(len(rows_by_prompt), size=len(rows_by_prompt))]
                )
            ],
            len(names),
        )
        for _ in range(_RESAMPLES)
    ]
    low, high = np.quantile(drawn, (0.025, 0.975), axis=0)
    return {
        name: Interval(*map(float, (fitted[position], low[position], high[position])))
        for name, position in index.items()
    }


def _fit(rows: NDArray[np.float64], models: int) -> NDArray[np.float64]:
    """Return strengths (models,) in Elo points. rows (N, 3): the first model, the second, the first's share."""
    prior = np.array([(i, j, 0.5) for i, j in combinations(range(models), 2)])
    rows = np.concatenate([rows, prior])
    first, second, won = rows[:, 0].astype(int), rows[:, 1].astype(int), rows[:, 2]

    def loss(strength: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        odds = strength[first] - strength[second]
        surprise = won * np.logaddexp(0, -odds) + (1 - won) * np.logaddexp(0, odds)
        by_row = expit(odds) - won
        gradient = np.bincount(first, by_row, models) - np.bincount(second, by_row, models)
        return float(surprise.sum()), gradient.astype(np.float64)

    fitted = minimize(loss, np.zeros(models), jac=True, method="BFGS").x
    return np.asarray((fitted - fitted.mean()) * ELO)
