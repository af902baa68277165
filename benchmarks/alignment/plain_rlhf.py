"""A round of reinforcement learning written plainly, with transformers and torch alone: what ours is raced against.

As trl's GRPOTrainer lays a batch out: prompts padded on the left and answers on the right to the longest of the batch,
each answer with a prompt of its own, and logits of all places that the padded answers take. What is computed is what
`training.rlhf` computes, so that the policy is the same, but for rounding.

Shapes: B answers, P prompt tokens and T answer tokens after padding.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from training.chat.base import Chat
from training.config import RlhfConfig
from training.core.hardware import Hardware
from training.generation.completions import Completions
from training.model.attention import choose_attention
from training.model.models import load
from training.rl.algorithms import Sampled, algorithm_of
from training.rl.ensemble import Ensemble
from training.rl.rewards import Prompt, Rewards, RewardScale
from training.train_modules.scorer import Scorer, load_scorer
from training.trainer.schedules import LearningRateSchedule

_BATCH = 64


class PlainScorer(Scorer):
    """A reward model that reads padded sequences."""

    def forward(self, ids: Tensor, last: Tensor) -> Tensor:
        ids = ids[:, : int(last.max()) + 1]
        mask = (torch.arange(ids.shape[1]) <= last[:, None]).long()
        return _scores(self.model, ids, mask, last[:, None], self._hardware)[:, 0]


class PlainRlhf:
    """Learns from rounds of answers that others have written."""

    def __init__(self, inputs: dict[str, Path], config: RlhfConfig, hardware: Hardware, length: int) -> None:
        """length: tokens of the longest prompt with its answer."""
        self._config, self._hardware, self.chat = config, hardware, Chat.load(inputs["model"])
        self.policy = load(inputs["model"]).eval()
        self._reference = copy.deepcopy(self.policy).requires_grad_(False)
        scorer = load_scorer(inputs["reward_model"], hardware)
        reward = PlainScorer(scorer.model, hardware).eval().requires_grad_(False)
        self._algorithm = algorithm_of(config)
        self._value = copy.deepcopy(scorer.model).requires_grad_(True).eval() if self._algorithm.has_values else None
        self._networks = [self.policy, *([self._value] if self._value is not None else [])]
        for network in (*self._networks, self._reference, reward.model):
            choose_attention(network, hardware, length)
        self._scale = RewardScale(config.kl_coef)
        ensemble = Ensemble({"reward_model": reward}, config)
        self._rewards = Rewards(ensemble, self._scale, self.chat, config, hardware)
        batches = config.rollouts * config.epochs * (config.rollout_prompts // config.minibatch_answers)
        self._schedule = LearningRateSchedule.of(config.schedule, batches, config.minibatch_answers * length, 1)
        weights = [weight for network in self._networks for weight in network.parameters()]
        optimizer = config.optimizer
        self._optimizer = torch.optim.AdamW(
            weights, optimizer.learning_rate, optimizer.betas, optimizer.eps, optimizer.weight_decay, fused=True
        )
        self._batch = 0

    def learn(self, answers: Completions, asked: Sequence[Prompt], minibatches: Sequence[NDArray[np.int64]]) -> None:
        """Scores a round's answers and learns from them. minibatches: answers by number, of all passes."""
        scores = self._rewards.of(answers, asked).scores
        columns = [self._looked(answers, range(at, at + _BATCH)) for at in range(0, len(answers.ids), _BATCH)]
        longest = max(map(len, answers.ids))
        logprobs, reference, mask, values = (
            None if column[0] is None else torch.cat([_wide(one, longest) for one in column])
            for column in zip(*columns, strict=True)
        )
        sampled = Sampled(scores, logprobs, reference, mask, values, float(self._scale.kl_coef))
        round_of = {"logprobs": logprobs, **self._algorithm.learn(sampled)}
        for part in minibatches:
            self._step(
                answers, part.tolist(), {name: value[torch.from_numpy(part)] for name, value in round_of.items()}
            )

    def _step(self, answers: Completions, part: list[int], columns: dict[str, Tensor]) -> None:
        ids, seen, width, mask = _laid_out(answers, part, self.chat.pad)
        batch = {name: value[:, : mask.shape[1]] for name, value in columns.items()} | {"mask": mask}
        self._optimizer.zero_grad()
        logprobs = self._logprobs(self.policy, ids, seen, width)[0]
        values = None if self._value is None else self._values(ids, seen, width)
        self._algorithm.loss(logprobs, values, batch)["total"].backward()
        for network in self._networks:
            torch.nn.utils.clip_grad_norm_(network.parameters(), self._config.optimizer.gradient_clip)
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.optimizer.learning_rate * self._schedule.lr_multiplier(self._batch)
        self._optimizer.step()
        self._batch += 1

    @torch.no_grad()
    def _looked(self, answers: Completions, part: Sequence[int]) -> tuple[Tensor | None, ...]:
        """Log-probabilities by policy and reference, the mask, and values if any, each (B, T); the policy's entropy is
        computed too, as ours tells it."""
        ids, seen, width, mask = _laid_out(answers, part, self.chat.pad)
        (logprobs, logits), (reference, _) = (
            self._logprobs(one, ids, seen, width) for one in (self.policy, self._reference)
        )
        everything = logits.log_softmax(-1)
        (-(everything.exp() * everything).sum(-1) * mask).sum()
        values = None if self._value is None else self._values(ids, seen, width) * mask
        return logprobs * mask, reference * mask, mask, values

    def _logprobs(self, model: PreTrainedModel, ids: Tensor, seen: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Of the answers' tokens (B, T) behind prompts of `width` tokens, and the logits (B, T, V)."""
        positions = (seen.cumsum(1) - 1).clamp(min=0)
        with self._hardware.autocast():
            kept = model(
                input_ids=ids, attention_mask=seen, position_ids=positions, use_cache=False,
                logits_to_keep=ids.shape[1] - width + 1,
            ).logits[:, :-1]  # fmt: skip
        logits = kept.float() / self._config.temperature
        return logits.gather(-1, ids[:, width:, None])[..., 0] - logits.logsumexp(-1), logits

    def _values(self, ids: Tensor, seen: Tensor, width: int) -> Tensor:
        places = torch.arange(width - 1, ids.shape[1] - 1).expand(len(ids), -1)
        return self._scale.of_first(_scores(self._value, ids, seen, places, self._hardware))


def _scores(model: Any, ids: Tensor, seen: Tensor, places: Tensor, hardware: Hardware) -> Tensor:
    """Scores (B, places) of a sequence classifier, its last product in fp32 as ours."""
    positions = (seen.cumsum(1) - 1).clamp(min=0)
    with hardware.autocast():
        hidden = model.base_model(input_ids=ids, attention_mask=seen, position_ids=positions, use_cache=False)
    states = hidden.last_hidden_state.gather(1, places[..., None].expand(-1, -1, hidden.last_hidden_state.shape[-1]))
    return torch.nn.functional.linear(states.float(), model.score.weight)[..., 0]


def _laid_out(answers: Completions, part: Sequence[int], fill: int) -> tuple[Tensor, Tensor, int, Tensor]:
    """Ids (B, P + T), what of them is no padding, P, and the mask (B, T) of answers' tokens."""
    prompts, written = [answers.prompts[one] for one in part], [answers.ids[one] for one in part]
    width, longest = max(map(len, prompts)), max(map(len, written))
    before = [[fill] * (width - len(one)) + one for one in prompts]
    after = [one + [fill] * (longest - len(one)) for one in written]
    mask = torch.arange(longest) < torch.tensor([len(one) for one in written])[:, None]
    real = torch.arange(width) >= width - torch.tensor([len(one) for one in prompts])[:, None]
    return (
        torch.tensor([[*a, *b] for a, b in zip(before, after, strict=True)]),
        torch.cat([real, mask], 1).long(),
        width,
        mask.float(),
    )


def _wide(rows: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]))
