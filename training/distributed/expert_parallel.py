"""Mixtures of experts in several ranks, and expert parallelism: ranks that hold a part of every layer's experts each
(Lepikhin et al. 2020, section 3.2; Fedus et al. 2021, section 3.1), for the mixtures of training/config/families.py.

Every rank has different tokens: a part of a batch, its part of the sequences that ranks share (context parallelism),
or its part between layers that they share (tensor parallelism with sequence parallelism); so no token is sent twice.
Each rank has all of the model except the experts, or its part under the other kinds of parallelism. In each layer an
all-to-all sends tokens to the ranks that hold the experts chosen by their router, and another returns the outputs. No
token is dropped. Weights keep the names that they have in the whole model.

Shapes: N tokens of a rank, D width, E experts of a layer, of which k see a token, C = N·k choices, R ranks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from training.core import ranks
from training.core.callbacks import Callback
from training.core.train_state import TrainState
from training.distributed.gradients import Replicas, average, clip_by, local
from training.distributed.other_ranks import OtherRanks
from training.distributed.tensor_parallel import squares
from training.model.experts import Experts, RepeatRows, expert_layers, order_of, outputs_of


def reach_every_expert(model: nn.Module) -> None:
    """Give every expert a gradient in every backward pass, of zeros if no token chose it: DDP and FSDP wait for the
    gradient of each weight."""
    for layer in expert_layers(model):
        layer.experts.reaches_all = True


class SharedExperts:
    """This rank's experts of a model, and operations to train them; every rank must call each method."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """Remove the experts of other ranks from a model that is whole on each rank; all must call.

        Ranks that share experts are adjacent among the ranks that have the same layers.
        """
        count, mesh = ranks.expert_parallel(), ranks.mesh(device.type)
        by_layers = mesh.mesh.movedim(1, 0).reshape(ranks.pipeline_parallel(), -1, count)
        shared = DeviceMesh(device.type, by_layers, mesh_dim_names=("pipe", "copies", "experts"))
        self.copies: DeviceMesh = shared["copies"]
        """The ranks that hold the same experts as this one, in one dimension."""
        group, rank = shared["experts"].get_group(), shared["experts"].get_local_rank()
        for layer in expert_layers(model):
            each = len(layer.experts) // count
            own_numbers = range(rank * each, (rank + 1) * each)
            for number, expert in enumerate(layer.experts):
                if number not in own_numbers:
                    layer.experts[number] = OtherRanks(expert)
            layer.experts.computed_by = partial(_made_by_ranks, group)
        # DDP does not support sharded weights, and a pipeline has its own replicas.
        alone = ranks.tensor_parallel() > 1 and ranks.pipeline_parallel() == 1
        self._replicas = Replicas(mesh) if alone else None
        self.weights: list[Tensor] = []
        """Those of the experts, once `hold` was called."""
        self._own: set[int] = set()
        self._others: list[nn.Parameter] = []

    @torch.no_grad()
    def hold(self, model: nn.Module) -> None:
        """Register the experts' weights, once a model is in its final state for training; broadcast those of the first
        rank to all ranks with the same experts, as DDP does for other weights."""
        self.weights = [weight for layer in expert_layers(model) for weight in layer.experts.parameters()]
        self._own = set(map(id, self.weights))
        first, group = distributed.get_process_group_ranks(self.copies.get_group())[0], self.copies.get_group()
        for weight in self.weights if self.copies.size() > 1 else ():
            distributed.broadcast(weight.data, first, group=group)
        if self._replicas is not None:
            self._others = [weight for weight in model.parameters() if not self.is_local(weight)]
            self._replicas.begin_alike(self._others)

    def is_local(self, weight: Tensor) -> bool:
        """Return True if a weight belongs to the experts."""
        return id(weight) in self._own

    def names(self, model: nn.Module) -> list[str]:
        """Names of the experts' weights in a model."""
        return [name for name, weight in model.named_parameters() if self.is_local(weight)]

    def gradients(self) -> list[Tensor]:
        return [weight.grad for weight in self.weights if weight.grad is not None]

    def join_gradients(self) -> None:
        """Average the gradients of experts over all ranks, as DDP does for other weights; this also averages other
        weights if DDP does not. Each rank already has the gradients of its group's tokens."""
        if self.copies.size() > 1:
            average(self.gradients(), self.copies.get_group(), ranks.gradient_ranks())
        elif gradients := self.gradients():  # a stage of a pipeline may have no experts
            torch._foreach_div_(gradients, float(ranks.gradient_ranks()))
        if self._replicas is not None:
            self._replicas.average([weight.grad for weight in self._others if weight.grad is not None])

    def squares(self) -> Tensor:
        """Return this rank's part of the sum of squares of the experts' gradients, in which each counts once."""
        squares = [gradient.float().square().sum() for gradient in self.gradients()]
        return torch.stack(squares).sum() / self.copies.size() if squares else torch.zeros(())

    def clip(self, model: nn.Module, limit: float) -> float:
        """Scale all gradients so that their norm over all experts is at most `limit`; return the norm before."""
        others = [weight.grad for weight in model.parameters() if weight.grad is not None and not self.is_local(weight)]
        if not others:
            return 0.0
        total = torch.stack([squares(gradient) for gradient in others]).sum() + self.squares()
        return clip_by(total, [*others, *self.gradients()], limit)


class IdleExperts(Callback):
    """Remove the zero gradients of experts that no token of a batch chose on any rank, since a single process has none
    for them: an optimizer skips weights without a gradient, but moves those with a zero one by its momentum."""

    def __init__(self, model: nn.Module) -> None:
        layers = [layer for layer in expert_layers(model) if not layer.experts.idle]
        self._weights = [weight for layer in layers for weight in layer.experts.parameters()]

    @torch.no_grad()
    def after_train_batch(self, state: TrainState) -> None:
        weights = [weight for weight in self._weights if weight.grad is not None]
        gradients = [local(weight.grad) for weight in weights if weight.grad is not None]
        if not gradients:
            return
        norms = torch.stack(torch._foreach_norm(gradients))
        if any(isinstance(weight, DTensor) for weight in weights):
            ranks.all_reduce(norms)  # each has a part of all of them
        for weight, norm in zip(weights, norms.tolist(), strict=True):
            if norm == 0:
                weight.grad = None


def _made_by_ranks(group: Any, experts: Experts, given: Tensor, counts: Tensor) -> Tensor:
    """Compute the outputs of experts that a group of ranks shares, like `outputs_of` on one rank; all must call."""
    own_experts = [expert for expert in experts if not isinstance(expert, OtherRanks)]
    to_send = counts.view(-1, len(own_experts))  # (R, E / R)
    to_come = torch.empty_like(to_send)
    distributed.all_to_all_single(to_come, to_send.contiguous(), group=group)
    sent, came = to_send.sum(1).tolist(), to_come.sum(1).tolist()
    arrived = _Exchanged.apply(given, sent, came, group)
    # By rank and expert; each expert takes those of all ranks.
    numbers = torch.arange(len(own_experts), device=given.device).repeat(len(to_come))
    order, inverse = order_of(numbers.repeat_interleave(to_come.flatten()))
    made = outputs_of(own_experts, RepeatRows.apply(arrived, order, inverse, 1), to_come.sum(0))
    return _Exchanged.apply(RepeatRows.apply(made, inverse, order, 1), came, sent, group)


class _Exchanged(torch.autograd.Function):
    """Rows that the ranks of a group send each other: of these the next `sent` to each, and as many of each as `came`;
    all must call, with rows or without."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], came: list[int], group: Any) -> Tensor:
        ctx.sent, ctx.came, ctx.group = sent, came, group
        return _exchange(rows, sent, came, group)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(upstream[0], ctx.came, ctx.sent, ctx.group), None, None, None


def _exchange(rows: Tensor, sent: list[int], came: list[int], group: Any) -> Tensor:
    received = rows.new_empty(sum(came), rows.shape[1])
    distributed.all_to_all_single(received, rows.contiguous(), came, sent, group=group)
    return received
