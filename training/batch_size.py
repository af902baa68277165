"""Batch-size warm-up: how many examples each batch has, and how many batches a length of training comes to."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate

from training.duration import Duration


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
        """Examples of the first so many batches together."""
        if batches < len(self._seen):
            return self._seen[batches]
        return self._seen[-1] + (batches - len(self._seen) + 1) * self.full

    def batches(self, examples: float | Fraction) -> int:
        """The least number of batches from the first one on that have so many examples."""
        if examples <= self._seen[-1]:
            return bisect_left(self._seen, examples)
        return len(self._seen) - 1 + math.ceil((examples - self._seen[-1]) / self.full)

    def length(self, duration: Duration, batch_tokens: int) -> int:
        """A length in tokens or epochs in batches, rounded up. batch_tokens: of a full batch."""
        if duration.unit == "tokens":
            return self.batches(-(-int(duration.value) * self.full // batch_tokens))
        # What fills no whole batch at the end of the first epoch is left out.
        in_first = len(self._seen) - 1 + (self.epoch - self._seen[-1]) // self.full
        if duration.value <= 1:
            return min(in_first, self.batches(duration.exact * self.epoch))
        return in_first + math.ceil((duration.exact - 1) * (self.epoch // self.full))

    @cached_property
    def _seen(self) -> list[int]:
        """Examples before each batch, up to the first full one."""
        sizes = []
        seen = 0
        while (size := self.size(seen)) < self.full:
            sizes.append(size)
            seen += size
        return list(accumulate(sizes, initial=0))
