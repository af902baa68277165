"""Gradients of weights that some ranks hold and others do not: their sums and their norm, which no backend takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from training.core import ranks

# Gradients are summed together up to so many numbers (256 MB in fp32).
_AT_ONCE = 1 << 26


class Replicas:
    """The ranks that hold the same parts of the same layers as this one, and compute other tokens. All of them must
    call each method."""

    def __init__(self, mesh: DeviceMesh) -> None:
        """mesh: of `ranks.mesh`; every rank must call."""
        # By (pipe, tensor), all data and context ranks.
        alike = mesh.mesh.permute(1, 3, 0, 2).flatten(0, 1).flatten(1)
        self._group, self._members = own_group(alike.tolist())

    @property
    def size(self) -> int:
        return len(self._members)

    @torch.no_grad()
    def begin_alike(self, weights: Iterable[Tensor]) -> None:
        """Gives all of them the first one's weights: where a model starts from what a GPU has computed, it may differ
        in the last bits."""
        for weight in weights:
            distributed.broadcast(local(weight.data), self._members[0], group=self._group)

    def average(self, gradients: Sequence[Tensor]) -> None:
        """Replaces gradients by the mean of all of them."""
        if self.size > 1:
            average([local(one) for one in gradients], self._group, self.size)


def own_group(groups: Sequence[list[int]]) -> tuple[Any, list[int]]:
    """A process group of each of these ranks; every rank must call. This rank's, and who is in it: None and nobody
    where it is in none."""
    found: tuple[Any, list[int]] = None, []
    for members in groups:
        group = distributed.new_group(members)
        if ranks.rank() in members:
            found = group, members
    return found


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
            local(gradient).mul_(factor)
    return norm


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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
