"""A law fitted to runs: that of Hoffmann et al. comes back from losses made by it, and a larger run is predicted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from infra.errors import ConfigError
from training.planner.laws.law_fit import FittedLaw, RunPoint, _columns, _objective, fit, fit_and_predict, write
from training.planner.laws.scaling_laws import LAWS, own_law

HOFFMANN = FittedLaw(1.6934, 406.4, 410.7, 0.3392, 0.2849)
"""Approach 3, with the unrounded values of the paper's source, as `LAWS` has them."""


def runs(noise: float, seed: int = 0) -> list[RunPoint]:
    """Losses of the law at sizes and lengths of the paper's range, 70M to 16B parameters and 5B to 500B tokens."""
    draw = np.random.default_rng(seed)
    places = [(size, length) for size in np.geomspace(7e7, 1.6e10, 7) for length in np.geomspace(5e9, 5e11, 6)]
    return [RunPoint(n, d, HOFFMANN.loss(n, d) * float(np.exp(noise * draw.standard_normal()))) for n, d in places]


def test_the_published_law_comes_back_from_its_own_losses() -> None:
    assert LAWS["chinchilla-3"].parts == tuple(vars(HOFFMANN).values())
    found = fit(runs(0))
    for name, value in vars(HOFFMANN).items():
        assert getattr(found, name) == pytest.approx(value, rel=5e-3), name


def test_noise_is_in_the_intervals_and_the_largest_run_is_predicted(tmp_path: Path) -> None:
    found = fit_and_predict(runs(2e-3))
    for name, value in vars(HOFFMANN).items():
        low, high = found["intervals"][name]
        assert low <= value <= high, name
    held = found["held_out"]
    assert held["parameters"] == pytest.approx(1.6e10) and held["tokens"] == pytest.approx(5e11)
    assert abs(held["miss"]) < 0.01
    write(tmp_path / "law.json", found)
    law, published = own_law(tmp_path / "law.json"), LAWS["chinchilla-3"]
    assert law.optimum(5.76e23)[0] == pytest.approx(published.optimum(5.76e23)[0], rel=0.3)
    assert json.loads((tmp_path / "law.json").read_text())["runs"] == 41


def test_one_run_far_off_hardly_moves_the_fit() -> None:
    points = runs(0)
    points[10] = RunPoint(points[10].parameters, points[10].tokens, 1.3 * points[10].loss)
    assert fit(points).alpha == pytest.approx(HOFFMANN.alpha, rel=0.02)


def test_the_gradient_is_that_of_the_objective() -> None:
    columns, at = _columns(runs(0.05)), np.array([5.0, 6.0, 0.4, 0.3, 0.25])
    _, gradient = _objective(at, columns)
    steps = 1e-6 * np.eye(5)
    measured = [(_objective(at + step, columns)[0] - _objective(at - step, columns)[0]) / 2e-6 for step in steps]
    assert gradient == pytest.approx(measured, rel=1e-4)


def test_one_size_gives_no_law() -> None:
    with pytest.raises(ConfigError, match="1 sizes"):
        fit([RunPoint(1e6, 1e6 * length, 5 - length / 10) for length in range(1, 8)])


@pytest.mark.long
def test_runs_that_came_to_the_same_are_one() -> None:
    few = [RunPoint(n, d, HOFFMANN.loss(n, d)) for n in (1e8, 1e9) for d in (1e9, 1e10)]
    with pytest.raises(ConfigError, match="3 runs of 2 sizes"):
        fit_and_predict([*few, *few])
    points = runs(2e-3)[:12]
    assert fit_and_predict([*points, *points]) == fit_and_predict(points)
