"""Next-token prediction."""

from __future__ import annotations

from training.documents import Packed
from training.loaders import next_token_batch
from training.objectives.base import Objective
from training.train_state import Batch


class Causal(Objective):
    """Each token is predicted from those before it."""

    def batch(self, packed: Packed) -> Batch:
        return next_token_batch(packed.tokens, packed.starts if self.within_documents else None)
