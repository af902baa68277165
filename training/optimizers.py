"""AdamW with its groups: what decays, and what has a learning rate of its own."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from training.config import OptimizerConfig


def adamw(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Fused AdamW; `config.decayed` says what decays.

    Each group's `scale` is its learning rate as a multiple of the schedule's.
    """
    outer = {id(weight) for weight in _outer(model)}
    kinds: dict[str, list[nn.Parameter]] = {"matrices": [], "norms": [], "biases": [], "embeddings": []}
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        inner = "matrices" if weight.ndim >= 2 else "biases" if name.endswith("bias") else "norms"
        kinds["embeddings" if id(weight) in outer else inner].append(weight)
    groups = [
        {
            "params": weights,
            "weight_decay": config.weight_decay if kind in config.decayed else 0.0,
            "scale": config.embedding_scale if kind == "embeddings" else 1.0,
        }
        for kind, weights in kinds.items()
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )


def _outer(model: nn.Module) -> Iterator[Tensor]:
    """The weights of embeddings, and of output layers by whatever name their family gives them (lm_head, embed_out)."""
    for layer in model.modules():
        if isinstance(layer, nn.Embedding):
            yield layer.weight
        elif isinstance(layer, PreTrainedModel):
            output = layer.get_output_embeddings()
            if output is not None:
                yield output.get_parameter("weight")
