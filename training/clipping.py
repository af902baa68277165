"""Gradient clipping by the global norm, and the norm before it for whoever watches."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from training.callbacks import Callback
from training.train_state import TrainState


class GradientClip(Callback):
    """Scales all gradients of a batch so that their global norm is at most `limit` (Pascanu et al. 2013).

    networks: parts of the model, by name, that share no weights and no loss: each is clipped by a norm of its own, so
    that none of them takes from the others' updates.
    """

    def __init__(self, limit: float, networks: Mapping[str, nn.Module] | None = None) -> None:
        self._limit = limit
        self._networks = dict(networks or {})
        self.norm = 0.0
        """Of all gradients of the last batch, before clipping."""
        self.norms: dict[str, float] = {}
        """Of each network's."""

    def after_train_batch(self, state: TrainState) -> None:
        if not self._networks:
            self.norm = _clipped(state.model, self._limit)
            return
        self.norms = {name: _clipped(part, self._limit) for name, part in self._networks.items()}
        self.norm = math.hypot(*self.norms.values())


def _clipped(model: nn.Module, limit: float) -> float:
    """Cuts gradients to a global norm of `limit` over all ranks; the norm before."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
