"""Batch-size warm-up: number of examples per batch, and number of batches in a length of training."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate

from training.config.duration import Duration


@dataclass(frozen=True)
class BatchSizeRampup:
    """Batches that grow from `first` to `full` examples in equal steps of `first`, each over as many examples.

    So Megatron-LM's `--rampup-batch-size` counts; GPT-3 grew its batches linearly from 32k tokens (section 2.3).

    full: a multiple of `first`.
    over: examples during which batches are smaller than `full`, all within the first epoch.
    epoch: examples of an epoch, a multiple of `full`.
    """

    first: int
    full: int
    over: int
    epoch: int

    def size(self, seen: int) -> int:
        """Examples of the batch that comes after `seen` examples."""
        steps = self.full // self.first - 1
        return min(self.full, self.first * (1 + seen * steps // self.over))

    def examples(self, batches: int) -> int:
        """Return the number of examples in the first N batches."""
        if batches < len(self._seen):
            return self._seen[batches]
        return self._seen[-1] + (batches - len(self._seen) + 1) * self.full

    def place(self, batches: int) -> int:
        """Return the position in the data, epoch after epoch, after the first N batches: the first epoch leaves out the
        incomplete batch at its end."""
        more = batches - self._in_first
        return self.examples(batches) if more <= 0 else self.epoch + more * self.full

    def batches(self, examples: float | Fraction) -> int:
        """Return the least number of batches, from the first one on, that contain this number of examples."""
        if examples <= self._seen[-1]:
            return bisect_left(self._seen, examples)
        return len(self._seen) - 1 + math.ceil((examples - self._seen[-1]) / self.full)

    def length(self, duration: Duration, batch_tokens: int) -> int:
        """A length in tokens or epochs in batches, rounded up.

        Args:
            batch_tokens: of a full batch.
        """
        if duration.unit == "tokens":
            return self.batches(-(-int(duration.value) * self.full // batch_tokens))
        if duration.value <= 1:
            return min(self._in_first, self.batches(duration.exact * self.epoch))
        return self._in_first + math.ceil((duration.exact - 1) * (self.epoch // self.full))

    @property
    def _in_first(self) -> int:
        """Batches of the first epoch; what fills no whole one at its end is left out."""
        return len(self._seen) - 1 + (self.epoch - self._seen[-1]) // self.full

    @cached_property
    def _seen(self) -> list[int]:
        """Examples before each batch, up to the first full one."""
        sizes = []
        seen = 0
        while (size := self.size(seen)) < self.full:
            sizes.append(size)
            seen += size
        return list(accumulate(sizes, initial=0))
