"""Importance weights of answers that other weights wrote than those that the round begins with.

Shapes: B answers, T answer tokens (padded on the right).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from training.config import AsyncConfig


class ImportanceWeights(NamedTuple):
    """weights (B, T): at most `correction_cap`, and 1 beside the answers. mean: of the ratios before the cap, over
    tokens; truncated: the share of tokens whose ratio was above it."""

    weights: Tensor
    mean: float
    truncated: float


def importance(
    logprobs: Tensor, written: Sequence[Sequence[float]], mask: Tensor, config: AsyncConfig
) -> ImportanceWeights:
    """Return the truncated ratios of a policy to the weights that wrote its answers.

    Args:
        logprobs: of the answers' tokens under the policy (B, T), in nats.
        written: of the same tokens under the weights that wrote them, an answer a row.
        mask: 1 on an answer's tokens (B, T), else 0.
    """
    rows = pad_sequence([torch.tensor(row, dtype=logprobs.dtype) for row in written], batch_first=True)
    log_ratio = (logprobs - rows) * mask
    if config.correction == "none":
        log_ratio = torch.zeros_like(log_ratio)
    elif config.correction == "sequence":
        log_ratio = (log_ratio.sum(1) / mask.sum(1).clamp(min=1))[:, None] * mask
    ratio = log_ratio.exp()
    tokens = mask.sum().clamp(min=1)
    above = ((ratio > config.correction_cap) * mask).sum() / tokens
    return ImportanceWeights(ratio.clamp(max=config.correction_cap), float((ratio * mask).sum() / tokens), float(above))
