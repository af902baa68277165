"""Losses of learning from preference pairs without sampling: DPO, IPO, KTO, ORPO, as functions of log-probabilities.

Shapes: B pairs. `chosen` and `rejected (B,)` are log π/π_ref of the two answers to a prompt, unless stated.
Each gives the loss of every pair (B,).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def dpo(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """−log σ(β (chosen − rejected)) (Rafailov et al. 2023, equation 7): the Bradley–Terry loss of the reward
    β log π/π_ref."""
    return -logsigmoid(beta * (chosen - rejected))


def ipo(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """(chosen − rejected − 1/(2β))² (Azar et al. 2023, equation 17, whose τ is β): the difference has a target value,
    while DPO would have it grow without limit.

    chosen, rejected: log π/π_ref per token, averaged over the answer. By sums, long answers would have the larger loss;
    the paper's own figures are of means (so trl's DPOTrainer, after asking the authors).
    """
    return (chosen - rejected - 1 / (2 * beta)) ** 2


def kto(
    chosen: Tensor, rejected: Tensor, kl: Tensor, beta: float, desirable_weight: float, undesirable_weight: float
) -> Tensor:
    """Loss of KTO: 1 minus the value of each answer, desirable or undesirable, judged by itself (Ethayarajh et al.
    2024, equation 7); the mean of a pair's two.

    kl: the reference point of both, an estimate of the policy's KL divergence, without a gradient; see `kto_kl`.
    """
    wanted = desirable_weight * (1 - torch.sigmoid(beta * (chosen - kl)))
    unwanted = undesirable_weight * (1 - torch.sigmoid(beta * (kl - rejected)))
    return (wanted + unwanted) / 2


def kto_kl(mismatched: Tensor) -> Tensor:
    """The KL divergence that is KTO's reference point, at least 0: the mean log π/π_ref of answers to other prompts
    than their own (Ethayarajh et al. 2024, section 4.1)."""
    return mismatched.mean().clamp(min=0)


def orpo(chosen: Tensor, rejected: Tensor, weight: float) -> Tensor:
    """−chosen − λ log σ(log odds(chosen) − log odds(rejected)) (Hong et al. 2024, equations 6 and 7): instruction
    tuning on the chosen answer, and a penalty on the odds of the rejected one. No reference model.

    chosen, rejected: log π per token, averaged over the answer. weight: λ.
    """
    return -chosen - weight * logsigmoid(log_odds(chosen) - log_odds(rejected))


def log_odds(logprob: Tensor) -> Tensor:
    """log (p / (1 − p)) of a probability by its logarithm, which is at most 0."""
    # A probability that rounds to 1 has no finite odds.
    kept = logprob.clamp(max=-1e-7)
    return kept - torch.log(-torch.expm1(kept))
