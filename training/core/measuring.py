"""Evaluation mode within a training, without a trace in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from evaluation.generation.random_state import kept_random_state


@contextmanager
def measuring(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradients, and random states that are put back afterwards."""
    was_training = model.training
    model.eval()
    try:
        with kept_random_state(next(model.parameters()).device), torch.no_grad():
            yield
    finally:
        model.train(was_training)
