"""Attention within documents in a T5, whose encoder in transformers takes a mask for padding alone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from training.documents import additive, same_document, within_documents


class EncoderDecoderMasks:
    """Gives the encoder's attention, the decoder's own and that from decoder to encoder the masks of the batch at hand.

    Each goes to its layers by a hook, so that the model, its export and its recomputation stay those of transformers.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._masks: dict[str, Tensor] = {}
        for block in model.encoder.block:
            self._hook(block.layer[0], "encoder")
        for block in model.decoder.block:
            self._hook(block.layer[0], "decoder")
            self._hook(block.layer[1], "across")

    def set(self, batch: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        """Takes the masks of `documents (B, T)` and `decoder_documents (B, S)`; none where the batch has no such."""
        self._masks = {}
        if "documents" in batch:
            read, written = batch["documents"], batch["decoder_documents"]
            masks = {
                "encoder": same_document(read, read),
                "decoder": within_documents(written),
                "across": same_document(written, read),
            }
            self._masks = {name: additive(mask, dtype) for name, mask in masks.items()}

    def _hook(self, layer: nn.Module, name: str) -> None:
        layer.register_forward_pre_hook(partial(self._give, name), with_kwargs=True)

    def _give(
        self, name: str, layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        return (given, {**named, "attention_mask": self._masks[name]}) if name in self._masks else None
