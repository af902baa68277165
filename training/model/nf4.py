"""Frozen weights in 4 bits (NF4, Dettmers et al. 2023, "QLoRA"), under adapters that learn.

Each block of 64 weights has a scale, its largest magnitude; a weight is the nearest of 16 values between -1 and 1 times
the scale. The values are those quantiles of a normal distribution that the paper's appendix E lists. Scales are numbers
of 8 bits in turn, in blocks of 256 ("double quantization", section 3), so that a weight takes 4.127 bits. Nothing but
PyTorch is needed: it is the same on every device.

Shapes: I inputs and O outputs of a layer, N = O·I weights, padded to whole blocks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, pad
from transformers import PreTrainedModel

BLOCK, SCALES_BLOCK = 64, 256
VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_CHUNK = 1 << 22
"""Weights that are quantized at once."""


class Nf4Linear(nn.Module):
    """A linear layer whose weight (O, I) is frozen in 4 bits.

    codes: (N / 2,) uint8, two weights each, the first in the upper half. scales: (N / 64,) uint8, the scales of blocks
    less `mean`, in 127ths of the largest of their block; 128 is 0. scale_steps: (N / 64 / 256,) fp32.
    """

    codes: Tensor
    scales: Tensor
    scale_steps: Tensor
    mean: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = layer.in_features, layer.out_features, layer.bias
        flat = layer.weight.detach().flatten()
        flat = pad(flat, (0, -len(flat) % BLOCK))
        values = torch.tensor(VALUES, device=flat.device)
        # A weight between two values gets the nearer one.
        bounds = (values[1:] + values[:-1]) / 2
        codes, largest = [], []
        for part in flat.split(_CHUNK):
            blocks = part.float().view(-1, BLOCK)
            scale = blocks.abs().amax(1)
            nearest = torch.bucketize(blocks / scale.clamp(min=1e-30)[:, None], bounds).to(torch.uint8).flatten()
            codes.append(nearest[::2] << 4 | nearest[1::2])
            largest.append(scale)
        scale = torch.cat(largest)
        mean = scale.mean()
        of_blocks = pad(scale - mean, (0, -len(scale) % SCALES_BLOCK)).view(-1, SCALES_BLOCK)
        steps = of_blocks.abs().amax(1) / 127
        levels = (of_blocks / steps.clamp(min=1e-30)[:, None]).round() + 128
        self.register_buffer("codes", torch.cat(codes))
        self.register_buffer("scales", levels.to(torch.uint8).flatten()[: len(scale)].clone())
        self.register_buffer("scale_steps", steps)
        self.register_buffer("mean", mean)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weight (O, I)."""
        values = torch.tensor(VALUES, device=self.codes.device)
        # One look-up gives both weights of a code.
        pairs = torch.stack((values.repeat_interleave(16), values.repeat(16)), 1)
        steps = self.scale_steps.repeat_interleave(SCALES_BLOCK)[: len(self.scales)]
        scales = (self.scales.float() - 128) * steps + self.mean
        blocks = embedding(self.codes.int(), pairs).view(-1, BLOCK) * scales[:, None]
        size = self.out_features * self.in_features
        return blocks.flatten()[:size].view(self.out_features, self.in_features).to(dtype)

    def forward(self, input: Tensor) -> Tensor:
        """(…, I) → (…, O)."""
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        product: Tensor = _Product.apply(input.to(dtype), self)
        return product if self.bias is None else product + self.bias.to(dtype)


class _Product(torch.autograd.Function):
    """x Wᵀ whose backward pass makes W once more rather than keep it."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, layer: Nf4Linear) -> Tensor:
        ctx.layer = layer
        return linear(inputs, layer.dense(inputs.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return gradient @ ctx.layer.dense(gradient.dtype), None


def quantize_frozen(model: PreTrainedModel) -> int:
    """Replace the linear layers of a model but its output layer by layers in 4 bits, in place, one after the other;
    return the number of their weights."""
    head = model.get_output_embeddings()
    layers = {name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear and layer is not head}
    for name, layer in layers.items():
        parent, _, kind = name.rpartition(".")
        setattr(model.get_submodule(parent), kind, Nf4Linear(layer))
    return sum(layer.in_features * layer.out_features for layer in layers.values())
