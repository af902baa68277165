"""Measuring a language model on held-out text without touching the training's random state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from composer.core import Callback, State
from composer.loggers import Logger
from numpy.typing import NDArray
from torch import nn

from infra.run import Run
from training.loaders import Tokens, next_token_batch
from training.models import LanguageModel

_BATCH = 16


@contextmanager
def measuring(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradients, and random states that are put back afterwards."""
    was_training = model.training
    model.eval()
    try:
        with torch.random.fork_rng(), torch.no_grad():
            yield
    finally:
        model.train(was_training)


def sequence_losses(model: LanguageModel, sequences: Tokens, run: Run | None = None) -> NDArray[np.float64]:
    """Summed cross-entropy in nats of each packed sequence (sequences,), over its T - 1 predicted tokens."""
    device = next(model.parameters()).device
    sums = []
    with measuring(model):
        for start in range(0, len(sequences), _BATCH):
            batch = {
                name: value.to(device) for name, value in next_token_batch(sequences[start : start + _BATCH]).items()
            }
            sums.append(model.losses(batch).double().sum(1).cpu().numpy())
            if run is not None:
                run.stop_if_cancelled()
                run.progress(min(start + _BATCH, len(sequences)), len(sequences), "sequences", "validating")
    return np.concatenate(sums)


class Validation(Callback):
    """Measures the loss on a fixed part of the validation text every so many batches."""

    def __init__(self, model: LanguageModel, sequences: Tokens, every: int, run: Run) -> None:
        self._model = model
        self._sequences = sequences
        self._every = every
        self._run = run

    def batch_end(self, state: State, logger: Logger) -> None:
        batch = state.timestamp.batch.value
        if batch % self._every == 0:
            losses = sequence_losses(self._model, self._sequences)
            tokens = len(self._sequences) * (self._sequences.shape[1] - 1)
            self._run.metrics({"validation/loss": float(losses.sum() / tokens)}, batch)

    def state_dict(self) -> dict[str, Any]:
        return {}
