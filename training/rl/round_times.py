"""Generation speed of RLHF, and the share of its rounds that generation takes."""

from __future__ import annotations

import time
from collections.abc import Callable

from infra.run import Run
from training.core.callbacks import Callback
from training.core.train_state import TrainState
from training.generation.completions import Completions


class RoundTimes(Callback):
    """Generation speed, and the share of the rounds' time that generation takes.

    A round lasts from its prompts to the end of its last batch. A round that an earlier process began is not counted.
    """

    def __init__(self, run: Run, batches: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """Start with no round measured.

        Args:
            run: receives the figures.
            batches: batches per round.
            clock: returns seconds.
        """
        self._run = run
        self._batches = batches
        self._clock = clock
        self._began: float | None = None
        self._generating_s = 0.0
        self._tokens = 0
        self._whole_s = self._whole_generating_s = self._whole_tokens = 0.0

    def begin(self) -> None:
        """Start the clock of a round."""
        self._began = self._clock()

    def generate(self, answer: Callable[[], Completions], step: int) -> Completions:
        """Return the result of `answer`, timed over all ranks; the speed is recorded at this step."""
        began = self._clock()
        answers = answer()
        self._generating_s = max(self._clock() - began, 1e-9)
        self._tokens = answers.sampled_tokens
        self._run.metric("rlhf/generated_tokens_per_s", self._tokens / self._generating_s, step)
        return answers

    def generate_more(self, answer: Callable[[], Completions]) -> Completions:
        """Return the result of `answer`, whose time and tokens are added to those of the round."""
        began = self._clock()
        answers = answer()
        self._generating_s += self._clock() - began
        self._tokens += answers.sampled_tokens
        return answers

    def batch_end(self, state: TrainState) -> None:
        if self._began is None or state.clock.batch % self._batches:
            return
        took, self._began = self._clock() - self._began, None
        self._whole_s += took
        self._whole_generating_s += self._generating_s
        self._whole_tokens += self._tokens
        self._run.metric("rlhf/generating_share", self._generating_s / took, state.clock.batch)

    def figures(self) -> dict[str, float]:
        """Return figures over all complete rounds of this process; nothing without any."""
        if not self._whole_s:
            return {}
        return {
            "generated_tokens_per_s": self._whole_tokens / self._whole_generating_s,
            "generating_share": self._whole_generating_s / self._whole_s,
        }
