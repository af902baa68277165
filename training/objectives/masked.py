"""Masked language modelling (Devlin et al. 2018, section 3.1): hidden tokens are predicted from both sides."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from transformers import AutoModelForMaskedLM, PreTrainedTokenizerBase

from training.core.train_state import Batch
from training.model.documents import Packed, Tokens
from training.model.loss import IGNORE
from training.objectives.base import Objective

MASK = "<|mask|>"
_HIDDEN = 0.15
# Shares of the hidden tokens that are replaced by the mask and by a random token; the rest is unchanged.
_MASKED, _RANDOM = 0.8, 0.1


class Masked(Objective):
    """15 % of a sequence's tokens are to be predicted; 80 % of them are masked, 10 % random, 10 % themselves.

    Special tokens are neither hidden nor drawn. A tokenizer without a mask token gets `<|mask|>` as its last id.
    """

    auto: ClassVar = AutoModelForMaskedLM
    continues_text: ClassVar = False
    extends_tokenizer: ClassVar = True

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int, *, within_documents: bool) -> None:
        super().__init__(seed, within_documents=within_documents)
        if tokenizer.mask_token is None:
            tokenizer.add_special_tokens({"mask_token": MASK})
        self.mask_id = int(tokenizer.mask_token_id)
        self._special = np.array(tokenizer.all_special_ids)
        self._words = np.setdiff1d(np.arange(len(tokenizer)), self._special)

    def batch(self, packed: Packed) -> Batch:
        inputs, labels = packed.tokens.copy(), np.full_like(packed.tokens, IGNORE)
        for row, target, generator in zip(inputs, labels, self._generators(packed), strict=True):
            hidden = self._hidden(row, generator)
            target[hidden] = row[hidden]
            row[hidden] = self._shown(row[hidden], generator)
        return {
            "input_ids": torch.from_numpy(inputs),
            "labels": torch.from_numpy(labels),
            **self._attention(packed),
        }

    def _hidden(self, tokens: Tokens, generator: np.random.Generator) -> Tokens:
        words = np.flatnonzero(~np.isin(tokens, self._special))
        return generator.permutation(words)[: max(1, round(_HIDDEN * len(words)))]

    def _shown(self, tokens: Tokens, generator: np.random.Generator) -> Tokens:
        """Draw the replacements of the hidden tokens."""
        chance = generator.random(len(tokens))
        others = generator.choice(self._words, len(tokens))
        return np.where(chance < _MASKED, self.mask_id, np.where(chance < _MASKED + _RANDOM, others, tokens))
