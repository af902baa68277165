"""How long the vectors of the last hidden state are: they grow before a training falls apart."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from training import ranks
from training.callbacks import Callback
from training.train_state import Trainable, TrainState


class ActivationNorm(Callback):
    """Mean length of the vectors of the last hidden state over the tokens of a batch, on all ranks."""

    def __init__(self, model: Trainable) -> None:
        self._lengths: list[Tensor] = []
        self.norm: float | None = None
        """Of the last batch; None before there was one."""
        stack = model.last_stack()
        self._of_outputs = stack is None
        if stack is not None:
            stack.register_forward_hook(lambda _module, _given, output: self._keep(output.last_hidden_state))

    def batch_start(self, state: TrainState) -> None:
        self._lengths = []

    def after_forward(self, state: TrainState) -> None:
        if self._of_outputs:
            outputs = state.outputs
            # A router's figures stand beside the hidden states.
            self._keep(outputs[0] if isinstance(outputs, tuple) else outputs)

    def batch_end(self, state: TrainState) -> None:
        if not self._lengths:
            self.norm = None
            return
        mean = torch.stack(self._lengths).mean()
        self.norm = float(ranks.all_reduce(mean)) / ranks.world_size()

    def _keep(self, hidden: Tensor) -> None:
        if torch.is_grad_enabled():  # a policy also writes answers with the same layers
            with torch.no_grad():
                self._lengths.append(torch.linalg.vector_norm(hidden.detach().float(), dim=-1).mean())


def last_stack(network: PreTrainedModel) -> nn.Module:
    """The layers below a network's output layer: of an encoder-decoder the decoder's."""
    stack = network.get_decoder() if network.config.is_encoder_decoder else network.base_model
    assert isinstance(stack, nn.Module)
    return stack
