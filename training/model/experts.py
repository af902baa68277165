"""Mixtures of experts in one rank: each expert a module, and the tokens that its router sends to it.

Shapes: N tokens of a rank, D width, E experts of a layer, of which k see a token, C = N·k choices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from training.config.families import FAMILIES, is_mixture


def expert_layers(model: nn.Module) -> list[Any]:
    """Return the layers that route to experts, in networks of the proven families."""
    return [part for part in _layers_of_mixtures(model) if isinstance(part.experts, Experts)]


def _layers_of_mixtures(model: nn.Module) -> list[Any]:
    mixtures: dict[int, Any] = {}
    for network in model.modules():
        if isinstance(network, PreTrainedModel) and is_mixture(network.config.model_type):
            mixtures |= {id(part): part for part in network.modules() if hasattr(part, "experts")}
    return [*mixtures.values()]


def unstack_experts(network: PreTrainedModel) -> None:
    """Replace transformers' stacked weights (E, …) of a layer by linear layers for each expert of a proven family.

    An optimizer then steps each matrix separately, ranks can hold some experts each, and weights have the same names as
    in the files of transformers."""
    family = network.config.model_type
    names = _NAMES.get(family, _NAMES[""])
    for layer in _layers_of_mixtures(network):
        if not isinstance(layer.experts, Experts):
            layer.experts = Experts(layer.experts, names, FAMILIES[family].idle_experts)


class Experts(nn.ModuleList):
    """The experts of a layer, each a module."""

    def __init__(self, stacked: Any, names: Mapping[str, str], idle: bool) -> None:
        """stacked: has gate_up_proj (E, 2·F, D), down_proj (E, D, F) and act_fn. names: of each expert's layers.
        idle: see `Family.idle_experts`."""
        weights = zip(stacked.gate_up_proj.detach(), stacked.down_proj.detach(), strict=True)
        super().__init__(_Expert(into, back, stacked.act_fn, names) for into, back in weights)
        self.computed_by: Callable[[Experts, Tensor, Tensor], Tensor] | None = None
        """`outputs_of` where ranks share the experts; None where this rank holds all."""
        self.idle = idle
        self.reaches_all = idle
        """True if every expert gets a gradient, of zeros if no token chose it."""

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The outputs of the k experts `chosen` (N, k) for tokens (N, D), times `weights` (N, k), added up."""
        order, inverse = order_of(chosen.flatten())
        # Experts would cast what they get; so it is sent in that type.
        device = tokens.device.type
        given = tokens.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else tokens
        given = RepeatRows.apply(given, order, inverse, chosen.shape[1])
        counts = torch.bincount(chosen.flatten(), minlength=len(self))
        if self.computed_by is None:
            made = outputs_of(self, given, counts, self.reaches_all)
        else:
            made = self.computed_by(self, given, counts)
        made = RepeatRows.apply(made, inverse, order, 1).unflatten(0, (-1, chosen.shape[1]))
        return (made * weights.to(tokens.dtype)[..., None]).sum(1).to(tokens.dtype)


_NAMES: dict[str, dict[str, str]] = {
    "": {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
    "mixtral": {"gate": "w1", "down": "w2", "up": "w3"},
}
"""Names of an expert's layers by function, in the order and spelling of a family's files."""


class _Expert(nn.Module):
    """A gated MLP with separate weights."""

    def __init__(self, into: Tensor, back: Tensor, activation: Any, names: Mapping[str, str]) -> None:
        """into: of the gate and what it is multiplied with (2·F, D); back: (D, F)."""
        super().__init__()
        gate, up = into.chunk(2)
        weights = {"gate": gate, "up": up, "down": back}
        for part, name in names.items():
            layer = nn.Linear(weights[part].shape[1], weights[part].shape[0], bias=False, device="meta")
            layer.weight = nn.Parameter(weights[part].clone(memory_format=torch.contiguous_format))
            self.add_module(name, layer)
        self.act_fn, self._names = activation, names

    def forward(self, tokens: Tensor) -> Tensor:
        gate, up, down = (self.get_submodule(self._names[part]) for part in ("gate", "up", "down"))
        made: Tensor = down(self.act_fn(gate(tokens)) * up(tokens))
        return made


def outputs_of(experts: Iterable[nn.Module], given: Tensor, counts: Tensor, all_of_them: bool = True) -> Tensor:
    """Return the outputs (C, D) of experts for their tokens.

    Args:
        experts: E modules.
        given: tokens (C, D), sorted by expert.
        counts: number of the next tokens that each expert gets (E,).
        all_of_them: True to call an expert without tokens too.
    """
    parts = given.split(counts.tolist())
    return torch.cat([e(part) for e, part in zip(experts, parts, strict=True) if all_of_them or len(part)])


def order_of(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the permutation (C,) that sorts rows by their keys (stable), and its inverse."""
    order = keys.argsort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return order, inverse


class RepeatRows(torch.autograd.Function):
    """Repeat rows (N, D) k times (N·k, D), in the order `places` (N·k,), whose inverse is `inverse`. torch's own
    gradient sums rows in arbitrary order on a GPU, which is not reproducible to the bit."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.k = k
        return rows.index_select(0, order if k == 1 else order // k)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        back = upstream[0].index_select(0, inverse)
        return back if ctx.k == 1 else back.unflatten(0, (-1, ctx.k)).sum(1), None, None, None
