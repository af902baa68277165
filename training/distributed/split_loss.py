"""Cross-entropy through an output layer whose vocabulary is split over ranks (Shoeybi et al. 2019, section 3): no rank
ever holds the logits of the others.

Shapes: N positions, D width, V vocabulary, R of its rows on this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor

from training.model.loss import IGNORE, chunk_size, fp16_factor, weight_gradient


def split_losses(hidden: Tensor, weight: DTensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy (N,) in fp32, 0 where a label is -100.

    It is the same on every rank of the weight's group, which all must call.

    Args:
        hidden: hidden states (N, D), the same on all of these ranks, and so is their gradient.
        weight: output layer (V, D), its rows split over the group.
        labels: token ids (N,).
    """
    mesh = weight.device_mesh
    first = -(-weight.shape[0] // mesh.size()) * mesh.get_local_rank()
    losses: Tensor = _SplitCrossEntropy.apply(hidden, weight.to_local(), labels, first, mesh.get_group())
    return losses


class _SplitCrossEntropy(torch.autograd.Function):
    """Logits are made in chunks, and again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, first: int, group: Any) -> Tensor:
        losses, normalisers = [], []
        compute = weight.to(hidden.dtype)
        for chunk, target in _chunks(hidden, weight, labels):
            scores = (chunk @ compute.T).float()
            is_own, at = _owned(target, first, len(weight))
            top = scores.amax(1)
            distributed.all_reduce(top, distributed.ReduceOp.MAX, group)
            sums = torch.stack([(scores - top[:, None]).exp_().sum(1), scores.gather(1, at[:, None])[:, 0] * is_own])
            distributed.all_reduce(sums, group=group)
            normalisers.append(sums[0].log() + top)
            losses.append((normalisers[-1] - sums[1]) * (target != IGNORE))
        ctx.save_for_backward(hidden, weight, labels, torch.cat(normalisers))
        ctx.first, ctx.group = first, group
        return torch.cat(losses)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        hidden, weight, labels, normalisers = ctx.saved_tensors
        (grad,) = upstream
        compute, size = weight.to(hidden.dtype), chunk_size(weight)
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        half_factor = fp16_factor(grad, hidden.dtype)
        grad = grad if half_factor is None else grad * half_factor
        parts = zip(d_hidden.split(size), normalisers.split(size), grad.split(size), strict=True)
        for (chunk, target), (d_chunk, normaliser, scale) in zip(_chunks(hidden, weight, labels), parts, strict=True):
            is_own, at = _owned(target, ctx.first, len(weight))
            d_scores = ((chunk @ compute.T).float() - normaliser[:, None]).exp_()
            d_scores.scatter_add_(1, at[:, None], -is_own[:, None])
            d_logits = d_scores.mul_((scale * (target != IGNORE))[:, None]).to(hidden.dtype)
            torch.mm(d_logits, compute, out=d_chunk)
            d_weight += weight_gradient(d_logits, chunk)
        distributed.all_reduce(d_hidden, group=ctx.group)
        if half_factor is not None:
            d_hidden, d_weight = (d_hidden.float() / half_factor).half(), d_weight.div_(half_factor)
        return d_hidden, d_weight.to(weight.dtype), None, None, None


def _chunks(hidden: Tensor, weight: Tensor, labels: Tensor) -> Any:
    size = chunk_size(weight)
    return zip(hidden.split(size), labels.split(size), strict=True)


def _owned(labels: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return 1.0 for each label among this rank's rows and 0.0 for others, and its row, 0 for others."""
    is_own = (labels >= first) & (labels < first + rows)
    return is_own.float(), (labels - first).where(is_own, 0)
