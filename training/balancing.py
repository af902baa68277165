"""The balancing loss of a mixture of experts, and how evenly its tokens are spread.

Shapes: L layers with experts, N tokens, E experts of a layer, of which k see a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from infra.run import Run
from training import ranks
from training.callbacks import Callback
from training.train_state import TrainState

# Experts up to whose number each one's share is told. More would be most of what a training writes.
_EACH = 32


class Routed(NamedTuple):
    """What a mixture of experts gives.

    states: hidden states (B, T, D) or logits (B, T, V). balancing: the loss of its routers, before its coefficient.
    chosen: how many tokens each expert of each layer saw (L, E), without those that are not counted.
    """

    states: Tensor
    balancing: Tensor
    chosen: Tensor


def balancing_loss(router_logits: Sequence[Tensor], k: int, counted: Tensor) -> tuple[Tensor, Tensor]:
    """(loss, tokens that each expert saw (L, E)), from the logits (N, E) of each layer's router.

    E · Σ f·P over the experts of all layers together (Fedus et al. 2021, equations 4 to 6): f is the share of tokens
    that choose an expert, P the mean probability that its router gives it. It is k where all see as many. To the
    bit load_balancing_loss_func of transformers 4, which holds k · E numbers for each token; version 5 adds by layers.
    counted: 1 for each token (N,) that counts, 0 for padding.
    """
    layers, experts = len(router_logits), router_logits[0].shape[-1]
    probabilities = torch.cat([one.float() for one in router_logits]).softmax(-1)
    counts = counted.repeat(layers)
    total = counts.sum()
    with torch.no_grad():
        choices = probabilities.topk(k, -1).indices
        # A place for each layer, choice and expert.
        place = torch.arange(layers * k, device=choices.device).view(layers, 1, k) * experts
        place = (place + choices.view(layers, -1, k)).flatten()
        found = probabilities.new_zeros(layers * k * experts)
        found.index_add_(0, place, counts.repeat_interleave(k).float())
        seen = found.view(layers, k, experts)
    mean = (probabilities * counts[:, None]).sum(0) / total
    return (seen.sum(0) / total * mean).sum() * experts, seen.sum(1)


class ExpertLoad(Callback):
    """Tells how evenly the tokens of each batch were spread over experts, over all ranks.

    train/balancing_loss: its mean over microbatches by their tokens, before the coefficient.
    train/expert_most, train/expert_least: the most and the fewest tokens that an expert of any layer saw, as a multiple
        of an even share.
    train/expert_share/<number>: of all layers together, where a layer has at most 32 experts.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._found: list[tuple[Tensor, Tensor]] = []

    def batch_start(self, state: TrainState) -> None:
        self._found = []

    def after_forward(self, state: TrainState) -> None:
        if isinstance(state.outputs, Routed):
            _, loss, chosen = state.outputs
            self._found.append((loss.detach(), chosen))

    def batch_end(self, state: TrainState) -> None:
        if not self._found:
            return
        losses, chosen = (torch.stack(part).double() for part in zip(*self._found, strict=True))
        self._found = []
        weighed = (losses * chosen.sum((1, 2))).sum()
        sums = ranks.all_reduce(torch.cat([weighed[None], chosen.sum(0).flatten()])).cpu()
        seen = sums[1:].view(chosen.shape[1:])
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
