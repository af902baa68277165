"""Models of which a rank holds a part: placeholders for parts of other ranks, and joining all parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn

from training.core import ranks


class OtherRanks(nn.Module):
    """Placeholder for a layer of other ranks; returns its input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        if hasattr(layer, "attention_type"):
            self.attention_type = layer.attention_type  # by which some families choose a layer's mask

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden


def is_cut(model: nn.Module) -> bool:
    """Return True if other ranks hold some of a model's layers."""
    return any(isinstance(part, OtherRanks) for part in model.modules())


def join_stages(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of all ranks, on the CPU; every rank must call.

    Tensors that share memory on one rank share memory in the result.

    Args:
        tensors: those of this rank, by their names in the complete model.
    """
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), name)
    joined: dict[str, Tensor] = {}
    described = {name: (tensor.shape, tensor.dtype, first[id(tensor)]) for name, tensor in tensors.items()}
    for rank, names in enumerate(ranks.gather(described)):
        for name, (shape, dtype, same) in names.items():
            if name in joined:
                continue
            if same in joined:
                joined[name] = joined[same]
                continue
            tensor = (
                tensors[name].to(device) if rank == ranks.rank() else torch.empty(shape, dtype=dtype, device=device)
            )
            distributed.broadcast(tensor, rank)
            joined[name] = tensor.cpu()
    return joined
