"""The balancing loss of a mixture of experts, and metrics of the balance of its tokens.

Shapes: L layers with experts, N tokens, E experts of a layer, of which k see a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh

from infra.run import Run
from training.core import ranks
from training.core.callbacks import Callback
from training.core.train_state import TrainState

# Maximum number of experts whose shares are reported one by one. More would dominate the metrics of a training.
_EACH = 32


class Routed(NamedTuple):
    """Outputs of a mixture of experts.

    states: hidden states (B, T, D) or logits (B, T, V). balancing: the loss of its routers, before its coefficient.
    chosen: number of tokens that each expert of each layer received (L, E), without uncounted ones. For a batch that
    passed a pipeline both have an additional first dimension: its microbatches.
    """

    states: Tensor
    balancing: Tensor
    chosen: Tensor


def router_sums(router_logits: Sequence[Tensor], k: int, counted: Tensor) -> Tensor:
    """Return sums over tokens (1 + l·k, E) for the balancing loss.

    The first row has the probabilities of each expert, with their gradient; the others the number of tokens in each
    layer that chose it as their first, second, … choice.

    Args:
        router_logits: logits (N, E) of the routers of l layers.
        k: experts that a token chooses in each layer.
        counted: 1 for each token (N,) that counts, 0 for padding.
    """
    layers, experts = len(router_logits), router_logits[0].shape[-1]
    probabilities = torch.cat([logits.float() for logits in router_logits]).softmax(-1)
    counts = counted.repeat(layers)
    with torch.no_grad():
        choices = probabilities.topk(k, -1).indices
        # A place for each layer, choice and expert.
        index = torch.arange(layers * k, device=choices.device).view(layers, 1, k) * experts
        index = (index + choices.view(layers, -1, k)).flatten()
        chosen_sums = probabilities.new_zeros(layers * k * experts)
        chosen_sums.index_add_(0, index, counts.repeat_interleave(k).float())
    return torch.cat([(probabilities * counts[:, None]).sum(0)[None], chosen_sums.view(-1, experts)])


def balancing_loss(sums: Tensor, k: int, tokens: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return (loss, number of tokens that each expert saw (L, E)).

    E · Σ f·P over the experts of all layers together (Fedus et al. 2021, equations 4 to 6): f is the share of tokens
    that choose an expert, P the mean probability that its router gives it. It is k where all see as many. It is
    load_balancing_loss_func of transformers, which adds tokens up layer by layer.

    Args:
        sums: those of `router_sums` over all layers (1 + L·k, E).
        k: experts that a token chooses in each layer.
        tokens: number of tokens that count.
    """
    seen = sums[1:].detach().unflatten(0, (-1, k))
    total = tokens * len(seen)
    return (seen.sum(0) / total * (sums[0] / total)).sum() * sums.shape[1], seen.sum(1)


@dataclass(frozen=True)
class TokenRanks:
    """Ranks that have different tokens of the same sequences.

    mesh: those that share sequences (`context`), and those that share layers (`tensor`), between which sequences are
    split too.
    """

    mesh: DeviceMesh

    def own(self, tokens: Tensor) -> Tensor:
        """Return this rank's part (B, T / tensor ranks) of a tensor (B, T) that ranks which share layers have."""
        return tokens.chunk(self.mesh.size(1), 1)[self.mesh.get_local_rank(1)]

    def sum(self, sums: Tensor) -> Tensor:
        """Sum over all of these ranks. The gradient of a rank is that of its tokens, since ranks that share layers sum
        their gradients, times the number of ranks that share sequences, since these average theirs."""
        total: Tensor = _Summed.apply(sums, self.mesh)
        return total


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.means = mesh.size(0)
        total = value.clone()
        for dim in range(mesh.ndim):
            if mesh.size(dim) > 1:
                distributed.all_reduce(total, group=mesh.get_group(dim))
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return upstream[0] * ctx.means, None


class ExpertLoad(Callback):
    """Report the balance of each batch's tokens among the experts, over all ranks.

    train/balancing_loss: its mean over microbatches by their tokens, before the coefficient.
    train/expert_most, train/expert_least: the most and the fewest tokens that an expert of any layer saw, as a multiple
        of an even share.
    train/expert_share/<number>: of all layers together, where a layer has at most 32 experts.
    """

    def __init__(self, layers: int, experts: int, run: Run) -> None:
        self._shape = layers, experts
        self._run = run
        self._found: list[tuple[Tensor, Tensor]] = []

    def batch_start(self, state: TrainState) -> None:
        self._found = []

    def after_forward(self, state: TrainState) -> None:
        if isinstance(state.outputs, Routed):
            _, loss, chosen = state.outputs
            self._found.append((loss.detach().view(-1), chosen.view(-1, *self._shape)))

    def batch_end(self, state: TrainState) -> None:
        local_sums = torch.zeros(1 + math.prod(self._shape), dtype=torch.float64, device=state.device)
        if self._found:  # ranks of a pipeline other than the last have none
            losses, chosen = (torch.cat(part).double() for part in zip(*self._found, strict=True))
            local_sums = torch.cat([(losses * chosen.sum((1, 2))).sum()[None], chosen.sum(0).flatten()])
        self._found = []
        sums = ranks.all_reduce(local_sums).cpu()
        seen = sums[1:].view(self._shape)
        if not seen.any():
            return
        shares = seen / seen.sum(1, keepdim=True).clamp(min=1)
        experts = shares.shape[1]
        values = {
            "train/balancing_loss": float(sums[0] / seen.sum().clamp(min=1)),
            "train/expert_most": float(shares.max()) * experts,
            "train/expert_least": float(shares.min()) * experts,
        }
        if experts <= _EACH:
            values |= {f"train/expert_share/{number}": share for number, share in enumerate(shares.mean(0).tolist())}
        self._run.metrics(values, state.clock.batch)
