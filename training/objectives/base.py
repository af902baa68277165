"""Base class of objectives, which turn packed sequences into a batch with labels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from training.core.train_state import Batch, TokenCount
from training.model.documents import Packed, document_numbers, positions_within
from training.model.loss import count_tokens


class Objective(ABC):
    """Converter of packed sequences into inputs, labels and attention.

    Random draws depend only on the seed, the epoch and the number of the sequence: a batch is the same after a resume,
    and on any number of ranks and loader workers.

    auto: the transformers class that builds and loads its models.
    continues_text: True if its models are used as causal ones.
    extends_tokenizer: True if its tokenizer has more tokens than the tokenizer of the shards.
    """

    auto: ClassVar[Any] = AutoModelForCausalLM
    continues_text: ClassVar[bool] = True
    extends_tokenizer: ClassVar[bool] = False

    def __init__(self, seed: int, *, within_documents: bool) -> None:
        self._seed = seed
        self.within_documents = within_documents

    @abstractmethod
    def batch(self, packed: Packed) -> Batch:
        """Tensors of B sequences for training.train_modules.language_model.LanguageModel, `labels` among them."""

    def count(self, batch: Any) -> TokenCount:
        """Count all tokens of a batch, and those with a loss."""
        return count_tokens(batch)

    def _generators(self, packed: Packed) -> list[np.random.Generator]:
        """Return one generator per sequence for all of its draws."""
        return [np.random.default_rng([self._seed, epoch, number]) for epoch, number in packed.draws]

    def _documents(self, packed: Packed) -> Tensor:
        """The number of each token's document (B, T); one for a whole sequence where attention does not stop."""
        if self.within_documents:
            return document_numbers(packed.starts, packed.tokens.shape[1])
        return torch.zeros(packed.tokens.shape, dtype=torch.int32)

    def _attention(self, packed: Packed, seen_by_all: Tensor | None = None) -> Batch:
        """Documents and positions of a batch.

        Args:
            seen_by_all: tokens that every token of their document sees (B, T), also those before; by default all.
        """
        documents = self._documents(packed)
        if seen_by_all is None:
            seen_by_all = torch.ones(documents.shape, dtype=torch.bool)
        return {
            "documents": documents,
            "position_ids": positions_within(documents),
            "seen_by_all": seen_by_all,
        }
