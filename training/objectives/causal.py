"""Next-token prediction, of a whole document or of what follows a prefix that is seen at once."""

from __future__ import annotations

import numpy as np
import torch

from training.core.train_state import Batch
from training.data.loaders import next_token_batch
from training.model.documents import Packed
from training.model.loss import IGNORE
from training.objectives.base import Objective


class Causal(Objective):
    """Each token is predicted from those before it."""

    def batch(self, packed: Packed) -> Batch:
        return next_token_batch(packed.tokens, packed.starts if self.within_documents else None)


class Prefix(Objective):
    """Each document is cut at a random place: what comes before sees itself in both directions and bears no loss, the
    rest is predicted from left to right (Raffel et al. 2020, section 3.2.1; Wang et al. 2022).

    A prefix has at least one token and at most its document's, of which each length is as likely.
    """

    def batch(self, packed: Packed) -> Batch:
        documents = self._documents(packed)
        lengths = np.zeros(packed.tokens.shape, np.int64)
        for row, numbers, generator in zip(lengths, documents.numpy(), self._generators(packed), strict=True):
            sizes = np.bincount(numbers)
            row[:] = generator.integers(1, sizes + 1)[numbers]
        prefix = torch.from_numpy(lengths)
        batch = next_token_batch(packed.tokens) | self._attention(packed)
        positions = batch["position_ids"]
        batch["seen_by_all"] = positions < prefix
        # The prefix's last token predicts the first one of the rest.
        batch["labels"] = batch["labels"].masked_fill(positions < prefix - 1, IGNORE)
        return batch
