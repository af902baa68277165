"""False and true stops of `rlhf.stop_on_divergence` on simulated rounds.

python benchmarks/training/bench_divergence.py [--runs 1000] [--seed 1]      (ten minutes on two busy cores)

A run is a curve of the judge's true score over the rounds plus noise, with a reward that always rises, so that the
judge alone decides. Healthy curves: constant; rising by ten standard errors of a round with a time constant of a tenth
of the run, then flat. Gamed curves (Gao et al. 2022): R(d) = d (1 - β log d) with d = sqrt(KL) up to 15, KL
proportional to the round, and a standard error of 0.2: β = 0.5 peaks at d = 2.7, β = 0.35 at d = 6.4. Noise: normal
with 0.5, 1 and 2 times the reported standard error, and autoregressive of order 1. "before" is the rule up to e9caee4:
after each round, the newest `window` rounds are more than two standard errors below the best stretch so far.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from training.rl.overoptimisation import fall_from_best

ERROR = 0.2
NOISES = ((0.5, 0.0), (1.0, 0.0), (2.0, 0.0), (1.0, 0.3), (1.0, 0.6), (2.0, 0.6))
"""(standard deviation in standard errors, correlation of neighbouring rounds)"""
CURVES = ("constant", "rises, then flat", "Gao, β = 0.5", "Gao, β = 0.35")

Rule = Callable[[NDArray[np.float64], int], int | None]
"""(scores (rounds,), window) → rounds after which it stops."""


def true_scores(curve: str, rounds: int) -> NDArray[np.float64]:
    """(rounds,)"""
    number = np.arange(1, rounds + 1)
    if curve == "constant":
        return np.zeros(rounds)
    if curve == "rises, then flat":
        return 10 * ERROR * -np.expm1(-10 * number / rounds)
    distance = 15 * np.sqrt(number / rounds)
    return distance * (1 - float(curve.split()[-1]) * np.log(distance))


def noise(rounds: int, scale: float, correlation: float, random: np.random.Generator) -> NDArray[np.float64]:
    """(rounds,), stationary from the first round on."""
    shocks = random.normal(size=rounds + 50) * math.sqrt(1 - correlation**2)
    return scale * ERROR * lfilter([1.0], [1.0, -correlation], shocks)[50:]


def before(scores: NDArray[np.float64], window: int) -> int | None:
    means = np.convolve(scores, np.full(window, 1 / window), "valid")
    falls = np.maximum.accumulate(means)[:-window] - means[window:]
    stops = np.flatnonzero(falls > 2 * math.sqrt(2 / window) * ERROR)
    return int(stops[0]) + 2 * window if len(stops) else None


def now(scores: NDArray[np.float64], window: int) -> int | None:
    seen = np.column_stack([np.arange(len(scores)), scores, np.full(len(scores), ERROR)])
    looks = range(window, len(seen) + 1, window)
    return next((count for count in looks if fall_from_best(seen[:count], window) is not None), None)


def row(job: tuple[str, int, int, float, float, int, int]) -> str:
    curve, rounds, window, scale, correlation, runs, seed = job
    scores = true_scores(curve, rounds)
    random = np.random.default_rng([seed, rounds, window, int(10 * scale), int(10 * correlation), CURVES.index(curve)])
    samples = [scores + noise(rounds, scale, correlation, random) for _ in range(runs)]
    cells = [curve, rounds, window, scale, correlation]
    for rule in (before, now):
        stops = [stop for stop in (rule(sample, window) for sample in samples) if stop is not None]
        cells.append(f"{len(stops) / runs:.1%}")
        if curve.startswith("Gao"):
            cells.append(f"{np.median(stops) - scores.argmax() - 1:+.0f}" if stops else "none")
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    jobs = [
        (curve, rounds, window, *kind, options.runs, options.seed)
        for curve in CURVES
        for rounds in (100, 500)
        for window in (5, 20)
        for kind in NOISES
    ]
    print("curve | rounds | window | noise | correlation | stopped before (Gao: median delay after the peak) | now")
    with ProcessPoolExecutor(2) as pool:
        for line in pool.map(row, jobs):
            print(line, flush=True)


if __name__ == "__main__":
    main()
