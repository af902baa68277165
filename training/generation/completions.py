"""Sampled answers: drawn from a model, laid out for scoring, and scored.

Shapes: B answers, P prompt tokens and T answer tokens after padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from training.chat.base import Chat, pad
from training.core import ranks
from training.core.hardware import Hardware
from training.core.measuring import measuring
from training.generation.sampling import sample
from training.train_modules.answer_logprobs import answer_logits, answered
from training.train_modules.kl import exact_kl
from training.train_modules.scorer import Scorer

_BATCH = 64
T = TypeVar("T")


@dataclass(frozen=True)
class Episode:
    """An episode in an environment (`training.rl.environments`).

    sampled: for each token after the prompt, if the policy sampled it; the others are the environment's. ended: done
    (by the environment), turns or tokens (none were left), unfinished (the last answer has no end). accepted: by the
    environment's second rule. messages: the conversation, as text. failures: of dropped episodes of this row, before
    it. is_copy: of another row, since those of this row were all dropped.
    """

    sampled: list[bool]
    reward: float
    ended: str
    turns: int
    tool_calls: int
    accepted: bool | None
    messages: list[dict[str, Any]]
    failures: list[str]
    is_copy: bool = False


@dataclass(frozen=True)
class Completions:
    """Sampled answers: their prompts and new ids, and whether each emitted `<|end|>`.

    logprobs: of the new ids, as reported by a program other than this one's model; None where that model sampled.
    episodes: of each row, where these are not single answers but conversations with an environment.
    """

    prompts: list[list[int]]
    ids: list[list[int]]
    finished: Tensor
    logprobs: list[list[float]] | None = None
    episodes: list[Episode] | None = None

    @classmethod
    def of_episodes(
        cls,
        prompts: list[list[int]],
        ids: list[list[int]],
        episodes: list[Episode],
        logprobs: list[list[float]] | None = None,
    ) -> Completions:
        """Return episodes as answers, of which those are finished that the environment ended."""
        finished = torch.tensor([episode.ended == "done" for episode in episodes])
        return cls(prompts, ids, finished, logprobs, episodes)

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the policy sampled."""
        if self.episodes is None:
            return sum(map(len, self.ids))
        return sum(sum(episode.sampled) for episode in self.episodes)

    def last_answers(self) -> list[list[int]]:
        """Return the ids of each answer, of an episode those of its last answer."""
        if self.episodes is None:
            return self.ids
        pairs = zip(self.ids, self.episodes, strict=True)
        return [ids[len(_before_last(episode.sampled)) :] for ids, episode in pairs]

    def replaced(self, rows: Sequence[int], others: Completions) -> Completions:
        """Return these answers with those of `rows` replaced by `others`, in order."""
        source = {row: number for number, row in enumerate(rows)}

        def column(values: Sequence[T], replacements: Sequence[T]) -> list[T]:
            return [replacements[source[row]] if row in source else value for row, value in enumerate(values)]

        finished = self.finished.clone()
        finished[list(rows)] = others.finished
        logprobs = None
        if self.logprobs is not None and others.logprobs is not None:
            logprobs = column(self.logprobs, others.logprobs)
        episodes = None
        if self.episodes is not None and others.episodes is not None:
            episodes = column(self.episodes, others.episodes)
        prompts, ids = column(self.prompts, others.prompts), column(self.ids, others.ids)
        return Completions(prompts, ids, finished, logprobs, episodes)


def _before_last(sampled: Sequence[bool]) -> Sequence[bool]:
    """Return the marks of an episode up to where its last answer begins."""
    kept = list(sampled)
    while kept and kept[-1]:
        kept.pop()
    return kept


@dataclass
class AnswerBatch:
    """Prompts and answers side by side, padded on the right.

    ids (B, P + T), places (B, T): the position whose logits predict each answer token, tokens (B, T), mask (B, T). In
    episodes T counts the policy's tokens of all turns; those of the environment are in `ids` alone.
    """

    ids: Tensor
    places: Tensor
    tokens: Tensor
    mask: Tensor

    @classmethod
    def of(cls, answers: Completions, fill: int) -> AnswerBatch:
        ids = pad([[*prompt, *answer] for prompt, answer in zip(answers.prompts, answers.ids, strict=True)], fill)
        if answers.episodes is not None:
            return cls._of_episodes(ids, answers, answers.episodes)
        lengths = torch.tensor([len(answer) for answer in answers.ids])
        starts = torch.tensor([len(prompt) for prompt in answers.prompts])
        steps = torch.arange(int(lengths.max()))
        mask = (steps < lengths[:, None]).float()
        places = (starts[:, None] - 1 + steps).clamp(max=ids.shape[1] - 1)
        tokens = ids.gather(1, (places + 1).clamp(max=ids.shape[1] - 1))
        return cls(ids, places, tokens, mask)

    @classmethod
    def _of_episodes(cls, ids: Tensor, answers: Completions, episodes: Sequence[Episode]) -> AnswerBatch:
        rows = [
            [len(prompt) - 1 + number for number, is_sampled in enumerate(episode.sampled) if is_sampled]
            for prompt, episode in zip(answers.prompts, episodes, strict=True)
        ]
        width = max(map(len, rows))
        places = torch.tensor([[*row, *[row[-1]] * (width - len(row))] for row in rows])
        mask = (torch.arange(width) < torch.tensor([[len(row)] for row in rows])).float()
        return cls(ids, places, ids.gather(1, places + 1), mask)

    def last(self) -> Tensor:
        """Position (B,) of each answer's last token."""
        return answered(self.places, self.mask)


class Answering(Protocol):
    """The options of sampling that a stage's config has."""

    @property
    def answer_max_tokens(self) -> int: ...
    @property
    def temperature(self) -> float: ...


def generate(
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    chat: Chat,
    config: Answering,
    hardware: Hardware,
    seed: int,
    *,
    in_ranks: bool = False,
    only: slice | None = None,
) -> Completions:
    """Sample one answer to each prompt.

    in_ranks: each rank samples its part of them, with a whole model on each, and all get all; every rank must call. The
    answers are those of one process. only: the prompts to answer, with the draws that they have among all.
    """
    own = sample(
        model,
        prompts,
        max_new_tokens=config.answer_max_tokens,
        temperature=config.temperature,
        stops=chat.stops,
        hardware=hardware,
        seed=seed,
        batch_size=128,
        only=ranks.own_part(len(prompts)) if in_ranks else only,
    )
    ids = [answer for part in ranks.gather(own) for answer in part] if in_ranks else own
    answered = list(prompts[only or slice(None)])
    return Completions(answered, ids, torch.tensor([chat.has_ended(answer) for answer in ids]))


def scores_of(scorer: Scorer, answers: Completions, chat: Chat, hardware: Hardware) -> Tensor:
    """The reward model's raw scores (B,), read at each answer's last token. Each rank scores its part, and every rank
    must call."""
    batch, mine = AnswerBatch.of(answers, chat.pad), ranks.own_part(len(answers.ids))
    parts = zip(batch.ids[mine].split(_BATCH), batch.last()[mine].split(_BATCH), strict=True)
    with measuring(scorer):
        found = [scorer(ids.to(hardware.device), last.to(hardware.device)).cpu() for ids, last in parts if len(ids)]
    return ranks.join_parts(torch.cat([torch.empty(0), *found]))


def kl_of(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    answers: Completions,
    chat: Chat,
    hardware: Hardware,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """KL(model ‖ reference) summed over each answer's tokens (B,), from whole distributions, and the token counts.

    temperature: of the sampling of the answers, and so of both distributions: the mean over answers is the KL
    divergence of what is sampled.
    """
    batch = AnswerBatch.of(answers, chat.pad)
    sums = []
    with measuring(model), measuring(reference):
        for rows in torch.arange(len(batch.ids)).split(_BATCH // 4):
            ids, places, mask = (value[rows].to(hardware.device) for value in (batch.ids, batch.places, batch.mask))
            logits = (
                answer_logits(network, ids, places, mask, hardware, temperature) for network in (model, reference)
            )
            each = torch.zeros_like(mask).masked_scatter(mask.bool(), exact_kl(*logits))
            sums.append(each.sum(1).cpu())
    return torch.cat(sums), batch.mask.sum(1)
