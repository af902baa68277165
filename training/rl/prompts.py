"""Prompts of RLHF, and the random draws of a round: its prompts, their order in minibatches, groups drawn again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from training.config import RlhfConfig
from training.rl.verify import Rule
from training.train_modules.answer_logprobs import answered

_EQUAL = 1e-6
"""Largest difference of equal rewards."""


@dataclass(frozen=True)
class Prompt:
    """A prompt with its ids, its response, the rule that judges its answers, if any, and the messages before it.

    task: of an environment that makes its tasks by itself, from which it has its prompt.
    """

    text: str
    ids: list[int]
    response: str
    rule: Rule | None
    history: Sequence[Mapping[str, str]] = ()
    task: Mapping[str, Any] | None = None


def draw(config: RlhfConfig, prompts: Sequence[Prompt], number: int) -> tuple[np.random.Generator, list[Prompt], int]:
    """Return the prompt of each answer of round `number`, the seed of the answers, and the round's further random
    numbers."""
    random = np.random.default_rng([config.seed, number])
    count = config.rollout_prompts // config.answers_per_prompt
    chosen = random.choice(len(prompts), count, replace=len(prompts) < count)
    drawn = [prompts[index] for index in chosen.repeat(config.answers_per_prompt).tolist()]
    return random, drawn, int(random.integers(2**62))


def equal_groups(scores: Tensor, group: int) -> Tensor:
    """Return the numbers of the groups of answers to one prompt whose scores (B,) are all equal."""
    grouped = scores.view(-1, group)
    return (grouped.amax(1) - grouped.amin(1) <= _EQUAL).nonzero()[:, 0]


def minibatches(config: RlhfConfig, random: np.random.Generator) -> list[NDArray[np.int64]]:
    """Return the indices of the answers of each minibatch of one pass over a round."""
    together, learnt = config.answers_per_prompt if config.whole_groups else 1, config.learnt_answers
    dealt = random.permutation(learnt // together)[:, None] * together + np.arange(together)
    return np.split(dealt.flatten(), learnt // config.minibatch_answers)


def without_padding(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """Drop the columns of a minibatch that are padding in all of its rows."""
    answer = int(rows["mask"].sum(1).max())
    length = int(answered(rows["places"], rows["mask"]).max()) + 1
    shorter = {name: value[:, : length if name == "ids" else answer] for name, value in rows.items()}
    return shorter | {"places": shorter["places"].clamp(max=length - 1)}
