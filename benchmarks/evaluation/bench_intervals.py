"""Coverage and false alarms of the figures of rankings, with pairs taken for independent ones and clustered by prompt.

    python -m benchmarks.evaluation.bench_intervals --runs 2000

A policy (or reward model) is unrelated to the rankings: each answer has an independent normal score. The true margin is
0 and the true win rate 0.5, so that every interval that leaves these out and every p-value below 0.05 is a mistake, of
which 5 % are allowed. Prints a row for each setting: how often the interval of the margin, of the margin at equal
length and of the win rate misses, and how often p < 0.05, before and after.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from evaluation.statistics.clustered import clustered_intercept, clustered_mean, clustered_share, clustered_sign_test
from evaluation.statistics.intervals import binomial_p_value, bootstrap, wilson

SETTINGS: Mapping[str, tuple[int, tuple[int, ...]]] = {
    "40 prompts, 7 answers (21 pairs each)": (40, (7,)),
    "10 prompts, 7 answers (21 pairs each)": (10, (7,)),
    "40 prompts, 2 to 7 answers (1 to 21 pairs)": (40, (2, 3, 4, 5, 6, 7)),
    "10 prompts, 2 to 7 answers (1 to 21 pairs)": (10, (2, 3, 4, 5, 6, 7)),
    "40 prompts, one of them with 20 answers (190 pairs), the others with 2": (40, (2,)),
    "200 prompts, 2 answers (one pair each)": (200, (2,)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=20261127)
    options = parser.parse_args()
    print("| setting | margin | win rate | p < 0.05 | at equal length, after |")
    print("|---|---|---|---|---|")
    for name, (prompts, answers) in SETTINGS.items():
        random = np.random.default_rng(options.seed)
        one_large = "one of them" in name
        mistakes = np.mean([_mistakes(random, prompts, answers, one_large) for _ in range(options.runs)], axis=0)
        before, after, level = mistakes[:3], mistakes[3:6], mistakes[6]
        cells = [f"{100 * was:.1f} → {100 * now:.1f} %" for was, now in zip(before, after, strict=True)]
        print(f"| {name} | {' | '.join(cells)} | {100 * level:.1f} % |", flush=True)


def _mistakes(
    random: np.random.Generator, prompts: int, answers: tuple[int, ...], one_large: bool
) -> NDArray[np.float64]:
    """1 for each mistake: margin, win rate and p-value of independent pairs; the same clustered; at equal length."""
    counts = random.choice(answers, prompts)
    if one_large:
        counts[0] = 20
    margins = []
    for count in counts:
        scores = random.normal(size=count)
        margins.append([scores[i] - scores[j] for i, j in combinations(range(count), 2)])
    clusters = np.repeat(np.arange(prompts), [len(row) for row in margins])
    flat = np.concatenate(margins)
    longer = random.integers(-40, 41, len(flat))
    right, hits = flat > 0, int((flat > 0).sum())
    return np.array(
        [
            not bootstrap(flat, resamples=500).includes(0),
            not wilson(hits, len(flat)).includes(0.5),
            binomial_p_value(hits, len(flat), alternative="greater") < 0.05,
            not clustered_mean(flat, clusters).includes(0),
            not clustered_share(right, clusters).includes(0.5),
            clustered_sign_test(2 * right - 1, clusters, "greater") < 0.05,
            not clustered_intercept(flat, longer, clusters)[0].includes(0),
        ],
        dtype=np.float64,
    )


if __name__ == "__main__":
    main()
