"""Muon: momentum steps with orthogonalized matrices (Jordan et al. 2024), and AdamW for all other weights.

Shapes: N matrices of one shape, m rows (outputs), n columns (inputs).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from training.checkpoint.snapshot import TensorPart
from training.distributed.gradients import local

# Jordan et al. 2024: as steep at 0 as possible; singular values end between 0.7 and 1.2 after five steps.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7
# Matrices are gathered and orthogonalized together, up to this many elements (256 MB in fp32).
_AT_ONCE = 1 << 26


class Muon(torch.optim.Optimizer):
    """AdamW for groups without a key `muon`, and Muon for groups with it, as in torch.optim.Muon (since torch 2.9).

    Muon's groups have `lr`, `weight_decay` (decoupled), `momentum`, `iterations` (of Newton-Schulz) and `transposed`
    (True if the first dimension of weights is their inputs, as in GPT-2). The rest is as in torch.optim.AdamW. A weight
    without a gradient does not change. Weights sharded by FSDP2 are gathered, one shape at a time, and every rank
    orthogonalizes them by itself.

    compute: dtype of Newton-Schulz's products: bf16 is enough (Jordan et al. 2024).
    """

    def __init__(self, groups: Iterable[dict[str, Any]], adamw: dict[str, Any], compute: torch.dtype) -> None:
        groups = list(groups)
        super().__init__(groups, {})
        others = [group for group in self.param_groups if "muon" not in group]
        self._adamw = torch.optim.AdamW(others, **adamw) if others else None
        if self._adamw is not None:
            # Both optimizers share one state and one set of groups.
            self._adamw.state = self.state
        self._compute = compute

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if "muon" in group:
                self._step(group)
        if self._adamw is not None:
            self._adamw.step()
        return loss

    def _step(self, group: dict[str, Any]) -> None:
        lr, momentum = group["lr"], group["momentum"]
        weights = [weight for weight in group["params"] if weight.grad is not None]
        for weight in weights:
            state = self.state[weight]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(weight)
        for some in _of_one_shape(weights):
            steps = []
            for weight in some:
                assert weight.grad is not None
                # Only the local part: in arithmetic, torch 2.7 loses the placement of a tensor that both FSDP and
                # tensor parallelism shard.
                buffer, gradient = local(self.state[weight]["momentum_buffer"]), local(weight.grad)
                buffer.lerp_(gradient, 1 - momentum)
                steps.append(_full_tensor(gradient.lerp(buffer, momentum), weight))
            orthogonalised = orthogonal(torch.stack(steps), group["iterations"], self._compute)
            rows, columns = orthogonalised.shape[:0:-1] if group["transposed"] else orthogonalised.shape[1:]
            scale = max(1.0, rows / columns) ** 0.5
            for weight, step in zip(some, orthogonalised.to(some[0].dtype), strict=True):
                local(weight).mul_(1 - lr * group["weight_decay"])
                local(weight).add_(step[TensorPart.of(weight).slices], alpha=-lr * scale)


def orthogonal(matrices: Tensor, iterations: int, compute: torch.dtype) -> Tensor:
    """Approximate UVᵀ of each matrix USVᵀ by Newton-Schulz steps of fifth order.

    Args:
        matrices: (N, m, n).
        iterations: number of steps.
        compute: dtype of the products, and of the result.
    """
    a, b, c = _QUINTIC
    x = matrices.to(compute)
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + _EPS)
    for _ in range(iterations):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x


def _of_one_shape(weights: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    shapes: dict[torch.Size, list[Tensor]] = {}
    for weight in weights:
        shapes.setdefault(weight.shape, []).append(weight)
    for shape, alike in shapes.items():
        count = max(1, _AT_ONCE // shape.numel())
        for begin in range(0, len(alike), count):
            yield alike[begin : begin + count]


def _full_tensor(part: Tensor, like: Tensor) -> Tensor:
    """Gather a tensor that is distributed over the ranks like `like`."""
    if not isinstance(like, DTensor):
        return part
    shape, stride = like.shape, like.stride()
    spread = DTensor.from_local(part, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)
    return spread.full_tensor()
