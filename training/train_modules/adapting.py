"""A tuning that learns adapters alone: its model at the start, and the merged model at the end.

`sft`, `preference_tuning` and `rlhf` share it (`lora`). Weights of the base are frozen, in 4 bits if `lora.quantize` is
set; the reference model of a preference loss or of RLHF is the base without adapters, on the same memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from corpus.model_folders.adapters import FOLDER, WEIGHTS, adapter_settings
from infra.errors import stage_error
from infra.run import Run
from training.config import LoraConfig
from training.distributed.parallel import whole_weights
from training.model.lora import add_adapters, learn_rows, learning_ids, load_adapters, merged, peft_adapters
from training.model.models import load
from training.model.nf4 import quantize_frozen

Network = TypeVar("Network", bound=nn.Module)
Adapters = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors and settings of adapters under PEFT's names, as `peft_adapters` returns them."""


@dataclass(frozen=True)
class Adapting:
    """Choice of the weights that the tuning `stage` learns: adapters by `lora`, or with None all weights.

    begin: prepares the rows of tokens that no text has trained, in every copy of the start alike.
    """

    stage: str
    lora: LoraConfig | None
    seed: int
    begin: Callable[[PreTrainedModel], object]

    @property
    def quantizes(self) -> bool:
        return self.lora is not None and self.lora.quantize is not None

    def load(self, folder: Path, run: Run) -> PreTrainedModel:
        """Load the model that training begins with, with linear layers in 4 bits if `lora.quantize` is set."""
        network = load(folder)
        if self.quantizes:
            quantized = quantize_frozen(network)
            run.event("quantized", f"{self.stage} holds {quantized:,} frozen weights in 4 bits (NF4)")
        return network

    def adapt(self, network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, run: Run) -> list[int]:
        """Prepare untrained rows and add adapters, if there are any; return the ids of the tokens whose rows learn."""
        ids = learning_ids(network, tokenizer, self.lora, self.stage) if self.lora else []
        self.begin(network)
        if self.lora:
            learning = add_adapters(network, self.lora, self.seed, self.stage)
            of_tokens = ""
            if in_rows := learn_rows(network, ids):
                names = ", ".join(tokenizer.convert_ids_to_tokens(ids[:8])) + (" and more" if len(ids) > 8 else "")
                of_tokens = f", and {in_rows:,} of the rows of {len(ids):,} tokens ({names})"
            message = f"{self.stage} learns {learning:,} weights of adapters next to frozen ones{of_tokens}"
            run.event("adapters", message)
        return ids

    def load_trained(self, start: Path, trained: Path, run: Run) -> PreTrainedModel:
        """Load the finished model to measure it: with weights in 4 bits the start with the adapters that are kept with
        the finished model."""
        if self.lora is None or not self.quantizes:
            return load(trained)
        network = self.load(start, run)
        settings = adapter_settings(trained)
        if settings is None:
            message = f"{trained} has no adapters, with which a model in 4 bits is measured"
            fix = f"build {self.stage} again with --force {self.stage}"
            raise stage_error("no_adapters", f"{self.stage}.lora.quantize", message, fix)
        self.begin(network)
        add_adapters(network, self.lora, self.seed, self.stage)
        load_adapters(network, load_file(trained / FOLDER / WEIGHTS), settings)
        return network

    def merge(
        self, tuned: PreTrainedModel, start: Path, ids: Sequence[int], start_share: float = 0.0
    ) -> tuple[PreTrainedModel, Adapters | None]:
        """Return the model in `start`, whole on every rank, with the changes that `tuned` learnt: its adapters and the
        rows `ids` of its tokens merged into their weights, and `start_share` of the way back. Return the adapters too;
        None without `lora`."""
        learnt = whole_weights(tuned)
        network = load(start)
        weights = merged(learnt, self.lora, ids, network.state_dict()) if self.lora else learnt
        before = {name: table.detach().clone() for name, table in _tables(network).items()}
        self.begin(network)
        network.load_state_dict(_with_start(weights, network.state_dict(), start_share))
        if self.lora is None:
            return network, None
        tables = {name: (before[name], table.detach()) for name, table in _tables(network).items()}
        return network, peft_adapters(learnt, self.lora, 1 - start_share, tables)


def sharing_frozen(network: Network) -> Network:
    """Return a copy of a network whose frozen weights and buffers are the same memory; only weights that learn are
    copied. Moving either to another device separates their buffers: place the network first."""
    shared: dict[int, Any] = {id(buffer): buffer for buffer in network.buffers()}
    shared |= {id(weight): weight for weight in network.parameters() if not weight.requires_grad}
    return copy.deepcopy(network, shared)


def _tables(network: PreTrainedModel) -> dict[str, Tensor]:
    """Return the rows of the tokens (V, D) by the name of their layer; tied output layers are left out."""
    layers = [layer for layer in (network.get_input_embeddings(), network.get_output_embeddings()) if layer is not None]
    names = {id(layer): name for name, layer in network.named_modules()}
    return {
        names[id(layer)]: layer.weight for layer in layers if layer is layers[0] or layer.weight is not layers[0].weight
    }


def _with_start(learnt: Mapping[str, Tensor], start: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
    """The weights that were learnt, moved by `share` of the way back to those that training began with."""
    return {name: torch.lerp(weight, start[name].to(weight), share) for name, weight in learnt.items()}
