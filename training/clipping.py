"""Gradient clipping by the global norm, and the norm before it for whoever watches."""

from __future__ import annotations

from composer.core import Callback, State
from composer.loggers import Logger

from training.parallel import gradient_norm


class GradientClip(Callback):
    """Scales all gradients of a batch so that their global norm is at most `limit` (Pascanu et al. 2013)."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self.norm = 0.0

    def after_train_batch(self, state: State, logger: Logger) -> None:
        self.norm = gradient_norm(state.model, self._limit)
