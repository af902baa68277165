"""KL divergence of a policy from its reference: estimates, the exact value, and the coefficient of its penalty.

Shapes: B answers, T answer tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def kl_k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """log π/π_ref of sampled tokens: an unbiased estimate of the KL divergence (Schulman 2020)."""
    return logprobs - reference


def kl_k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return π_ref/π − log π_ref/π − 1 of sampled tokens, in nats.

    It is an unbiased estimate of the KL divergence that is never negative (Schulman 2020; DeepSeekMath, equation 4).

    Args:
        logprobs: of the policy that sampled them (B, T), in nats.
        reference: of the reference model (B, T), in nats.
    """
    difference = reference - logprobs
    return torch.exp(difference) - difference - 1


def exact_kl(logits: Tensor, reference: Tensor) -> Tensor:
    """KL divergence (…) of the whole next-token distributions, from logits (…, V)."""
    ours, theirs = logits.log_softmax(-1), reference.log_softmax(-1)
    return (ours.exp() * (ours - theirs)).sum(-1)


def adapted_kl_coef(kl_coef: float, kl: float, target: float, answers: int, horizon: float = 10_000) -> float:
    """Return the coefficient of the penalty after a round with mean `kl` per answer (Ziegler et al. 2019, section
    2.2)."""
    error = min(max(kl / target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * answers / horizon)
