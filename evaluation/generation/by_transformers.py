"""Answers of models that keep what they have read in their own way (a recurrent state, positions by the longest
sequence): the passes are those of transformers' `generate`, the tokens are chosen by `token_choice.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from evaluation.generation.token_choice import ChosenAnswer, choose_tokens

AT_ONCE = 256
"""Answers per pass."""


def answer_by_transformers(
    model: PreTrainedModel,
    answers: Sequence[ChosenAnswer],
    unused: Tensor,
    on_step: Callable[[int], None] = lambda done: None,
    watch: Callable[[Tensor, Sequence[ChosenAnswer]], None] | None = None,
) -> None:
    """Complete answers.

    Args:
        unused: Ids that belong to no token.
        on_step, watch: As of `Decoder.answer`.
    """
    # Rows of one length need no padding and no attention mask, which not every model supports.
    by_length: dict[int, list[ChosenAnswer]] = {}
    for answer in answers:
        by_length.setdefault(len(answer.ids), []).append(answer)
    config = GenerationConfig(do_sample=False, eos_token_id=[], pad_token_id=0)  # not None: the model's own would count
    # Otherwise the model's own defaults would fill in what is not set here, depending on the version of transformers.
    copied = copy(model)
    copied.generation_config = config
    for _, same in sorted(by_length.items()):
        for start in range(0, len(same), AT_ONCE):
            batch = same[start : start + AT_ONCE]
            choice = _Choice(batch, unused, lambda: on_step(sum(answer.is_over for answer in answers)), watch)
            ids = torch.tensor([answer.ids for answer in batch], device=model.device)  # (B, T)
            left = max(answer.options.max_new_tokens - len(answer.new) for answer in batch)
            copied.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                max_new_tokens=left,
                logits_processor=LogitsProcessorList([choice]),
                stopping_criteria=StoppingCriteriaList([_AllOver(batch)]),
            )


class _Choice(LogitsProcessor):
    """Chooses the next tokens of the answers that are not over, and makes each the only possible one."""

    def __init__(
        self,
        answers: Sequence[ChosenAnswer],
        unused: Tensor,
        on_step: Callable[[], None],
        watch: Callable[[Tensor, Sequence[ChosenAnswer]], None] | None,
    ) -> None:
        self._answers, self._unused, self._on_step, self._watch = answers, unused, on_step, watch

    def __call__(self, input_ids: Any, scores: Tensor) -> Tensor:
        self._on_step()
        rows = [row for row, answer in enumerate(self._answers) if not answer.is_over]
        answers, logits = [self._answers[row] for row in rows], scores[rows].float()
        if self._watch is not None:
            self._watch(logits, answers)
        forced = torch.full_like(scores, -torch.inf)
        forced[:, 0] = 0
        for row, answer, token in zip(
            rows, answers, choose_tokens(logits.index_fill(1, self._unused, -torch.inf), answers), strict=True
        ):
            answer.take(token)
            forced[row, token.id] = 1
        return forced


class _AllOver(StoppingCriteria):
    """Ends each row with its answer."""

    def __init__(self, answers: Sequence[ChosenAnswer]) -> None:
        self._answers = answers

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return torch.tensor([answer.is_over for answer in self._answers], device=input_ids.device)
