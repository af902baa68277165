"""Length of a training in batches, tokens and epochs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from training.config import DistillConfig, PreferenceTuningConfig, RewardModelConfig, SftConfig, batches
from training.config.batch_size import BatchSizeRampup


@dataclass(frozen=True)
class Plan:
    """Length of one training.

    batches: optimizer steps in total.
    batch_size: examples per step, over all ranks.
    batch_tokens: tokens per step (approximate if examples differ in length).
    epoch_batches: batches of one pass over the data.
    flops_per_token: FLOPs of a training step per token, for MFU; 0 if unknown.
    rampup: schedule of smaller batches at the start; `batch_size` and `batch_tokens` refer to full batches.
    """

    batches: int
    batch_size: int
    batch_tokens: int
    epoch_batches: int
    flops_per_token: float = 0.0
    rampup: BatchSizeRampup | None = None

    @property
    def smallest_batch(self) -> int:
        """Examples of the first batch."""
        return self.rampup.first if self.rampup else self.batch_size

    def examples(self, batches: int) -> int:
        """Examples in the first `batches` batches together."""
        return self.rampup.examples(batches) if self.rampup else batches * self.batch_size

    def to_batches(self, length: str) -> int:
        """A length from a config, such as `2000 tokens` or `1 epochs`, in full batches."""
        return batches(length, batch_tokens=self.batch_tokens, epoch_batches=self.epoch_batches)

    def place(self, batches: int) -> int:
        """Position in the data after the first `batches` batches, epoch after epoch."""
        return self.rampup.place(batches) if self.rampup else batches * self.batch_size


def plan_of(
    config: SftConfig | RewardModelConfig | PreferenceTuningConfig | DistillConfig,
    batch_size: int,
    tokens: Sequence[int],
    epoch_batches: int,
) -> tuple[Plan, int]:
    """Return the length of a training on examples with `tokens` tokens each, and its batches between evaluations."""
    batch_tokens = round(batch_size * float(np.mean(tokens)))
    length = batches(config.duration, batch_tokens=batch_tokens, epoch_batches=epoch_batches)
    every = batches(config.evaluate_every, batch_tokens=batch_tokens, epoch_batches=epoch_batches, whole=length)
    return Plan(length, batch_size, batch_tokens, epoch_batches), every
