"""Gradients of weights that some ranks hold and others do not: their sums and their norm, which no backend takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor

from training import ranks

# Gradients are summed together up to so many numbers (256 MB in fp32).
_AT_ONCE = 1 << 26


@torch.no_grad()
def average(gradients: Sequence[Tensor], group: Any, parts: int) -> None:
    """Replaces gradients by the sum of those of a group of ranks, divided by `parts`; all of the group must call."""
    for some in _buckets(gradients):
        flat = torch.cat([gradient.flatten() for gradient in some])
        distributed.all_reduce(flat, group=group)
        flat /= parts
        for gradient, part in zip(some, flat.split([one.numel() for one in some]), strict=True):
            gradient.copy_(part.view_as(gradient))


def clip_by(squares: Tensor, gradients: Sequence[Tensor], limit: float) -> float:
    """Scales gradients so that the norm of all ranks' is at most `limit`; the norm before. Every rank must call.

    squares: this rank's part of the sum of squares over all gradients, in which each counts once.
    """
    norm = float(ranks.all_reduce(squares)) ** 0.5
    factor = limit / (norm + 1e-6)
    if not factor >= 1:  # a norm that is not a number, too, as torch has it
        for gradient in gradients:
            (gradient.to_local() if isinstance(gradient, DTensor) else gradient).mul_(factor)
    return norm


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients that are summed together."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        if bucket and sum(one.numel() for one in bucket) + gradient.numel() > _AT_ONCE:
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket
