"""Evaluation mode within a training, without side effects on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from evaluation.generation.random_state import kept_random_state


@contextmanager
def measuring(model: nn.Module) -> Iterator[None]:
    """Evaluate without gradients; restore random states and the mode afterwards."""
    was_training = model.training
    model.eval()
    try:
        with kept_random_state(next(model.parameters()).device), torch.no_grad():
            yield
    finally:
        model.train(was_training)
