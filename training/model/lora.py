"""Low-rank adapters (LoRA, Hu et al. 2022): small trained weights next to frozen ones, merged at the end.

Tokens that no text has trained have rows in the embedding and the output layer that learn beside the adapters: frozen,
they would stay alike, and a model could neither read the turns of a chat nor end its answers (peft's
`trainable_token_indices`).

Shapes: I inputs and O outputs of a layer, R the rank, V tokens and N of them that learn, D the width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils import parametrize
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from infra.errors import stage_error
from training.config import LoraConfig
from training.model.new_tokens import untrained_ids
from training.model.nf4 import Nf4Linear

_A, _B = "lora_a", "lora_b"
_PEFT = "base_model.model."
"""Prefix of the weights in PEFT's files."""
_CODES = "codes"
_TABLE, _ROWS = "parametrizations.weight.original", "parametrizations.weight.0.rows"


class LoraLinear(nn.Linear):
    """A linear layer that computes x Wᵀ + b + (α / R) x Aᵀ Bᵀ with W and b frozen; A (R, I) and B (O, R) learn.

    B begins at 0, so the layer begins as it was; A as a linear layer's weight does (uniform, Kaiming with a = √5, as in
    the authors' code and in peft).
    """

    def __init__(self, layer: nn.Linear, config: LoraConfig, generator: torch.Generator) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.lora_a, self.lora_b = _fresh(layer.in_features, layer.out_features, config, layer.weight.device, generator)
        self._scale = config.alpha / config.rank

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self._scale * linear(linear(input, self.lora_a), self.lora_b)


class LoraNf4(nn.Module):
    """As `LoraLinear`, with W frozen in 4 bits."""

    def __init__(self, layer: Nf4Linear, config: LoraConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.in_features, self.out_features, self.base = layer.in_features, layer.out_features, layer
        self.lora_a, self.lora_b = _fresh(layer.in_features, layer.out_features, config, layer.codes.device, generator)
        self._scale = config.alpha / config.rank

    def forward(self, input: Tensor) -> Tensor:
        base: Tensor = self.base(input)
        return base + self._scale * linear(linear(input, self.lora_a), self.lora_b)


def _fresh(
    inputs: int, outputs: int, config: LoraConfig, device: torch.device, generator: torch.Generator
) -> tuple[nn.Parameter, nn.Parameter]:
    """Return A (R, I) and B (O, R) as they begin."""
    bound = 1 / math.sqrt(inputs)
    a = torch.empty(config.rank, inputs).uniform_(-bound, bound, generator=generator)
    return nn.Parameter(a.to(device)), nn.Parameter(torch.zeros(outputs, config.rank, device=device))


class LearningRows(nn.Module):
    """A parametrization of a table (V, D) of tokens whose rows `ids` learn while the others are frozen.

    rows: (N, D), initialised from the table.
    """

    def __init__(self, table: Tensor, ids: Sequence[int]) -> None:
        super().__init__()
        self.register_buffer("ids", torch.tensor(ids, dtype=torch.long, device=table.device), persistent=False)
        self.rows = nn.Parameter(table.detach()[torch.tensor(ids, device=table.device)].clone())

    def forward(self, table: Tensor) -> Tensor:
        return table.index_copy(0, self.get_buffer("ids"), self.rows)


def learning_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: LoraConfig, stage: str = "sft"
) -> list[int]:
    """Return the tokens whose rows learn together with adapters. stage: of the config, for errors.

    Raises StageError `no_such_token` for a token that the tokenizer does not have.
    """
    if config.trainable_tokens == "untrained":
        return untrained_ids(model, tokenizer)
    known = tokenizer.get_vocab()
    if missing := [token for token in config.trainable_tokens if token not in known]:
        raise stage_error(
            "no_such_token",
            f"{stage}.lora.trainable_tokens",
            f"expected tokens of the model's tokenizer, which does not have {', '.join(missing)}",
            "give tokens as they are in tokenizer.json, or leave the key out",
        )
    return sorted({int(known[token]) for token in config.trainable_tokens})


def learn_rows(model: PreTrainedModel, ids: Sequence[int]) -> int:
    """Make the rows `ids` of a model with adapters learn too, in place; return the number of additional weights.

    A row of tied input and output embeddings is one.
    """
    if not ids:
        return 0
    learning: dict[int, LearningRows] = {}
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        if layer is None:
            continue
        table = layer.weight
        rows = learning.setdefault(id(table), LearningRows(table, ids))
        parametrize.register_parametrization(layer, "weight", rows)
    return sum(rows.rows.numel() for rows in learning.values())


def add_adapters(model: PreTrainedModel, config: LoraConfig, seed: int, stage: str = "sft") -> int:
    """Freeze a model and add adapters to its linear layers, in place; return the number of weights that learn. stage:
    of the config, for errors.

    Raises StageError `no_such_layer` for a target that names no linear layer.
    """
    head = model.get_output_embeddings()
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, (nn.Linear, Nf4Linear)) and layer is not head
    }
    kinds = sorted({name.rpartition(".")[2] for name in layers})
    if unknown := [target for target in config.targets if target not in kinds]:
        raise stage_error(
            "no_such_layer",
            f"{stage}.lora.targets",
            f"the model has no linear layer called {', '.join(unknown)}",
            f"name some of {', '.join(kinds)}" if kinds else f"tune all weights: set {stage}.lora to null",
        )
    if not layers:
        kind = model.config.model_type
        raise stage_error(
            "no_such_layer",
            f"{stage}.lora",
            f"expected a model with linear layers, but {kind} has none that adapters support",
            f"tune all weights: set {stage}.lora to null",
        )
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    learning = 0
    for name, layer in layers.items():
        parent, _, kind = name.rpartition(".")
        if not config.targets or kind in config.targets:
            adapted: LoraNf4 | LoraLinear
            if isinstance(layer, Nf4Linear):
                adapted = LoraNf4(layer, config, generator)
            else:
                adapted = LoraLinear(layer, config, generator)
            adapted.requires_grad_(False)
            for parameter in (adapted.lora_a, adapted.lora_b):
                parameter.requires_grad_(True)
                learning += parameter.numel()
            setattr(model.get_submodule(parent), kind, adapted)
    return learning


def peft_adapters(
    weights: Mapping[str, Tensor],
    config: LoraConfig,
    kept_share: float,
    tables: Mapping[str, tuple[Tensor, Tensor]],
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return adapters and learnt rows under the names of PEFT, and the keys of its LoraConfig.

    Args:
        weights: those of a model with adapters, as `whole_weights` returns them.
        config: as the adapters were made.
        kept_share: share of what was learnt that the merged model has.
        tables: by the name of an embedding or output layer its rows (V, D) before training and in the merged model.
            Rows that differ are `trainable_token_indices`, which replace those of the base model.
    """
    kinds = sorted({name.removesuffix("." + _A).rpartition(".")[2] for name in weights if name.endswith(_A)})
    tensors = {}
    for name, value in weights.items():
        if name.endswith(_A):
            tensors[f"{_PEFT}{name.removesuffix(_A)}lora_A.weight"] = value
        elif name.endswith(_B):
            tensors[f"{_PEFT}{name.removesuffix(_B)}lora_B.weight"] = kept_share * value
    tokens: dict[str, list[int]] = {}
    for name, (before, after) in tables.items():
        if ids := (before != after).any(1).nonzero()[:, 0].tolist():
            tokens[name.rpartition(".")[2]] = ids
            tensors[f"{_PEFT}{name}.token_adapter.trainable_tokens_delta"] = after[ids]
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": kinds,
        "trainable_token_indices": tokens or None,
    }
    return tensors, settings


def load_adapters(model: PreTrainedModel, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> None:
    """Set the adapters of a model, made by `add_adapters`, and rows of its tokens to those of `peft_adapters`."""
    modules = dict(model.named_modules())
    indices = settings["trainable_token_indices"] or {}
    with torch.no_grad():
        for name, value in tensors.items():
            layer, _, kind = name.removeprefix(_PEFT).removesuffix(".weight").rpartition(".")
            if kind in ("lora_A", "lora_B"):
                getattr(modules[layer], kind.lower()).copy_(value)
            else:
                layer = layer.removesuffix(".token_adapter")
                table = modules[layer].weight
                table[torch.tensor(indices[layer.rpartition(".")[2]], device=table.device)] = value.to(table)


def merged(
    weights: Mapping[str, Tensor],
    config: LoraConfig,
    ids: Sequence[int] = (),
    frozen: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The weights of a model with adapters as those of one without: W + (α / R) B A in each adapted layer, and the rows
    `ids` of the tokens as they learnt.

    frozen: those of the model before, which take the place of weights in 4 bits.
    """
    frozen = frozen or {}
    parts = {f"{name.removesuffix(_CODES)}" for name in weights if name.endswith(_CODES)}
    others = (_A, _B, _TABLE, _ROWS)
    result = {
        name: value
        for name, value in weights.items()
        if not name.endswith(others) and name.rpartition(".")[0] + "." not in parts
    }
    for name in parts:  # with adapters the layer is called base
        result[f"{name.removesuffix('base.')}weight"] = frozen[f"{name.removesuffix('base.')}weight"]
    for name, table in weights.items():
        if name.endswith(_TABLE):
            layer = name.removesuffix(_TABLE)
            result[f"{layer}weight"] = table.index_copy(0, torch.tensor(ids), weights[layer + _ROWS])
    for name, a in weights.items():
        if name.endswith(_A):
            layer = name.removesuffix(_A)
            result[f"{layer}weight"] = result[f"{layer}weight"] + config.alpha / config.rank * weights[layer + _B] @ a
    return result
