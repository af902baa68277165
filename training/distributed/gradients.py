"""Gradients of weights that only some ranks hold: their sums and norm, which no backend computes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from training.core import ranks

# Maximum number of elements of gradients that are reduced together (256 MB in fp32).
_AT_ONCE = 1 << 26


class Replicas:
    """Ranks that hold the same parts of the same layers as this one, and compute different tokens. All of them must
    call each method."""

    def __init__(self, mesh: DeviceMesh) -> None:
        """Make the group of ranks that average; every rank must call.

        Args:
            mesh: of `ranks.mesh`.
        """
        # By (pipe, tensor), all data and context ranks.
        alike = mesh.mesh.permute(1, 3, 0, 2).flatten(0, 1).flatten(1)
        self._group, self._members = own_group(alike.tolist())

    @property
    def size(self) -> int:
        return len(self._members)

    @torch.no_grad()
    def begin_alike(self, weights: Iterable[Tensor]) -> None:
        """Broadcast the first rank's weights: if a model starts from values computed on a GPU, they may differ in the
        last bits."""
        for weight in weights:
            distributed.broadcast(local(weight.data), self._members[0], group=self._group)

    def average(self, gradients: Sequence[Tensor]) -> None:
        """Replace gradients by their mean over these ranks."""
        if self.size > 1:
            average([local(gradient) for gradient in gradients], self._group, self.size)


def own_group(groups: Sequence[list[int]]) -> tuple[Any, list[int]]:
    """Create a process group for each list of ranks; every rank must call. Return this rank's group and its members,
    None and an empty list if it is in none."""
    result: tuple[Any, list[int]] = None, []
    for members in groups:
        group = distributed.new_group(members)
        if ranks.rank() in members:
            result = group, members
    return result


@torch.no_grad()
def average(gradients: Sequence[Tensor], group: Any, parts: int) -> None:
    """Replace gradients by their sum over a group of ranks, divided by `parts`, in place; all of the group must call.

    Args:
        gradients: local tensors, of the same shapes in the same order on every rank of the group.
        group: the process group.
        parts: the divisor.
    """
    for some in _buckets(gradients):
        flat = torch.cat([gradient.flatten() for gradient in some])
        distributed.all_reduce(flat, group=group)
        flat /= parts
        for gradient, part in zip(some, flat.split([tensor.numel() for tensor in some]), strict=True):
            gradient.copy_(part.view_as(gradient))


def clip_by(squares: Tensor, gradients: Sequence[Tensor], limit: float) -> float:
    """Scale gradients so that their norm over all ranks is at most `limit`; return the norm before. All must call.

    Args:
        squares: this rank's part of the sum of squares over all gradients, a scalar in which each gradient counts once.
        gradients: those of this rank, which are scaled in place.
        limit: the largest norm that leaves the gradients unchanged.
    """
    norm = float(ranks.all_reduce(squares)) ** 0.5
    factor = limit / (norm + 1e-6)
    if not factor >= 1:  # a norm that is not a number, too, as torch has it
        for gradient in gradients:
            local(gradient).mul_(factor)
    return norm


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor on this rank: of a DTensor its local shard, of any other tensor all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients that are summed together."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        if bucket and sum(tensor.numel() for tensor in bucket) + gradient.numel() > _AT_ONCE:
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket
