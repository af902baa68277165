"""Lion: steps by the sign of a momentum (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms")."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from training.snapshot import local

MOMENTUM = "lion_momentum"
"""Its state's key: another than AdamW's, whose momentum is of another kind."""


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of Chen et al. 2023: with the gradient g, the momentum m and betas (b1, b2) a weight w becomes
    w - lr · (sign(b1 · m + (1 - b1) · g) + decay · w), then m becomes b2 · m + (1 - b2) · g.

    Each number is stepped by itself, so that a rank steps the part of a weight that it holds, however it was cut. A
    weight without a gradient stays as it is.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if MOMENTUM not in state:
                    state[MOMENTUM] = torch.zeros_like(weight)
                mine, gradient, momentum = local(weight), local(weight.grad), local(state[MOMENTUM])
                mine.mul_(1 - group["lr"] * group["weight_decay"])
                mine.add_(momentum.lerp(gradient, 1 - group["betas"][0]).sign_(), alpha=-group["lr"])
                momentum.lerp_(gradient, 1 - group["betas"][1])
        return loss
