"""ZeRO stage 1 (Rajbhandari et al. 2020, section 5.1): every rank holds whole weights and gradients, and its part of
the optimizer state.

A rank steps its rows of each weight, then all ranks gather the rows of the others. AdamW is elementwise, so results
equal those of DDP; Muon gathers what it needs, as under FSDP2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

# Maximum number of elements of rows that are gathered together (256 MB in fp32).
_AT_ONCE = 1 << 26


class ShardedOptimizer(torch.optim.Optimizer):
    """Step this rank's rows of the weights with `inner`, split as by `torch.chunk`. Weights stay whole in the model,
    and gradients must already be reduced over the ranks (DDP).

    inner: an optimizer that has not stepped yet; its groups and its state are those of this one.
    mesh: all ranks, in one dimension. apart: the ranks that hold a weight, where that is another mesh.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        mesh: DeviceMesh,
        apart: Mapping[Tensor, DeviceMesh] = MappingProxyType({}),
    ) -> None:
        self.inner = inner
        self._parts: dict[Tensor, Tensor] = {}
        self._meshes: dict[Tensor, DeviceMesh] = {}
        for group in inner.param_groups:
            self._meshes |= {weight: apart.get(weight, mesh) for weight in group["params"]}
            self._parts |= {weight: self._rows(weight, self._meshes[weight]) for weight in group["params"]}
            group["params"] = [self._parts[weight] for weight in group["params"]]
        super().__init__(inner.param_groups, {})
        self.state = inner.state

    def part_of(self, weight: Tensor) -> Tensor:
        """Tensor that represents a weight of the model in groups and state: this rank's rows, in the same memory."""
        return self._parts.get(weight, weight)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for weight in self._parts:
            if set_to_none:
                weight.grad = None
            elif weight.grad is not None:
                weight.grad.zero_()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for weight, part in self._parts.items():
            if part is not weight:
                part.grad = None if weight.grad is None else self._rows(weight.grad, self._meshes[weight])
        self.inner.step()
        stepped: dict[DeviceMesh, list[Tensor]] = {}
        for weight, part in self._parts.items():
            if part is not weight and weight.grad is not None:
                stepped.setdefault(self._meshes[weight], []).append(weight)
        for mesh, weights in stepped.items():
            for some in _buckets(weights):
                self._gather(some, mesh)
        for part in self._parts.values():
            if isinstance(part, DTensor):
                part.grad = None
        return loss

    def _rows(self, full: Tensor, mesh: DeviceMesh) -> Tensor:
        """Return this rank's rows of a tensor; all of a scalar, which every rank updates, and of what only it has."""
        if not full.ndim or mesh.size() == 1:
            return full
        step = math.ceil(len(full) / mesh.size())
        start = min(mesh.get_local_rank() * step, len(full))
        local_rows = DTensor.from_local(
            full.detach()[start : start + step],
            mesh,
            [Shard(0)],
            run_check=False,
            shape=full.shape,
            stride=full.stride(),
        )
        return nn.Parameter(local_rows) if full.requires_grad else local_rows

    def _gather(self, weights: Sequence[Tensor], mesh: DeviceMesh) -> None:
        """Gather the rows of a mesh's ranks into weights of one dtype and device."""
        count = mesh.size()
        sizes = [math.ceil(len(weight) / count) * math.prod(weight.shape[1:]) for weight in weights]
        local_rows = weights[0].new_zeros(sum(sizes))
        for weight, target in zip(weights, local_rows.split(sizes), strict=True):
            part = self._parts[weight]
            assert isinstance(part, DTensor)
            rows = part.to_local().flatten()
            target[: len(rows)].copy_(rows)
        everyone = local_rows.new_empty(count, len(local_rows))
        distributed.all_gather_into_tensor(everyone.view(-1), local_rows, group=mesh.get_group())
        for weight, rows in zip(weights, everyone.split(sizes, 1), strict=True):
            weight.copy_(rows.flatten()[: weight.numel()].view_as(weight))


def _buckets(weights: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Weights that can be gathered together."""
    kinds: dict[Any, list[Tensor]] = {}
    for weight in weights:
        bucket = kinds.setdefault((weight.dtype, weight.device), [])
        if bucket and sum(tensor.numel() for tensor in bucket) + weight.numel() > _AT_ONCE:
            yield list(bucket)
            bucket.clear()
        bucket.append(weight)
    yield from (bucket for bucket in kinds.values() if bucket)
