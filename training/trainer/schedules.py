"""The learning rate as a function of the batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from training.config import ScheduleConfig, batches
from training.config.batch_size import BatchSizeRampup
from training.core.callbacks import Callback
from training.core.train_state import TrainState


@dataclass(frozen=True)
class LearningRateSchedule:
    """The learning rate of each batch as a share of the peak.

    total: batches of the training; warmup: batches of the linear rise; decay: batches of the decay at the end of wsd.
    """

    config: ScheduleConfig
    total: int
    warmup: int
    decay: int

    @classmethod
    def of(
        cls,
        config: ScheduleConfig,
        total: int,
        batch_tokens: int,
        epoch_batches: int,
        rampup: BatchSizeRampup | None = None,
    ) -> LearningRateSchedule:
        """Convert the lengths of a config to batches, at most those of the training; wsd's decay has full batches."""
        scale: dict[str, Any] = {"batch_tokens": batch_tokens, "epoch_batches": epoch_batches, "whole": total}
        warmup, decay = batches(config.warmup, **scale, rampup=rampup), batches(config.decay_length, **scale)
        return cls(config, total, min(total, warmup), min(total, decay))

    def lr_multiplier(self, batch: int) -> float:
        """Factor on the peak learning rate at batch 0, 1, …

        Warm-up rises in equal steps to 1 at batch `warmup` - 1. cosine and linear decay towards `final_share`;
        inverse_sqrt is sqrt(warmup / batch) (Vaswani et al. 2017, section 5.3), no lower than `final_share`; wsd stays
        at 1 and decays over the last `decay` batches as 1 - sqrt (Hägele et al. 2024, section 3).

        A decay starts at 1 in its first batch and would reach `final_share` in the batch after the last, so that no
        batch is computed at a rate of 0 (as in transformers, torchtitan and nanochat).
        """
        if batch < self.warmup:
            return (batch + 1) / self.warmup
        final = self.config.final_share
        done = min(1.0, (batch - self.warmup) / max(1, self.total - self.warmup))
        match self.config.decay:
            case "constant":
                return 1.0
            case "inverse_sqrt":
                return max(final, math.sqrt(self.warmup / (batch + 1)))
            case "cosine":
                return final + (1 - final) * (1 + math.cos(math.pi * done)) / 2
            case "linear":
                return final + (1 - final) * (1 - done)
            case "wsd":
                fallen = min(1.0, max(0, batch - (self.total - self.decay)) / self.decay)
                return final + (1 - final) * (1 - math.sqrt(fallen))


class LearningRate(Callback):
    """Set each batch's learning rate before the batch: Composer's schedulers step one batch late.

    optimizer: its groups have their peak rate as `lr`, which this multiplies by the group's `scale`, the schedule and
        `corrected`, an additional factor on a batch's rate.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        schedule: LearningRateSchedule,
        corrected: Callable[[int], float],
    ) -> None:
        self._peaks = [float(group["lr"]) for group in optimizer.param_groups]
        self._schedule = schedule
        self._corrected = corrected

    def batch_start(self, state: TrainState) -> None:
        batch = state.clock.batch
        multiplier = self._schedule.lr_multiplier(batch) * self._corrected(batch)
        for group, peak in zip(state.optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = multiplier * group["scale"] * peak
