"""Norms that are watched while a model trains: of gradients, which are clipped by it, and of the last hidden state."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from training.core import ranks
from training.core.callbacks import Callback
from training.core.train_state import Trainable, TrainState
from training.distributed.tensor_parallel import clip


class GradientClip(Callback):
    """Scale all gradients of a batch so that their global norm is at most `limit` (Pascanu et al. 2013).

    networks: parts of the model, by name, that share no weights and no loss: each is clipped by its own norm, so that
    none of them reduces the others' updates.
    """

    def __init__(self, limit: float, networks: Mapping[str, nn.Module] | None = None) -> None:
        self._limit = limit
        self._networks = dict(networks or {})
        self.norm = 0.0
        """Norm of all gradients of the last batch, before clipping."""
        self.norms: dict[str, float] = {}
        """Norm of each network's gradients."""

    def after_train_batch(self, state: TrainState) -> None:
        if not self._networks:
            self.norm = _clipped(state.model, self._limit)
            return
        self.norms = {name: _clipped(part, self._limit) for name, part in self._networks.items()}
        self.norm = math.hypot(*self.norms.values())


def _clipped(model: nn.Module, limit: float) -> float:
    """Clip gradients to a global norm of `limit` over all ranks; return the norm before clipping."""
    if isinstance(model, Trainable) and model.pipeline is not None:
        return model.pipeline.clip(limit)
    if isinstance(model, Trainable) and model.experts is not None:
        return model.experts.clip(model, limit)
    if ranks.tensor_parallel() > 1:
        return clip(model, limit)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


class ActivationNorm(Callback):
    """Mean length of the vectors of the last hidden state over the tokens of a batch, on all ranks."""

    def __init__(self, model: Trainable) -> None:
        self._lengths: list[Tensor] = []
        self.norm: float | None = None
        """Norm of the last batch; None before the first one."""
        stack = model.last_stack()
        self._of_outputs = stack is None
        if stack is not None:
            stack.register_forward_hook(lambda _module, _given, output: self._keep(output.last_hidden_state))

    def batch_start(self, state: TrainState) -> None:
        self._lengths = []

    def after_forward(self, state: TrainState) -> None:
        if self._of_outputs:
            outputs = state.outputs
            if outputs is None:
                return  # other ranks of a pipeline compute them
            # Outputs of a mixture of experts contain its routers' figures next to the hidden states.
            self._keep(outputs[0] if isinstance(outputs, tuple) else outputs)

    def batch_end(self, state: TrainState) -> None:
        if ranks.pipeline_parallel() > 1:
            self._of_pipelines(state.device)
            return
        if not self._lengths:
            self.norm = None
            return
        mean = torch.stack(self._lengths).mean()
        self.norm = float(ranks.all_reduce(mean)) / ranks.world_size()

    def _of_pipelines(self, device: torch.device) -> None:
        """The mean over the ranks that compute the last hidden states."""
        local_mean = torch.stack(self._lengths).mean() if self._lengths else torch.zeros((), device=device)
        mean, count = ranks.all_reduce(
            torch.stack([local_mean, local_mean.new_tensor(float(bool(self._lengths)))])
        ).tolist()
        self.norm = mean / count if count else None

    def _keep(self, hidden: Tensor) -> None:
        if torch.is_grad_enabled():  # a policy also writes answers with the same layers
            with torch.no_grad():
                self._lengths.append(torch.linalg.vector_norm(hidden.detach().float(), dim=-1).mean())


def last_stack(network: PreTrainedModel) -> nn.Module:
    """The layers below a network's output layer: of an encoder-decoder the decoder's."""
    stack = network.get_decoder() if network.config.is_encoder_decoder else network.base_model
    assert isinstance(stack, nn.Module)
    return stack
