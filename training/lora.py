"""Low-rank adapters (LoRA, Hu et al. 2022): frozen weights with small trained ones beside them, merged at the end.

Shapes: I inputs and O outputs of a layer, R the rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from infra.errors import stage_error
from training.config import LoraConfig

_A, _B = "lora_a", "lora_b"


class LoraLinear(nn.Linear):
    """A linear layer that computes x Wᵀ + b + (α / R) x Aᵀ Bᵀ with W and b frozen; A (R, I) and B (O, R) learn.

    B begins at 0, so the layer begins as it was; A as a linear layer's weight does (uniform, Kaiming with a = √5, as in
    the authors' code and in peft).
    """

    def __init__(self, layer: nn.Linear, config: LoraConfig, generator: torch.Generator) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        bound = 1 / math.sqrt(layer.in_features)
        a = torch.empty(config.rank, layer.in_features).uniform_(-bound, bound, generator=generator)
        self.lora_a = nn.Parameter(a.to(layer.weight.device))
        self.lora_b = nn.Parameter(torch.zeros(layer.out_features, config.rank, device=layer.weight.device))
        self._scale = config.alpha / config.rank

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self._scale * linear(linear(input, self.lora_a), self.lora_b)


def add_adapters(model: PreTrainedModel, config: LoraConfig, seed: int) -> int:
    """Freezes a model and puts adapters beside its linear layers, in place; how many weights learn now.

    Raises StageError `no_such_layer` for a target that names no linear layer.
    """
    head = model.get_output_embeddings()
    layers = {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear) and one is not head}
    kinds = sorted({name.rpartition(".")[2] for name in layers})
    if unknown := [one for one in config.targets if one not in kinds]:
        raise stage_error(
            "no_such_layer",
            "sft.lora.targets",
            f"the model has no linear layer called {', '.join(unknown)}",
            f"name some of {', '.join(kinds)}" if kinds else "tune all weights: set sft.lora to null",
        )
    if not layers:
        kind = model.config.model_type
        raise stage_error(
            "no_such_layer",
            "sft.lora",
            f"expected a model with linear layers, {kind} has none that adapters are known for",
            "tune all weights: set sft.lora to null",
        )
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    learning = 0
    for name, layer in layers.items():
        parent, _, kind = name.rpartition(".")
        if not config.targets or kind in config.targets:
            adapted = LoraLinear(layer, config, generator)
            adapted.requires_grad_(False)
            for one in (adapted.lora_a, adapted.lora_b):
                one.requires_grad_(True)
                learning += one.numel()
            setattr(model.get_submodule(parent), kind, adapted)
    return learning


def merged(weights: Mapping[str, Tensor], config: LoraConfig) -> dict[str, Tensor]:
    """The weights of a model with adapters as those of one without: W + (α / R) B A in each adapted layer."""
    found = {name: value for name, value in weights.items() if not name.endswith((_A, _B))}
    for name, a in weights.items():
        if name.endswith(_A):
            layer = name.removesuffix(_A)
            found[f"{layer}weight"] = found[f"{layer}weight"] + config.alpha / config.rank * weights[layer + _B] @ a
    return found
