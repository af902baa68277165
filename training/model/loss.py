"""Next-token cross-entropy that never holds the logits of a whole batch.

Shapes: N positions, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from training.core.train_state import TokenCount

IGNORE = -100
_LEAST_CHUNK, _CHUNK_LOGITS, _CHUNK_LOGITS_OF_GPU = 1024, 2**23, 2**27
"""Minimum number of positions per chunk, and maximum number of logits per chunk if it has more positions: 32 MB in
fp32, and 0.5 GB on a GPU, which is slow on small chunks (benchmarks/training/bench_kernels.py)."""
_FP16_SCALE = 2.0**8
"""Factor of the gradient by the logits in fp16, whose entries are probabilities: those of a large vocabulary would lose
bits below 6e-5. It is taken out again in fp32."""
_FP16_SUM = 2.0**15
"""Bound on sums in fp16, half of the largest number."""


def _loss_and_gradient(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy of one chunk, in fp32, and its gradient by `logits (chunk, V)`, in their type."""
    kept, index = (labels != IGNORE)[:, None], labels.clamp(min=0)[:, None]
    scores = logits.float()
    top = scores.amax(-1, keepdim=True)
    # One exponential of each number, and the label's entry set afterwards: for a compiler half the time of a softmax
    # that has the label taken off in the same pass (benchmarks/RESULTS.md, "Training").
    powers = (scores - top).exp()
    total = powers.sum(-1, keepdim=True)
    of_label = scores.gather(-1, index) - top
    loss = ((total.log() - of_label) * kept).sum()
    scale = fp16_scale(logits.dtype)
    gradient = (powers * (kept * scale / total)).to(logits.dtype)
    return loss, gradient.scatter(-1, index, ((of_label.exp() / total - 1) * kept * scale).to(logits.dtype))


def _loss_and_gradient_in_place(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The same without a compiler: fewer passes over memory."""
    kept, index = (labels != IGNORE)[:, None], labels.clamp(min=0)[:, None]
    scores = logits.float()
    of_label, top = scores.gather(-1, index), scores.amax(-1, keepdim=True)
    powers = scores.sub_(top).exp_()
    total = powers.sum(-1, keepdim=True)
    loss = ((total.log() + top - of_label) * kept).sum()
    scale = fp16_scale(logits.dtype)
    gradient = powers.mul_(kept * scale / total).scatter_add_(-1, index, -kept.float() * scale)
    return loss, gradient.to(logits.dtype)


@cache
def _compiled_loss_and_gradient() -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    return torch.compile(_loss_and_gradient)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Compute the gradient chunk by chunk in the forward pass, so that logits (chunk, V) can be freed immediately."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, compiled: bool) -> Tensor:
        # Under autocast the caller hands in its compute type; the sums stay in fp32.
        loss_and_gradient = _compiled_loss_and_gradient() if compiled else _loss_and_gradient_in_place
        weight_compute = weight.to(hidden.dtype)
        size = chunk_size(weight)
        totals, d_hidden, d_weight = [], torch.empty_like(hidden), None
        for chunk, target, d_chunk in zip(hidden.split(size), labels.split(size), d_hidden.split(size), strict=True):
            loss, d_logits = loss_and_gradient(chunk @ weight_compute.T, target)
            totals.append(loss)
            torch.mm(d_logits, weight_compute, out=d_chunk)
            of_chunk = weight_gradient(d_logits, chunk)
            d_weight = of_chunk if d_weight is None else d_weight.add_(of_chunk)
        assert d_weight is not None
        ctx.save_for_backward(d_hidden, d_weight.to(weight.dtype))
        return torch.stack(totals).sum()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (grad,) = upstream
        d_hidden, d_weight = ctx.saved_tensors
        if d_hidden.dtype == torch.float16:
            grad = grad / _FP16_SCALE
            return (d_hidden.float() * grad).half(), d_weight.mul_(grad), None, None
        return d_hidden.mul_(grad.to(d_hidden.dtype)), d_weight.mul_(grad.to(d_weight.dtype)), None, None


def fp16_scale(dtype: torch.dtype) -> float:
    """Factor of gradients of at most 1 by logits of this type; 1 for all but fp16."""
    return _FP16_SCALE if dtype == torch.float16 else 1.0


def fp16_factor(upstream: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return the factor that brings the largest gradient to `fp16_scale`; None for all types but fp16.

    It does not depend on the loss scale. What is computed from scaled gradients has to be divided by it.

    Args:
        upstream: gradients (N,) by losses.
        dtype: type of the products.
    """
    if dtype != torch.float16 or not len(upstream):
        return None
    return _FP16_SCALE / upstream.abs().amax().float().clamp(min=torch.finfo(torch.float32).tiny * 2**16)


def weight_gradient(d_logits: Tensor, hidden: Tensor) -> Tensor:
    """Gradient (V, D) in fp32 of an output layer's weight, summed over the positions of a chunk.

    In fp16 the product is of hidden states that are small enough for the sum, whatever the loss scale, which is unknown
    here: the loss is divided by the number of tokens, and scaled, after the sum.

    Args:
        d_logits: (chunk, V). In fp16 at most `fp16_scale` in magnitude.
        hidden: (chunk, D), of the same type.
    """
    if hidden.dtype != torch.float16 or not len(hidden):
        return (d_logits.T @ hidden).float()
    bound = hidden.abs().amax().float() * (len(hidden) * _FP16_SCALE / _FP16_SUM)
    # A power of two, since that changes no bits.
    factor = torch.exp2(-torch.log2(bound.clamp(min=1)).ceil())
    return (d_logits.T @ (hidden * factor).half()).float() / factor


def chunk_size(weight: Tensor) -> int:
    """Return the number of positions whose logits are held at once.

    Args:
        weight: output layer (V, D), on the device that computes.
    """
    return max(_LEAST_CHUNK, (_CHUNK_LOGITS_OF_GPU if weight.is_cuda else _CHUNK_LOGITS) // len(weight))


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, *, compiled: bool = False) -> Tensor:
    """Summed cross-entropy of `hidden (N, D)` against `labels (N,)` through an output layer `weight (V, D)`.

    Positions labelled -100 count nothing. The products run in hidden's type, softmax and sums in fp32.

    Args:
        compiled: True if a chunk's softmax and gradient are one compiled kernel.
    """
    if torch.is_grad_enabled():
        return _ChunkedCrossEntropy.apply(hidden, weight, labels, compiled)
    return token_losses(hidden, weight, labels).sum()


def spread_over_vocabulary(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Summed difference between the cross-entropy against all V tokens alike and that against `labels (N,)`, a share of
    which label smoothing adds (Szegedy et al. 2016, section 7).

    Both have the same normaliser, so that the label's logit less the mean logit is left, without any logits.

    Args:
        hidden: (N, D).
        weight: (V, D), of an output layer without a bias.
        labels: -100 where a position counts nothing.
    """
    labelled = labels != IGNORE
    directions = weight[labels[labelled]].float() - weight.float().mean(0)
    return (hidden[labelled].float() * directions).sum()


def token_losses(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each position (N,) in nats, 0 where the label is -100; the graph keeps all logits.

    Args:
        hidden: hidden states (N, D).
        weight: output layer (V, D).
        labels: token ids (N,).
    """
    weight_compute = weight.to(hidden.dtype)
    size = chunk_size(weight)
    pieces = [
        cross_entropy((chunk @ weight_compute.T).float(), target, ignore_index=IGNORE, reduction="none")
        for chunk, target in zip(hidden.split(size), labels.split(size), strict=True)
    ]
    return torch.cat(pieces)


def count_tokens(batch: Any) -> TokenCount:
    """Tokens of a batch by its labels."""
    labels = batch["labels"]
    return TokenCount(labels.numel(), int((labels != IGNORE).sum()))
