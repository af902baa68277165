"""When a policy's reward goes on rising and a judge's score falls: the reward is being gamed (Gao et al. 2022)."""

from __future__ import annotations

import math
from typing import NamedTuple

from infra.run import Run
from training.train_state import EndOfTraining

ERRORS = 2.0
"""Standard errors by which the judge's score has to have fallen, about 95 %."""


class Round(NamedTuple):
    """A round's mean reward, the judge's mean score of the same answers, and the standard error of that."""

    reward: float
    judge: float
    error: float


class DivergenceWatch:
    """Compares the last `rounds` rounds with the stretch of so many that the judge liked best.

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
        """Raises EndOfTraining where the judge's mean fell by more than two standard errors since its best stretch and
        the reward rose. number: of the round, from 0 on; a round that was seen before is seen anew."""
        if self._rounds is None:
            return
        self.seen = [*self.seen[:number], Round(reward, judge, error)]
        best = best_stretch(self.seen, self._rounds)
        if best is not None:
            ended, then, now = best
            message = (
                f"rlhf: stopped after round {number + 1:,}: over {self._rounds:,} rounds the judge's score lies at "
                f"{now.judge:.3f}, and was {then.judge:.3f} up to round {ended:,}, while the reward went from "
                f"{then.reward:.3f} to {now.reward:.3f}"
            )
            self._run.event("diverged_from_judge", message, round=number + 1, best_round=ended)
            raise EndOfTraining(message)


def best_stretch(seen: list[Round], rounds: int) -> tuple[int, Round, Round] | None:
    """(the round that the judge's best stretch ended with, its means, those of the last stretch) where the last lies
    below it beyond chance and has more reward; None where not, or where the two would overlap."""
    if len(seen) < 2 * rounds:
        return None

    def mean(part: list[Round]) -> Round:
        error = math.sqrt(sum(one.error**2 for one in part)) / len(part)
        return Round(sum(one.reward for one in part) / len(part), sum(one.judge for one in part) / len(part), error)

    now = mean(seen[-rounds:])
    stretches = {end: mean(seen[end - rounds : end]) for end in range(rounds, len(seen) - rounds + 1)}
    ended = max(stretches, key=lambda end: stretches[end].judge)
    then = stretches[ended]
    fell = then.judge - now.judge > ERRORS * math.hypot(then.error, now.error)
    return (ended, then, now) if fell and now.reward > then.reward else None
