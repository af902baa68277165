"""Next-token prediction, of a whole document or of what follows a prefix that is seen at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from training.core.train_state import Batch
from training.model.documents import Packed, Starts, Tokens, document_numbers, positions_within
from training.model.loss import IGNORE
from training.objectives.base import Objective


def next_token_batch(tokens: Tokens, starts: Sequence[Starts] | None = None) -> Batch:
    """Sequences (B, T) as a batch: each position's label is the token after it, the last one's -100.

    starts: where the documents of each sequence begin; with them, attention and positions keep to documents.
    """
    ids = torch.from_numpy(tokens)
    labels = torch.full_like(ids, IGNORE)
    labels[:, :-1] = ids[:, 1:]
    if starts is None:
        return {"input_ids": ids, "labels": labels}
    documents = document_numbers(starts, ids.shape[1])
    return {
        "input_ids": ids,
        "labels": labels,
        "documents": documents,
        "position_ids": positions_within(documents),
    }


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
