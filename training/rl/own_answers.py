"""Answers of a student that is distilled, sampled from its weights at a batch in place of those that are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain, zip_longest

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from infra.run import Run
from training.chat.base import Chat, Conversation
from training.config import DistillConfig
from training.core import ranks
from training.core.callbacks import Callback
from training.core.hardware import Hardware
from training.core.measuring import measuring
from training.core.train_state import TrainState
from training.generation.completions import generate
from training.model.loss import IGNORE

_OWN_ANSWERS = 0x0D15
"""Separates the random numbers of the student's answers from others of the same seed."""


class OwnAnswers(Callback):
    """Replaces the answers of some batches by the student's own, sampled from its weights at that batch.

    Which batches these are, and the random numbers of their answers, depend on the seed and the batch's number, so that
    a training that continues samples the same. All ranks sample their part of a batch, as in one process.
    """

    def __init__(
        self,
        sampler: PreTrainedModel,
        refresh: Callable[[], None],
        chat: Chat,
        config: DistillConfig,
        max_length: int,
        hardware: Hardware,
        run: Run,
    ) -> None:
        """Create the callback.

        Args:
            sampler: whole on this rank.
            refresh: updates it to the trained weights; every rank calls it.
            max_length: tokens of the longest conversation.
        """
        self._sampler = sampler
        self._refresh = refresh
        self._chat = chat
        self._config = config
        self._room = max_length - config.answer_max_tokens
        self._hardware = hardware
        self._run = run

    def batch_start(self, state: TrainState) -> None:
        config, chat, number = self._config, self._chat, state.clock.batch
        random = np.random.default_rng([config.seed, _OWN_ANSWERS, number])
        if random.random() >= config.on_policy_share:
            return
        self._refresh()
        # The batch's prompts in the order that they have in one process: ranks have them in turn.
        own_prompts = [chat.shortened(prompt, self._room) for prompt in prompts_in(state.batch)]
        dealt = chain.from_iterable(zip_longest(*ranks.gather(own_prompts)))
        prompts = [prompt for prompt in dealt if prompt is not None]
        with measuring(self._sampler):
            answers = generate(
                self._sampler, prompts, chat, config, self._hardware, int(random.integers(2**62)), in_ranks=True
            )
        own_answers = answers.ids[ranks.rank() :: ranks.world_size()]
        talks = [Conversation(*both) for both in zip(own_prompts, own_answers, strict=True)]
        device = state.batch["input_ids"].device
        state.batch = {name: value.to(device) for name, value in chat.response_batch(talks).items()}
        figures = {
            "distill/answer_tokens": float(np.mean([len(ids) for ids in answers.ids])),
            "distill/ends_share": float(answers.finished.float().mean()),
        }
        self._run.metrics(figures, number)


def prompts_in(batch: Mapping[str, Tensor]) -> list[list[int]]:
    """Return the tokens of each sequence up to its first labelled one."""
    starts = (batch["labels"] != IGNORE).int().argmax(1) + 1
    return [ids[:start] for ids, start in zip(batch["input_ids"].tolist(), starts.tolist(), strict=True)]
