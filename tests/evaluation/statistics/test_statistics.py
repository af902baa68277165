"""Intervals and tests agree with scipy and with published numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from evaluation.statistics.intervals import (
    Interval,
    binomial_p_value,
    bootstrap,
    bootstrap_ratio,
    difference_of_paired_proportions,
    difference_of_proportions,
    from_standard_error,
    mcnemar_p_value,
    share_of_clusters,
    wilson,
)


@pytest.mark.parametrize("confidence", [0.8, 0.95])
@pytest.mark.parametrize(("successes", "n"), [(1, 20), (3, 20), (19, 20)])
def test_clusters_of_one_draw_give_jeffreys_interval(successes: int, n: int, confidence: float) -> None:
    ours = share_of_clusters([1] * successes + [0] * (n - successes), 1, confidence)
    tail = (1 - confidence) / 2
    theirs = stats.beta.ppf([tail, 1 - tail], successes + 0.5, n - successes + 0.5)
    assert (ours.low, ours.high) == pytest.approx(tuple(theirs), abs=1e-4)


def test_none_and_one_of_256_draws_in_clusters_have_intervals_of_one_kind() -> None:
    none, one, two = (share_of_clusters([count] + [0] * 31, 8) for count in (0, 1, 2))
    assert (none.value, none.low, one.value) == (0, 0, 1 / 256)
    assert none.high < one.high < two.high < 2 * none.high
    together, apart = share_of_clusters([8] + [0] * 31, 8), share_of_clusters([1] * 8 + [0] * 24, 8)
    assert together.value == apart.value and together.high - together.low > 1.5 * (apart.high - apart.low)


def test_the_interval_of_clusters_holds_its_level() -> None:
    random, held = np.random.default_rng(0), 0
    for _ in range(60):
        counts = random.binomial(8, random.beta(0.05 * 4, 0.95 * 4, 32))
        found = share_of_clusters(counts, 8, 0.9)
        held += found.low <= 0.05 <= found.high
    assert 48 <= held <= 59


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
@pytest.mark.parametrize(("successes", "n"), [(0, 10), (1, 10), (5, 10), (10, 10), (81, 263), (999, 1000)])
def test_wilson_agrees_with_scipy(successes: int, n: int, confidence: float) -> None:
    ours = wilson(successes, n, confidence)
    theirs = stats.binomtest(successes, n).proportion_ci(confidence, method="wilson")
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=1e-12)
    assert ours.low <= ours.value <= ours.high


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    # Newcombe 1998, Two-sided confidence intervals for the single proportion, table I, method 3
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_gives_the_published_intervals(successes: int, n: int, low: float, high: float) -> None:
    interval = wilson(successes, n)
    assert (round(interval.low, 4), round(interval.high, 4)) == (low, high)


def test_wilson_of_nothing_knows_nothing() -> None:
    interval = wilson(0, 0)
    assert math.isnan(interval.value) and (interval.low, interval.high) == (0.0, 1.0)


@pytest.mark.parametrize(("successes", "n"), [(-1, 5), (6, 5)])
def test_wilson_refuses_impossible_counts(successes: int, n: int) -> None:
    with pytest.raises(ValueError, match="successes"):
        wilson(successes, n)


@pytest.mark.parametrize(
    ("a", "n_a", "b", "n_b", "low", "high"),
    # Newcombe 1998, Interval estimation for the difference between independent proportions, table II, method 10
    [
        (56, 70, 48, 80, 0.0524, 0.3339),
        (9, 10, 3, 10, 0.1705, 0.8090),
        (5, 56, 0, 29, -0.0381, 0.1926),
        (10, 10, 0, 10, 0.6075, 1.0),
    ],
)
def test_difference_of_proportions_gives_the_published_intervals(
    a: int, n_a: int, b: int, n_b: int, low: float, high: float
) -> None:
    interval = difference_of_proportions(a, n_a, b, n_b)
    assert (round(interval.low, 4), round(interval.high, 4)) == (low, high)


def test_bootstrap_resamples_units_whole() -> None:
    """Against a loop: each resample draws rows of both columns, and the interval is that of its ratios."""
    top, bottom = np.random.default_rng(0).gamma(2.0, size=80), np.random.default_rng(1).integers(1, 50, 80)
    found = bootstrap_ratio(top, bottom, seed=5)
    picks = np.random.default_rng(5).integers(0, 80, (2000, 80))
    ratios = [top[row].sum() / bottom[row].sum() for row in picks]
    assert found.value == pytest.approx(top.sum() / bottom.sum())
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(ratios, [0.025, 0.975])))


def test_bootstrap_of_one_unit_knows_no_spread() -> None:
    assert bootstrap([3.0]) == Interval(3.0, 3.0, 3.0)


def test_bootstrap_repeats_itself_and_heeds_its_seed() -> None:
    values = np.random.default_rng(0).normal(size=50)
    assert bootstrap(values, seed=3) == bootstrap(values, seed=3)
    assert bootstrap(values, seed=3) != bootstrap(values, seed=4)


def test_bootstrap_takes_any_statistic_of_rows() -> None:
    interval = bootstrap(np.arange(101.0), statistic=lambda rows: np.median(rows, axis=-1))
    assert interval.value == 50 and interval.low < 50 < interval.high


def test_bootstrap_in_pieces_covers_all_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).normal(size=50)
    whole = bootstrap(values, resamples=500)
    monkeypatch.setattr("evaluation.statistics.intervals.RESAMPLED_AT_ONCE", 170)
    assert bootstrap(values, resamples=500) == whole


def test_bootstrap_refuses_no_values() -> None:
    with pytest.raises(ValueError, match="at least one"):
        bootstrap([])


@pytest.mark.parametrize(
    ("successes", "n", "chance", "p"),
    [(5, 10, 0.5, 1.0), (10, 10, 0.5, 2 / 1024), (235, 682 + 243 - 10, 1 / 4, None), (0, 0, 0.5, 1.0)],
)
def test_binomial_p_value(successes: int, n: int, chance: float, p: float | None) -> None:
    expected = stats.binomtest(successes, n, chance).pvalue if p is None else p
    assert binomial_p_value(successes, n, chance) == pytest.approx(expected)


def test_mcnemar_is_the_sign_test_of_the_discordant_pairs() -> None:
    assert mcnemar_p_value(10, 0) == pytest.approx(2 / 1024)
    assert mcnemar_p_value(0, 0) == 1.0


def test_figures_are_named_as_the_manifest_wants_them() -> None:
    figures = from_standard_error(0.5, 0.1).as_figures("accuracy")
    assert figures == pytest.approx({"accuracy": 0.5, "accuracy_low": 0.304004, "accuracy_high": 0.695996}, abs=1e-6)


def test_paired_difference_agrees_with_the_bootstrap_on_many_items() -> None:
    both, first, second, neither = 700, 120, 60, 120
    a = np.repeat([1, 1, 0, 0], [both, first, second, neither])
    b = np.repeat([1, 0, 1, 0], [both, first, second, neither])
    ours, theirs = difference_of_paired_proportions(both, first, second, neither), bootstrap(a - b)
    assert ours.value == pytest.approx(theirs.value) == pytest.approx(0.06)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.004)


def test_paired_difference_keeps_a_width_where_no_item_differs() -> None:
    """Five items that both got alike say little; a bootstrap of five zeros would be sure."""
    interval = difference_of_paired_proportions(3, 0, 0, 2)
    assert interval.value == 0 and interval.low < -0.2 and interval.high > 0.2
    wider = difference_of_paired_proportions(1, 0, 0, 0)
    assert wider.low < interval.low
    assert difference_of_paired_proportions(0, 0, 0, 0).includes(0.9)


def test_paired_difference_covers_the_truth_as_often_as_it_says() -> None:
    generator = np.random.default_rng(5)
    shares = np.array([0.55, 0.20, 0.10, 0.15])
    counts = generator.multinomial(40, shares, size=2000)
    covered = np.mean([difference_of_paired_proportions(*map(int, row)).includes(0.10) for row in counts])
    assert 0.93 < covered < 0.98
