"""Failure rate of a number of machines, and the best interval between checkpoints (Young 1974; Daly 2006)."""

from __future__ import annotations

import math
from dataclasses import dataclass

DEVICE_HOURS = 45_000.0
"""Hours of one device between failures: 16,384 H100 had 419 in 54 days (Llama 3, section 3.3.4), which makes 50,700,
and OPT's 992 A100 35 manual restarts in two months, which makes 40,800. The geometric mean."""
RESTART_S = 600.0
"""Seconds from a failure until the training computes again: another node, new processes, a checkpoint is read."""
_WRITES = 2e9
"""Bytes/s that a node writes to shared storage."""
_BYTES = 12
"""Bytes of a checkpoint per parameter: weights and AdamW's two moments in fp32."""


@dataclass(frozen=True)
class Failures:
    """between_h: mean hours between failures of the whole. write_s: to write a checkpoint. every_s: seconds of training
    between two that lose the least. lost: share of the time that goes to writing, repeated work and restarts. expected:
    failures during the training."""

    between_h: float
    write_s: float
    every_s: float
    lost: float
    expected: float


def failures(parameters: float, devices: int, node: int, hours: float) -> Failures:
    """Estimate the failures of a training of `hours` hours.

    Args:
        node: devices per node; each node writes its part of a checkpoint.
    """
    between_s = DEVICE_HOURS / devices * 3600
    write_s = max(1.0, _BYTES * parameters / (_WRITES * max(1.0, devices / node)))
    every_s = best_interval(write_s, between_s)
    lost = write_s / every_s + (every_s / 2 + RESTART_S) / between_s
    return Failures(between_s / 3600, write_s, every_s, min(lost, 0.99), hours * 3600 / between_s)


def best_interval(write_s: float, between_s: float) -> float:
    """Seconds of computing between checkpoints (Daly 2006, equation 37): Young's √(2 δ M) with higher orders."""
    if write_s >= 2 * between_s:
        return between_s
    ratio = write_s / (2 * between_s)
    return math.sqrt(2 * write_s * between_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - write_s
