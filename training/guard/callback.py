"""The Composer callback that watches a training and stops it at an alarm."""

from __future__ import annotations

import math
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist
from torch import Tensor

from training.clipping import GradientClip
from training.guard.config import GuardConfig
from training.guard.corrections import Alarm, Corrections
from training.guard.loss_scale import LossScale
from training.guard.watch import Watch

# A loss that moves by less than 1 % of itself, a norm by less than a tenth, is never a spike.
_LEAST_LOSS_SPREAD = 0.01
_LEAST_NORM_SPREAD = 0.1
# Gradient norms double often and harmlessly: with the default limit of 6 this asks for more than four times the usual.
_LEAST_GRADIENT_SPREAD = 0.25


class Alarmed(Exception):
    """Training went wrong at a batch; it is on whoever called `fit` to go back."""

    def __init__(self, alarm: Alarm) -> None:
        super().__init__(str(alarm))
        self.alarm = alarm


class Guard(Callback):
    """Raises `Alarmed` at the end of the batch that makes the alarm; passes over the batches of past corrections.

    Every rank sees the same figures, and so decides the same.
    """

    def __init__(
        self, config: GuardConfig, corrections: Corrections, clip: GradientClip, scale: LossScale | None = None
    ) -> None:
        self._config = config
        self._scale = scale
        self._corrections = corrections
        self._clip = clip
        window = config.window, config.window_least, config.limit
        self._loss = Watch("loss", *window, _LEAST_LOSS_SPREAD)
        self._gradient = Watch("gradient norm", *window, _LEAST_GRADIENT_SPREAD, logarithmic=True)
        self._activation = Watch("activation norm", *window, _LEAST_NORM_SPREAD, logarithmic=True)
        self._first_loss = math.nan
        self._row, self._row_began = 0, 0
        self._activations: list[Tensor] = []
        self.activation_norm = math.nan
        """Mean length of the last layer's activation vectors in the last batch."""

    def batch_start(self, state: State, logger: Logger) -> None:
        self._activations = []
        if self._corrections.skips(state.timestamp.batch.value):
            # One sequence goes through, so that no rank waits for another; its gradients are dropped.
            state.batch = _first_row(state.batch)

    def after_forward(self, state: State, logger: Logger) -> None:
        if isinstance(state.outputs, Tensor):
            with torch.no_grad():
                self._activations.append(torch.linalg.vector_norm(state.outputs.detach().float(), dim=-1).mean())

    def after_train_batch(self, state: State, logger: Logger) -> None:
        if self._corrections.skips(state.timestamp.batch.value):
            # AdamW passes over parameters without a gradient: neither moments nor decay move.
            for weight in state.model.parameters():
                weight.grad = None

    def batch_end(self, state: State, logger: Logger) -> None:
        batch = state.timestamp.batch.value - 1
        self.activation_norm = self._mean_of_ranks()
        if self._corrections.skips(batch):
            return
        loss = float(state.total_loss_dict["loss/train/total"])
        overflowed = self._scale.overflowed if self._scale else 0
        gradient = math.nan if overflowed else self._clip.norm
        figures = [(self._loss, loss), (self._gradient, gradient), (self._activation, self.activation_norm)]
        if math.isnan(self._first_loss):
            self._first_loss = loss
        cause = self._not_finite(figures) or self._suspicious(figures)
        if cause is None:
            self._row = 0
            for watch, value in figures:
                if math.isfinite(value):
                    watch.accept(value)
            return
        name, value, usual, at_once = cause
        if not self._row:
            self._row_began = batch - max(0, overflowed - 1)
        self._row += 1
        if at_once or self._row >= self._config.patience:
            raise Alarmed(Alarm(batch, self._row_began, name, value, usual))

    def _not_finite(self, figures: list[tuple[Watch, float]]) -> tuple[str, float, float, bool] | None:
        if self._scale is not None and self._scale.scale < self._config.least_loss_scale:
            return "loss scale", self._scale.scale, math.nan, True
        for watch, value in figures:
            # With a loss scale an infinite gradient is how the scale finds its size; the update is left out.
            if watch is self._gradient and self._scale is not None:
                continue
            if not math.isfinite(value) and not (watch is self._activation and not self._activations):
                return watch.name, value, watch.usual(), True
        return None

    def _suspicious(self, figures: list[tuple[Watch, float]]) -> tuple[str, float, float, bool] | None:
        loss = figures[0][1]
        if loss > self._config.divergence * self._first_loss:
            return "loss", loss, self._first_loss, False
        for watch, value in figures:
            if math.isfinite(value) and watch.suspicious(value):
                return watch.name, value, watch.usual(), False
        return None

    def _mean_of_ranks(self) -> float:
        if not self._activations:
            return math.nan
        mean = torch.stack(self._activations).mean()
        dist.all_reduce(mean)
        return float(mean) / dist.get_world_size()

    def state_dict(self) -> dict[str, Any]:
        watches = (self._loss, self._gradient, self._activation)
        return {
            "watches": [watch.state_dict() for watch in watches],
            "first_loss": self._first_loss,
            "row": [self._row, self._row_began],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for watch, saved in zip((self._loss, self._gradient, self._activation), state["watches"], strict=True):
            watch.load_state_dict(saved)
        self._first_loss = state["first_loss"]
        self._row, self._row_began = state["row"]


def _first_row(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: value[:1] for name, value in batch.items()}
    raise TypeError(f"expected a batch of named tensors, not {type(batch).__name__}")
