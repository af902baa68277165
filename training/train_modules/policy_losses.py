"""Proximal policy optimisation on answers: advantages and losses, as plain tensor functions.

Shapes: B answers, T answer tokens (padded on the right), V vocabulary. `mask (B, T)` is 1 on an answer's tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum().clamp(min=1)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Values (B, T) with mean 0 and variance 1 over the mask ("N implementation details of RLHF", section 4.5)."""
    mean = masked_mean(values, mask)
    variance = masked_mean((values - mean) ** 2, mask)
    return (values - mean) * torch.rsqrt(variance + 1e-8) * mask


def token_rewards(scores: Tensor, logprobs: Tensor, reference: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """Rewards (B, T): minus kl_coef times log π/π_ref at each token, plus the answer's score (B,) at its last one
    (Ziegler et al. 2019, equation 2)."""
    rewards = -kl_coef * (logprobs - reference) * mask
    last = mask.sum(1).long().clamp(min=1) - 1
    return rewards.scatter_add(1, last[:, None], scores[:, None].to(rewards.dtype))


def advantages_and_returns(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates and value targets, both (B, T) (Schulman et al. 2016, equation 16).

    The value after an answer's last token is 0.
    """
    advantages = torch.zeros_like(rewards)
    running = torch.zeros_like(rewards[:, 0])
    following = torch.zeros_like(rewards[:, 0])
    for step in reversed(range(rewards.shape[1])):
        error = rewards[:, step] + gamma * following - values[:, step]
        running = (error + gamma * gae_lambda * running) * mask[:, step]
        advantages[:, step] = running
        following = values[:, step] * mask[:, step]
    return advantages, (advantages + values) * mask


def leave_one_out(
    scores: Tensor, logprobs: Tensor, reference: Tensor, mask: Tensor, kl_coef: float, group: int
) -> Tensor:
    """Advantages (B, T), the same at each token of an answer: its reward less the mean reward of the other answers to
    its prompt (RLOO, Ahmadian et al. 2024, section 3.2).

    scores (B,), of `group` answers to each prompt side by side; the reward is the score minus kl_coef times
    log π/π_ref of the whole answer.
    """
    rewards = scores - kl_coef * ((logprobs - reference) * mask).sum(1)
    grouped = rewards.view(-1, group)
    others = (grouped.sum(1, keepdim=True) - grouped) / (group - 1)
    return (grouped - others).view(-1, 1) * mask


class PolicyLoss(NamedTuple):
    """The clipped loss, and the share of tokens whose ratio was outside the clip."""

    loss: Tensor
    clip_share: Tensor


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float
) -> PolicyLoss:
    """PPO's surrogate with the ratio clipped to `low` … `high`, negated, mean over tokens (Schulman et al. 2017,
    equation 7)."""
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = ratio.clamp(low, high)
    loss = masked_mean(torch.maximum(-advantages * ratio, -advantages * clipped), mask)
    return PolicyLoss(loss, masked_mean(outside(ratio, low, high), mask))


def outside(ratio: Tensor, low: float, high: float) -> Tensor:
    """Return 1 where a ratio is outside of the clip, else 0."""
    return ((ratio < low) | (ratio > high)).float()


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float) -> Tensor:
    """Half the squared error with the estimate kept within `clip` of the old one, the larger of the two, mean over
    tokens ("N implementation details of RLHF", section 4.8)."""
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * masked_mean(torch.maximum((values - returns) ** 2, (clipped - returns) ** 2), mask)
