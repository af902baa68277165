"""IsoFLOP profiles of runs that a known law made: their minima are where the law has its optimum."""

from __future__ import annotations

import numpy as np
import pytest

from training.planner.laws.isoflop import isoflop
from training.planner.laws.law_fit import FittedLaw, RunPoint

LAW = FittedLaw(1.6934, 406.4, 410.7, 0.3392, 0.2849)
"""Approach 3 of Hoffmann et al. 2022."""


def optimum(flops: float) -> float:
    """The best size by the closed form (their equation 4)."""
    ratio = (LAW.alpha * LAW.A / (LAW.beta * LAW.B)) ** (1 / (LAW.alpha + LAW.beta))
    return float(ratio * (flops / 6) ** (LAW.beta / (LAW.alpha + LAW.beta)))


def test_runs_at_equal_compute_find_the_optimum_of_their_law() -> None:
    points = [
        RunPoint(size, flops / (6 * size), LAW.loss(size, flops / (6 * size)))
        for flops in (1e19, 1e20, 1e21)
        for size in optimum(flops) * np.geomspace(1 / 3, 3, 7)
    ]
    found = isoflop(points)
    assert found is not None
    assert [one["flops"] for one in found["budgets"]] == pytest.approx([1e19, 1e20, 1e21])
    for one in found["budgets"]:
        assert len(one["points"]) == 7
        assert one["best"]["parameters"] == pytest.approx(optimum(one["flops"]), rel=0.05)
        assert one["best"]["tokens"] == pytest.approx(one["flops"] / 6 / one["best"]["parameters"])
        at = np.log(one["best"]["parameters"])
        assert np.polyval(one["parabola"][::-1], at) == pytest.approx(one["best"]["loss"])
    assert found["exponent"] == pytest.approx(LAW.beta / (LAW.alpha + LAW.beta), rel=0.01)
    assert found["coefficient"] * 1e20 ** found["exponent"] == pytest.approx(optimum(1e20), rel=0.05)


def test_a_grid_of_sizes_and_lengths_is_read_at_equal_compute_by_interpolation() -> None:
    sizes, lengths = optimum(1e20) * np.geomspace(1 / 8, 8, 9), np.geomspace(2e8, 2e11, 9)
    found = isoflop([RunPoint(size, length, LAW.loss(size, length)) for size in sizes for length in lengths])
    assert found is not None and len(found["budgets"]) >= 3
    inside = [one for one in found["budgets"] if one["best"]]
    assert len(inside) >= 2
    for one in inside:
        for point in one["points"]:
            assert 0.9 * lengths[0] <= point["tokens"] <= 1.1 * lengths[-1], "a loss beyond what was trained"
            assert point["loss"] == pytest.approx(LAW.loss(point["parameters"], point["tokens"]), rel=2e-3)
        if len(one["points"]) == len(sizes):
            assert one["best"]["parameters"] == pytest.approx(optimum(one["flops"]), rel=0.15)


def test_a_minimum_outside_of_the_sizes_is_not_told() -> None:
    points = [RunPoint(n, 1e20 / (6 * n), LAW.loss(n, 1e20 / (6 * n))) for n in optimum(1e20) * np.array([4, 8, 16])]
    found = isoflop(points)
    assert found is not None and found["budgets"][0]["best"] is None and found["exponent"] is None
    assert isoflop(points[:2]) is None
