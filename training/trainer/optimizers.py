"""The optimizer of a training and its groups: weights that decay, have a separate learning rate, or use Muon."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from training.config import OptimizerConfig
from training.core.parallel_parts import ExpertParts
from training.distributed.gradients import local
from training.model.blocks import blocks
from training.trainer.muon import Muon

LION_MOMENTUM = "lion_momentum"
"""Key of Lion's state. It differs from AdamW's, whose momentum is a different quantity."""


def optimizer_of(
    model: nn.Module,
    config: OptimizerConfig,
    compute: torch.dtype = torch.float32,
    experts: ExpertParts | None = None,
) -> torch.optim.Optimizer:
    """Create fused AdamW or the optimizer named by `config.kind`, or Muon for the matrices of a model's blocks next to
    AdamW; `config.decayed` lists the weights that decay.

    Each group has its peak learning rate as `lr` and a factor on it as `scale`; LearningRate applies the schedule to
    both. Under µP (`config.mup_base_width`) the rates of matrices and output layer decrease with the width, and the
    decay per step stays the same; the size of Muon's steps does not depend on the width.

    Args:
        compute: dtype of Muon's products.
        experts: the model's experts, if ranks share them.
    """
    # Sort the weights by kind: each kind has its own decay and rate.
    inputs, outputs = _outer(model)
    wider = _width(model) / config.mup_base_width if config.mup_base_width else 1.0
    stepped = _by_muon(model) if config.muon else {}
    kinds: dict[str, list[nn.Parameter]] = {
        "muon": [], "muon transposed": [], "matrices": [], "norms": [], "biases": [], "embeddings": [], "head": []
    }  # fmt: skip
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        number = id(weight)
        if number in inputs or (number in outputs and config.head_scale is None and wider == 1):
            kinds["embeddings"].append(weight)
        elif number in outputs:
            kinds["head"].append(weight)
        elif number in stepped:
            kinds["muon transposed" if stepped[number] else "muon"].append(weight)
        else:
            kinds["matrices" if weight.ndim >= 2 else "biases" if name.endswith("bias") else "norms"].append(weight)
    # Rates by kind, relative to the schedule's; with µP those of matrices fall with the width, their decay rises.
    head = config.embedding_scale if config.head_scale is None else config.head_scale
    scales = {"embeddings": config.embedding_scale, "head": head / wider, "matrices": 1 / wider}
    kept = {"head": wider, "matrices": wider}
    decayed = {*config.decayed, *(["head"] if "embeddings" in config.decayed else [])}
    decayed |= {"muon", "muon transposed"} if "matrices" in decayed else set()
    groups: list[dict[str, Any]] = [
        {
            "params": weights,
            "weight_decay": config.weight_decay * kept.get(kind, 1.0) if kind in decayed else 0.0,
            "scale": scales.get(kind, 1.0),
        }
        for kind, weights in kinds.items()
    ]
    # Experts that ranks share are in separate groups, which only their holders update.
    stepped_groups = _by_holders(groups, experts)
    if config.kind == "lion":
        return Lion(stepped_groups, config.learning_rate, config.betas)
    if config.kind == "adafactor":
        return Adafactor(stepped_groups, lr=config.learning_rate)
    adamw: dict[str, Any] = {"lr": config.learning_rate, "betas": config.betas, "eps": config.eps, "fused": True}
    if config.muon is None:
        return torch.optim.AdamW(stepped_groups, **adamw)
    for group, transposed in zip(groups, (False, True), strict=False):
        group |= {
            "muon": True,
            "transposed": transposed,
            "lr": config.muon.learning_rate,
            "momentum": config.muon.momentum,
            "iterations": config.muon.iterations,
        }
    return Muon(_by_holders(groups, experts), adamw, compute)


class Adafactor(torch.optim.Adafactor):
    """torch.optim.Adafactor with the schedule's learning rate as its relative step in every batch.

    torch uses min(rate, 1/√step), the default of Shazeer & Stern 2018 without a schedule: a rate of 1e-2 would decrease
    from batch 10,000 on, regardless of the schedule. transformers' Adafactor has no such bound with
    `relative_step=False`, which was used to train T5.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        rates = [float(group["lr"]) for group in self.param_groups]
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = _Unbounded(rate)
        try:
            return super().step(closure)
        finally:
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate


class _Unbounded(float):
    """A number that `min` returns, whatever it is compared with."""

    def __gt__(self, other: float) -> bool:
        return False


class Lion(torch.optim.Optimizer):
    """Step by the sign of a momentum (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2):
    with the gradient g, the momentum m and betas (b1, b2) a weight w becomes
    w - lr · (sign(b1 · m + (1 - b1) · g) + decay · w), then m becomes b2 · m + (1 - b2) · g.

    The step is elementwise, so a rank steps its part of a weight, however the weight is sharded. A weight without a
    gradient does not change.
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
                if LION_MOMENTUM not in state:
                    state[LION_MOMENTUM] = torch.zeros_like(weight)
                local_weight, gradient, momentum = local(weight), local(weight.grad), local(state[LION_MOMENTUM])
                local_weight.mul_(1 - group["lr"] * group["weight_decay"])
                local_weight.add_(momentum.lerp(gradient, 1 - group["betas"][0]).sign_(), alpha=-group["lr"])
                momentum.lerp_(gradient, 1 - group["betas"][1])
        return loss


def _by_holders(groups: Sequence[dict[str, Any]], experts: ExpertParts | None) -> list[dict[str, Any]]:
    """Return the groups that have weights, with weights of experts separate from weights that other ranks hold too: a
    fused kernel must not step weights together whose state is distributed over different ranks (ZeRO stage 1)."""
    expert_ids = set(map(id, experts.weights)) if experts else set()
    split_groups = []
    for group in groups:
        for apart in (False, True):
            weights = [weight for weight in group["params"] if (id(weight) in expert_ids) == apart]
            split_groups += [{**group, "params": weights}] if weights else []
    return split_groups


def _by_muon(model: nn.Module) -> dict[int, bool]:
    """Map the ids of the matrices of a model's blocks to True if their first dimension is their inputs."""
    transposed = {}
    for block in blocks(model):
        for layer in block.modules():
            for weight in layer.parameters(recurse=False):
                if weight.ndim == 2 and min(weight.shape) > 1 and not isinstance(layer, nn.Embedding):
                    transposed[id(weight)] = isinstance(layer, Conv1D)
    return transposed


def _width(model: nn.Module) -> int:
    """Width of the residual stream."""
    return next(int(layer.config.hidden_size) for layer in model.modules() if isinstance(layer, PreTrainedModel))


def _outer(model: nn.Module) -> tuple[set[int], set[int]]:
    """Return the ids of the weights of embeddings and of output layers, whose name depends on the family (lm_head,
    embed_out)."""
    inputs: set[int] = set()
    outputs: set[int] = set()
    for layer in model.modules():
        if isinstance(layer, nn.Embedding):
            inputs.update(map(id, layer.parameters()))
        elif isinstance(layer, PreTrainedModel):
            output = layer.get_output_embeddings()
            if output is not None:
                # Its weight, or the frozen weight and the trainable rows (training/model/lora.py).
                outputs.update(id(weight) for name, weight in output.named_parameters() if name != "bias")
    return inputs, outputs
