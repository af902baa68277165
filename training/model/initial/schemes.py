"""Initialise the weights of a model by published schemes."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedModel

Scheme = Literal["gpt2", "plain", "small", "fan_in"]
# What adds to the residual stream, by the names that transformers' families give it.
RESIDUAL = (
    "o_proj.weight", "down_proj.weight", "c_proj.weight", "out_proj.weight", "attention.dense.weight",
    "dense_4h_to_h.weight", "fc2.weight", "wo.weight", "SelfAttention.o.weight", "EncDecAttention.o.weight",
)  # fmt: skip


def initialise(
    model: PreTrainedModel,
    scheme: Scheme,
    spread: float = 0.02,
    *,
    zero_residual: bool = False,
    base_width: int | None = None,
) -> None:
    """Draw every matrix of `model` again by `scheme` (see ModelConfig.init); norms and biases stay at 1 and 0.

    Draws from torch's global random state. Tied matrices are drawn once.

    Args:
        spread: standard deviation for the schemes that take one.
        zero_residual: True to start projections into the residual stream at zero.
        base_width: the width for which `spread` is chosen, if µP scales from there
            (OptimizerConfig.mup_base_width).
    """
    layers, width = model.config.num_hidden_layers, model.config.hidden_size
    wider = width / base_width if base_width else 1.0
    tables = {id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Embedding)}
    head = model.get_output_embeddings()
    for name, weight in model.named_parameters():
        if weight.ndim < 2:
            continue
        residual = name.endswith(RESIDUAL)
        of_head = head is not None and weight is head.weight
        inner = spread if id(weight) in tables else spread / wider if of_head else spread / math.sqrt(wider)
        match scheme:
            case "gpt2":
                deviation = inner / (math.sqrt(2 * layers) if residual else 1)
            case "plain":
                deviation = inner
            case "small":
                deviation = 2 / (layers * math.sqrt(width)) if residual else math.sqrt(2 / (5 * width))
            case "fan_in":
                if id(weight) in tables:
                    deviation = spread
                elif of_head:
                    deviation = 0.0
                else:
                    deviation = 1 / math.sqrt(_fan_in(model, name)) / (math.sqrt(2 * layers) if residual else 1)
        nn.init.normal_(weight, 0.0, 0.0 if zero_residual and residual else deviation)
    for layer in model.modules():
        if isinstance(layer, nn.Embedding) and layer.padding_idx is not None:
            with torch.no_grad():
                layer.weight[layer.padding_idx].zero_()


def _fan_in(model: PreTrainedModel, name: str) -> int:
    """Inputs of a matrix: GPT-2's Conv1D keeps them first, Linear last."""
    module = model.get_submodule(name.rpartition(".")[0])
    weight = model.get_parameter(name)
    return weight.shape[1] if isinstance(module, nn.Linear) else weight.shape[0]
