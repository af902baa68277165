"""GRPO: rewards in standard deviations of the answers to one prompt, the KL penalty within the loss."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from training.rl.algorithms.base import CLIPPED, Algorithm, Sampled
from training.train_modules.kl import kl_k3
from training.train_modules.policy_losses import masked_mean, outside

_LEAST_SPREAD = 1.0e-4
"""Added to a group's standard deviation, as in trl's GRPOTrainer: answers of one reward teach nothing."""


class Grpo(Algorithm):
    """DeepSeekMath (Shao et al. 2024), equations 3 and 4 with outcome supervision (section 4.1.2).

    By keys of the config also: the mean over all tokens and the wider upper clip of DAPO (Yu et al. 2025), undivided
    advantages and the constant divisor of Dr. GRPO (Liu et al. 2025), the ratio of whole answers of GSPO (Zheng et al.
    2025), and the weighted log-probabilities of CISPO (MiniMax 2025).
    """

    def learn(self, sampled: Sampled) -> dict[str, Tensor]:
        advantages = group_advantages(sampled.scores, self.config.answers_per_prompt, self.config.scale_rewards)
        kl_coef = torch.full_like(sampled.scores, sampled.kl_coef)[:, None]
        return {"advantages": advantages[:, None] * sampled.mask, "reference": sampled.reference, "kl_coef": kl_coef}

    def loss(self, logprobs: Tensor, values: Tensor | None, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        mask, (low, high) = batch["mask"], self.config.ratio_bounds
        log_ratio = logprobs - batch["logprobs"]
        if self.config.ratio == "sequence":  # of each answer (B, 1), the geometric mean of its tokens' ratios
            log_ratio = ((log_ratio * mask).sum(1) / mask.sum(1).clamp(min=1))[:, None]
        ratio = torch.exp(log_ratio)
        advantages = batch["advantages"]
        if self.config.loss_form == "cispo":
            low = 0.0
            surrogate = ratio.clamp(max=high).detach() * advantages * logprobs
        else:
            surrogate = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
        penalty = batch["kl_coef"] * kl_k3(logprobs, batch["reference"])
        clipped = masked_mean(outside(ratio, low, high), mask)
        policy, kl = self._mean(-surrogate, mask), self._mean(penalty, mask)
        return {"policy": policy, "kl_penalty": kl, CLIPPED: clipped, "total": policy + kl}

    def _mean(self, values: Tensor, mask: Tensor) -> Tensor:
        """Return the mean of values (B, T) that `loss_mean` names."""
        if self.config.loss_mean == "constant":
            return (values * mask).sum() / (len(mask) * self.config.answer_max_tokens)
        return masked_mean(values, mask) if self.config.loss_mean == "token" else mean_of_answers(values, mask)

    def weight(self, batch: Mapping[str, Tensor]) -> int:
        """Number of answers, each of which counts as much whatever its length; with `loss_mean: token` of tokens."""
        return super().weight(batch) if self.config.loss_mean == "token" else len(batch["mask"])


def mean_of_answers(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over answers of the mean of values over each answer's tokens, a scalar.

    Args:
        values: (B, T).
        mask: 1 for the tokens of the answers (B, T), else 0.
    """
    return ((values * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def group_advantages(scores: Tensor, group: int, scale: str = "group") -> Tensor:
    """Scores (B,) minus the mean of their group of answers to one prompt, divided by the standard deviation of the
    group, of all scores (batch), or by nothing (none)."""
    grouped = scores.view(-1, group)
    above = grouped - grouped.mean(1, keepdim=True)
    if scale != "none":
        above = above / ((grouped.std(1, keepdim=True) if scale == "group" else scores.std()) + _LEAST_SPREAD)
    return above.view(-1)
