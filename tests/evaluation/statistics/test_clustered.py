"""Intervals and tests of items in clusters, against their definitions, enumeration and simulation."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest

from evaluation.statistics.clustered import (
    clustered_difference,
    clustered_intercept,
    clustered_mean,
    clustered_ratio,
    clustered_share,
    clustered_sign_test,
    number_clusters,
)
from evaluation.statistics.intervals import (
    binomial_p_value,
    bootstrap,
    difference_of_paired_proportions,
    mcnemar_p_value,
    wilson,
)

PAIRS = list(combinations(range(7), 2))


def test_bounds_are_those_of_cr2_with_bell_and_mccaffreys_degrees_of_freedom() -> None:
    """By the definition, with the whole hat matrix, for clusters of unequal sizes."""
    from scipy import stats

    random = np.random.default_rng(1)
    clusters = np.repeat(np.arange(9), random.integers(1, 8, 9))
    x = random.normal(size=len(clusters)) + clusters
    y = random.normal(size=len(clusters)) + 0.3 * x
    design = np.stack([np.ones_like(x), x], axis=1)
    inverse = np.linalg.inv(design.T @ design)
    hat = design @ inverse @ design.T
    residuals = y - hat @ y
    scores, forms = [], []
    for number in range(9):
        of = clusters == number
        values, vectors = np.linalg.eigh(np.eye(of.sum()) - hat[np.ix_(of, of)])
        adjusted = (vectors / np.sqrt(values)) @ vectors.T @ design[of] @ inverse[:, 0]
        scores.append(adjusted @ residuals[of])
        forms.append((np.eye(len(x)) - hat)[:, of] @ adjusted)
    gram = np.array(forms) @ np.array(forms).T
    freedom = np.trace(gram) ** 2 / np.trace(gram @ gram)
    half = stats.t.ppf(0.975, freedom) * np.sqrt(np.square(scores).sum())
    found, slope = clustered_intercept(y, x, clusters)
    b, a = np.polyfit(x, y, 1)
    assert (found.value, slope) == pytest.approx((a, b))
    assert (found.low, found.high) == pytest.approx((a - half, a + half))
    alone = clustered_mean(y, np.arange(len(y)))
    assert (alone.low, alone.high) == pytest.approx(
        tuple(stats.t.interval(0.95, len(y) - 1, y.mean(), stats.sem(y))), rel=1e-6
    )


def test_a_ratio_is_sum_over_sum() -> None:
    random = np.random.default_rng(2)
    tokens = random.integers(1, 60, 300)
    losses = tokens * random.normal(1.0, 0.3, 300)
    found = clustered_ratio(losses, tokens, np.arange(300))
    assert found.value == pytest.approx(losses.sum() / tokens.sum())
    wanted = bootstrap(
        losses, tokens, statistic=lambda top, bottom: top.sum(axis=-1) / bottom.sum(axis=-1), resamples=4000
    )
    assert found.high - found.low == pytest.approx(wanted.high - wanted.low, rel=0.1)


@pytest.mark.parametrize("alternative", ["two-sided", "greater"])
def test_the_sign_test_of_clusters_is_that_of_all_signs(alternative: str) -> None:
    random = np.random.default_rng(3)
    for _ in range(20):
        clusters = np.repeat(np.arange(9), random.integers(1, 6, 9))
        signs = random.choice([-1, 0, 1], len(clusters), p=[0.3, 0.2, 0.5])
        sums = np.bincount(clusters, signs)
        every = np.array([np.dot(row, np.abs(sums)) for row in product((-1, 1), repeat=9)])
        reached = np.abs(every) >= abs(sums.sum()) if alternative == "two-sided" else every >= sums.sum()
        assert clustered_sign_test(signs, clusters, alternative) == pytest.approx(reached.mean())  # type: ignore[arg-type]


def test_a_cluster_for_each_item_gives_the_usual_intervals_and_tests() -> None:
    random = np.random.default_rng(4)
    first, second = random.random(60) < 0.7, random.random(60) < 0.5
    alone, hits = np.arange(60), int(first.sum())
    assert clustered_share(first, alone) == wilson(hits, 60)
    assert clustered_sign_test(2 * first - 1, alone, "greater") == pytest.approx(
        binomial_p_value(hits, 60, alternative="greater")
    )
    cells = [int((first & second).sum()), int((first & ~second).sum()), int((~first & second).sum())]
    interval, p_value = clustered_difference(first, second, alone)
    assert interval == difference_of_paired_proportions(*cells, 60 - sum(cells))
    assert p_value == pytest.approx(mcnemar_p_value(cells[1], cells[2]))


def test_items_that_repeat_their_clusters_outcome_say_no_more_than_one_of_each() -> None:
    """Twenty clusters whose twelve items are all alike: as wide as twenty items, where Student's quantile allows."""
    hits = np.arange(20) < 13
    clusters = np.repeat(np.arange(20), 12)
    found, wanted = clustered_share(np.repeat(hits, 12), clusters), wilson(13, 20)
    assert found.high - found.low == pytest.approx(wanted.high - wanted.low, rel=0.12)
    assert found.high - found.low > wanted.high - wanted.low
    assert clustered_sign_test(np.repeat(2 * hits - 1, 12), clusters) == pytest.approx(binomial_p_value(13, 20))


def test_one_cluster_knows_nothing_of_others_and_all_alike_keeps_a_width() -> None:
    one = np.zeros(50, np.int64)
    assert (clustered_share(np.ones(50), one).low, clustered_share(np.ones(50), one).high) == (0, 1)
    assert clustered_mean(np.arange(50.0), one).as_figures("margin") == {"margin": 24.5}
    interval, p_value = clustered_difference(np.ones(50), np.zeros(50), one)
    assert (interval.low, interval.high, p_value) == (-1, 1, 1)
    five = np.repeat(np.arange(5), 10)
    assert clustered_share(np.ones(50), five).low < 0.6 < wilson(50, 50).low
    assert clustered_difference(np.ones(50), np.zeros(50), five)[0].low < 0.75
    assert clustered_sign_test(np.ones(50), five) == 2 * 0.5**5


def test_numbers_of_clusters_may_have_gaps_and_come_in_any_order() -> None:
    keys = ["b", "a", "b", "c", "a", "c"]
    assert number_clusters(keys).tolist() == [0, 1, 0, 2, 1, 2]
    values, gaps = np.array([1.0, 2.0, 1.5, 4.0, 2.5, 3.0]), np.array([7, 2, 7, 11, 2, 11])
    assert clustered_mean(values, gaps) == clustered_mean(values, number_clusters(keys))
    assert clustered_share(values > 2, gaps) == clustered_share(values > 2, number_clusters(keys))


@pytest.mark.parametrize(("prompts", "unequal"), [(40, False), (10, False), (40, True)])
def test_intervals_and_tests_of_rankings_hold_their_level(prompts: int, unequal: bool) -> None:
    """A policy unrelated to the rankings of seven answers, all 21 pairs of which are measured; unequal: of two to seven
    answers. As independent pairs they alarm in 12 % and more (`benchmarks/evaluation/bench_intervals.py`)."""
    random = np.random.default_rng(20261127)
    missed, runs = np.zeros(4), 400
    for _ in range(runs):
        answers = random.integers(2, 8, prompts) if unequal else np.full(prompts, 7)
        clusters = np.repeat(np.arange(prompts), answers * (answers - 1) // 2)
        scores = random.normal(size=(prompts, 7))
        pairs = [list(combinations(range(count), 2)) for count in answers]
        margins = np.concatenate([[row[i] - row[j] for i, j in of] for row, of in zip(scores, pairs, strict=True)])
        right = margins > 0
        p_value = clustered_sign_test(2 * right - 1, clusters, "greater")
        missed += [
            not clustered_mean(margins, clusters).includes(0),
            not clustered_share(right, clusters).includes(0.5),
            not clustered_intercept(margins, random.integers(-9, 10, len(margins)), clusters)[0].includes(0),
            p_value < 0.05,
        ]
    # Three standard errors above 5 % of 400 runs.
    assert (missed / runs < 0.05 + 3 * np.sqrt(0.05 * 0.95 / runs)).all(), missed / runs
    assert missed[0] / runs > 0.005, "so wide that it is never missed"
