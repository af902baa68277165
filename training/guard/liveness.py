"""Signs of life of a rank for its launcher, and the finding of ranks that are slower than the others."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from infra.launch.heartbeat import Heartbeat
from infra.run import Run
from training.core import ranks
from training.core.callbacks import Callback, Event
from training.core.train_state import Trainable, TrainState
from training.model.blocks import blocks

_PHASES = {
    Event.BEFORE_DATALOADER: "data loading",
    Event.BEFORE_FORWARD: "forward pass",
    Event.BEFORE_BACKWARD: "backward pass",
    Event.AFTER_TRAIN_BATCH: "optimizer step",
    Event.BATCH_END: "between batches",
    Event.FIT_END: "not watched",
}
# Number of batches between comparisons of the ranks' arrival times, by a collective of a few hundred numbers.
_COMPARE_EVERY = 20
# A rank that makes a batch longer by this share, twice in a row, is named.
_SLOW_SHARE = 0.2


class SignsOfLife(Callback):
    """Write a heartbeat at each phase of a batch."""

    def __init__(self) -> None:
        self._heart = Heartbeat(ranks.rank())

    def run_event(self, event: Event, state: TrainState) -> None:
        if phase := _PHASES.get(event):
            self._heart.beat(state.clock.batch, phase)


class SlowRanks(Callback):
    """Report ranks that the others wait for.

    Ranks that compute together all take as long as the slowest one, so batch times are not informative. Late arrivals
    of a rank at each layer of a forward pass are: under FSDP and with shared experts the others wait there, under DDP
    they are ahead.
    """

    def __init__(self, model: Trainable, run: Run) -> None:
        self._run = run
        self._arrivals: list[float] = []
        self._watching = False
        self._began = 0.0
        self._suspects: set[int] = set()
        if (isinstance(model, FSDPModule) or model.experts) and ranks.world_size() > 1:
            for block in blocks(model):
                # Before FSDP's own hook, which waits for the other ranks.
                block.register_forward_pre_hook(self._arrive, prepend=True)

    @torch.compiler.disable
    def _arrive(self, *_: Any) -> None:
        if self._watching:
            self._arrivals.append(time.time())

    def batch_start(self, state: TrainState) -> None:
        self._began = time.time()
        # Stages of a pipeline compute one behind the other: each comes late, and each time by as much.
        several = ranks.world_size() > 1 and ranks.pipeline_parallel() == 1
        self._watching = several and state.clock.batch % _COMPARE_EVERY == _COMPARE_EVERY - 1
        self._arrivals = []

    def before_forward(self, state: TrainState) -> None:
        self._arrive()

    def before_backward(self, state: TrainState) -> None:
        self._arrive()
        self._watching = False  # later microbatches, and layers that are computed again

    def batch_end(self, state: TrainState) -> None:
        if not self._arrivals:
            return
        everyone = ranks.gather((self._arrivals, time.time() - self._began))
        self._arrivals = []
        lags = lateness([arrivals for arrivals, _ in everyone])
        seconds = statistics.median(seconds for _, seconds in everyone)
        slow = {rank for rank, lag in enumerate(lags) if lag > _SLOW_SHARE * seconds}
        for rank in sorted(slow & self._suspects):
            self._run.event(
                "slow_rank",
                f"rank {rank} is slow: the others wait {lags[rank]:.2f} s of each {seconds:.2f} s batch for it",
                rank=rank,
            )
        # Each is named once, at its second time in a row.
        self._suspects = slow - self._suspects


def lateness(arrivals: Sequence[Sequence[float]]) -> list[float]:
    """Seconds by which each rank fell behind the median rank, from the times (ranks, points) at which they reached the
    same points.

    Only time lost between one point and the next counts: a constant lag is counted once, and so is a lag for which the
    others wait. Clocks of different machines need not agree.
    """
    usual = [statistics.median_low(moments) for moments in zip(*arrivals, strict=True)]
    lags = []
    for moments in arrivals:
        late = [moment - middle for moment, middle in zip(moments, usual, strict=True)]
        lags.append(sum(max(0.0, now - before) for before, now in pairwise(late)))
    return lags
