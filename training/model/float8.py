"""Matrix products of a training in FP8 (`launch.precision: fp8`), by torchao's linear layers.

Inputs and weights of a product are rounded to E4M3 and gradients to E5M2, each scaled so that its largest number is the
type's largest (Micikevicius et al. 2022, sections 3 and 5). Weights, their gradients and the optimizer's state keep
their precision, so evaluation, export and continuation work as for any other model.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from infra.errors import stage_error
from training.model.blocks import blocks

if TYPE_CHECKING:
    from torchao.float8 import Float8Linear

_MULTIPLE = 16
"""Tensor cores multiply 8-bit matrices only if both dimensions are multiples of this number."""
_NATIVE = (8, 9)
"""The first compute capability of GPUs with products in FP8: Ada and Hopper's."""
_OF_MIXTURES = ("gate", "router", "experts")
"""Parts of layers that stay out: an expert has a few tokens, and what chooses among experts needs its digits (Fedus et
al. 2022, section 2.4)."""


def train_in_float8(model: nn.Module, device: torch.device) -> int:
    """Make the linear layers of a model's blocks compute in FP8 during training, in place; return their number.

    Embeddings, the output layer, norms and attention itself stay in the precision around them, as do experts and
    routers of a mixture, and matrices with a side that is no multiple of 16. On a CPU the products are emulated:
    rounded to 8 bits and multiplied in fp32, slower than without.

    Raises StageError if torchao is missing, the GPU has no FP8 products, or no layer has suitable dimensions.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _NATIVE:
        name = torch.cuda.get_device_name(device)
        expected = f"expected a GPU that multiplies in FP8 (compute capability 8.9 or more), not {name}"
        raise stage_error("no_fp8", "launch.precision", expected, "set it to bf16")
    replaced = [
        (parent, name, child)
        for block in blocks(model)
        for path, parent in block.named_modules()
        for name, child in parent.named_children()
        if _fits(f"{path}.{name}", child)
    ]
    if not replaced:
        expected = "expected linear layers whose sides are multiples of 16 in the model's blocks, found none"
        raise stage_error("no_fp8", "launch.precision", expected, "set it to bf16, or take another model")
    try:
        from torchao.float8 import Float8LinearConfig
    except ImportError as error:
        fix = "pip install -e '.[fp8]', or set it to bf16"
        raise stage_error("missing_package", "launch.precision", "torchao is not installed", fix) from error
    config = Float8LinearConfig(emulate=device.type == "cpu", pad_inner_dim=True)
    for parent, name, child in replaced:
        setattr(parent, name, _training_linear().from_float(child, config))
    return len(replaced)


def _fits(path: str, module: nn.Module) -> bool:
    return (
        type(module) is nn.Linear
        and not {module.in_features % _MULTIPLE, module.out_features % _MULTIPLE} - {0}
        and not set(path.split(".")) & set(_OF_MIXTURES)
    )


@cache
def _training_linear() -> type[Float8Linear]:
    """Create the class at its first use: importing torchao takes half a second, which other trainings save."""
    from torchao.float8.float8_linear import Float8Linear

    class TrainingFloat8Linear(Float8Linear):
        """Linear layer in FP8 during training; evaluated as the exported linear layer."""

        def forward(self, input: Tensor) -> Tensor:
            if self.training:
                output: Any = super().forward(input)
                return output
            return functional.linear(input, self.weight, self.bias)

    return TrainingFloat8Linear
