"""Stops a policy whose reward rises while a judge's score falls: the reward is being gamed (Gao et al. 2022)."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from infra.run import Run
from training.core.train_state import EndOfTraining

FALSE_STOPS = 0.05
"""Maximum probability, over all rounds, of stopping a training whose judge's true score never falls."""
_ROUNDS_APART = 8
"""Minimum distance in rounds of stretches whose differences measure the noise: neighbouring rounds are correlated."""
_DIFFERENCES_PER_DEGREE = 35 / 18
"""Overlapping second differences of independent values per degree of freedom of their mean square:
1 + 2 (corr₁² + corr₂²) with the correlations -2/3 and 1/6."""


class Round(NamedTuple):
    """A round's mean reward, the judge's mean score of the same answers, and the standard error of that."""

    reward: float
    judge: float
    error: float


class DivergenceWatch:
    """Compares each complete stretch of `rounds` rounds with the earlier stretch that the judge scored highest.

    rounds: None watches nothing.
    """

    def __init__(self, rounds: int | None, run: Run) -> None:
        self._rounds = rounds
        self._run = run
        self.seen: list[Round] = []

    @property
    def is_on(self) -> bool:
        return self._rounds is not None

    def look(self, number: int, reward: float, judge: float, error: float) -> None:
        """Raise EndOfTraining where the judge's mean fell beyond chance since its best stretch and the reward rose.

        Args:
            number: of the round, from 0 on; a repeated round replaces its record and those after it.
        """
        if self._rounds is None:
            return
        self.seen = [*self.seen[:number], Round(reward, judge, error)]
        fall = fall_from_best(self.seen, self._rounds)
        if fall is not None:
            best_round, best, newest = fall
            message = (
                f"rlhf: stopped after round {number + 1:,}: over {self._rounds:,} rounds the judge's score is "
                f"{newest.judge:.3f}, and was {best.judge:.3f} up to round {best_round:,}, while the reward went from "
                f"{best.reward:.3f} to {newest.reward:.3f}"
            )
            self._run.event("diverged_from_judge", message, round=number + 1, best_round=best_round)
            raise EndOfTraining(message)


def fall_from_best(seen: list[Round] | NDArray[np.float64], rounds: int) -> tuple[int, Round, Round] | None:
    """Return (last round of the judge's best stretch, the means of that stretch, the means of the newest) where the
    newest is below it beyond chance and has more reward; None otherwise, and where no stretch ends with the last
    round.

    A sequential test: the k-th look has FALSE_STOPS / (k (k - 1)) of the error, which adds up to FALSE_STOPS over any
    number of looks. There is no correction for taking the best of k - 1 earlier stretches: the best is the same for
    many looks, so that late looks use little of their share. In simulated runs of 500 rounds, with windows of 5 and 20,
    noise of up to twice the reported error and correlations of up to 0.6, the rate stays below FALSE_STOPS
    (benchmarks/training/bench_divergence.py).

    Args:
        seen: (rounds, 3), as of Round.
    """
    looks, rest = divmod(len(seen), rounds)
    apart = math.ceil(_ROUNDS_APART / rounds)
    differences_count = looks - 2 * apart
    if rest or differences_count < 1:
        return None
    stretches = np.asarray(seen).reshape(looks, rounds, 3)
    means = stretches.mean(1)
    judge = means[:, 1]

    # Second differences cancel a steady rise or fall, whose slope is not noise. The answers' own spread is a lower
    # bound on the variation of a mean; rounds vary by more, since the policy moves and prompts are drawn.
    differences = judge[: -2 * apart] - 2 * judge[apart:-apart] + judge[2 * apart :]
    observed = np.mean(differences**2) / 6
    reported = np.mean(stretches[:, :, 2] ** 2) / rounds
    deviation = math.sqrt(max(observed, reported))

    degrees = differences_count / _DIFFERENCES_PER_DEGREE
    bound = -stdtrit(degrees, FALSE_STOPS / (looks * (looks - 1))) * math.sqrt(2) * deviation
    best = int(judge[:-1].argmax())
    if judge[best] - judge[-1] > bound and means[-1, 0] > means[best, 0]:
        return (best + 1) * rounds, Round(*means[best].tolist()), Round(*means[-1].tolist())
    return None
