"""Next-token cross-entropy that never holds the logits of a whole batch.

Shapes: N positions, D width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

IGNORE = -100
_CHUNK = 1024


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Computes the gradient chunk by chunk in the forward pass, so that logits (chunk, V) can be dropped at once."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        # Under autocast the caller hands in its compute type; the sums stay in fp32.
        total = torch.zeros((), device=hidden.device, dtype=torch.float32)
        compute = hidden.dtype
        weight_compute = weight.to(compute)
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, len(labels), _CHUNK):
            rows = slice(start, start + _CHUNK)
            chunk, target = hidden[rows], labels[rows]
            kept = target != IGNORE
            index = target.clamp(min=0)[:, None]
            logits = (chunk @ weight_compute.T).float()
            normaliser = logits.logsumexp(-1)
            total += ((normaliser - logits.gather(-1, index)[:, 0]) * kept).sum()
            d_logits = logits.sub_(normaliser[:, None]).exp_()
            d_logits.scatter_add_(-1, index, torch.full_like(index, -1, dtype=torch.float32))
            d_logits.mul_(kept[:, None])
            d_logits_compute = d_logits.to(compute)
            d_hidden[rows] = d_logits_compute @ weight_compute
            d_weight += d_logits_compute.T @ chunk
        ctx.save_for_backward(d_hidden, d_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,) = upstream
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * grad.to(d_hidden.dtype), d_weight * grad.to(d_weight.dtype), None


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Summed cross-entropy of `hidden (N, D)` against `labels (N,)` through an output layer `weight (V, D)`.

    Positions labelled -100 count nothing. The products run in hidden's type, softmax and sums in fp32.
    """
    if torch.is_grad_enabled():
        return _ChunkedCrossEntropy.apply(hidden, weight, labels)
    return token_losses(hidden, weight, labels).sum()


def token_losses(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each position (N,), 0 where the label is -100; without the graph's memory saving."""
    weight_compute = weight.to(hidden.dtype)
    pieces = [
        cross_entropy((chunk @ weight_compute.T).float(), target, ignore_index=IGNORE, reduction="none")
        for chunk, target in zip(hidden.split(_CHUNK), labels.split(_CHUNK), strict=True)
    ]
    return torch.cat(pieces)
