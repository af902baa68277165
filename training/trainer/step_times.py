"""Records where the time of a training's steps goes: data, computation, compilation, checkpoints."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

from infra.ledger.energy import GpuEnergy
from infra.ledger.record import TimeRecord, furthest
from training.core.callbacks import Callback
from training.core.train_state import TrainState

FLUSH_S = 1.0
"""Steps within this time share a line of the record."""


class StepTimes(Callback):
    """Writes the seconds of batches to a record. It has to be the first of the callbacks.

    Before a batch it measures the wait for data; from there to the end of the batch the step, with validation and other
    callbacks; then the checkpoint. A data set that generates its data, as rounds of RLHF do, is part of the step.
    """

    def __init__(
        self,
        record: TimeRecord,
        key: str,
        device: torch.device,
        *,
        generates: bool,
        saved: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with nothing measured.

        Args:
            record: of the attempt.
            key: distinguishes this training from others of the same stage.
            device: of this rank.
            generates: True if reading a batch is computation.
            saved: returns the batch of the newest checkpoint.
            clock: returns seconds.
        """
        self._record, self._key, self._saved, self._clock = record, key, saved, clock
        self._data = "step" if generates else "data"
        self._furthest = furthest(record.path, key)
        on_gpu = device.type == "cuda" and hasattr(torch.cuda.get_device_properties(device), "uuid")
        self._energy = GpuEnergy(str(torch.cuda.get_device_properties(device).uuid)) if on_gpu else None
        self._joules: tuple[float, float] | None = None
        self._reset(0, 0)
        self._saved_before = 0
        self._phase, self._since, self._flushed = "", clock(), clock()
        self._compiled = compiled_s()

    def begin(self, batch: int, token: int) -> None:
        """Start the loop after this batch, also when a training goes back or continues."""
        self._reset(batch, token)
        self._phase = ""
        self._flushed = self._clock()
        self._compiled = compiled_s()
        self._saved_before = self._saved()
        self._record.write("loop", key=self._key, batch=batch, token=token)
        self._measure()

    def before_dataloader(self, state: TrainState) -> None:
        self._enter(self._data)
        is_due = self._since - self._flushed >= FLUSH_S or self._saved() != self._saved_before
        if is_due or self._first <= self._furthest < self._batch:
            self.flush()

    def after_dataloader(self, state: TrainState) -> None:
        self._enter("step")

    def batch_checkpoint(self, state: TrainState) -> None:
        self._batch, self._token = state.clock.batch, state.clock.token
        self._enter("checkpoint")

    def flush(self) -> None:
        """Write a line about all batches since the last one."""
        if self._batch <= self._first:
            return
        compiled, self._compiled = compiled_s() - self._compiled, compiled_s()
        seconds = dict(self._seconds)
        compiled = min(max(0.0, compiled), seconds.get("step", 0.0))
        if compiled:
            seconds["step"] -= compiled
            seconds["compile"] = compiled
        self._record.write(
            "spent",
            key=self._key,
            **{"from": self._first, "to": self._batch},
            saved=self._saved(),
            token=self._token,
            tokens=self._token - self._first_token,
            seconds={name: round(value, 4) for name, value in seconds.items()},
            **self._measure(),
        )
        self._reset(self._batch, self._token)
        self._flushed, self._saved_before = self._clock(), self._saved()

    def end(self) -> None:
        """Write the rest once the loop is over, or was broken off."""
        self._enter("")
        self.flush()

    def _reset(self, batch: int, token: int) -> None:
        self._first = self._batch = batch
        self._first_token = self._token = token
        self._seconds: dict[str, float] = {}

    def _enter(self, phase: str) -> None:
        now = self._clock()
        if self._phase:
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now

    def _measure(self) -> dict[str, float]:
        """Return the energy of this GPU since the last call, and the seconds since; empty if it is not measured."""
        joules = self._energy.joules() if self._energy else None
        if joules is None:
            return {}
        before, self._joules = self._joules, (joules, self._clock())
        if before is None:
            return {}
        return {"joules": round(joules - before[0], 3), "joules_s": round(self._joules[1] - before[1], 3)}


def compiled_s() -> float:
    """Seconds that torch.compile has taken in this process; 0 if it was not used."""
    module = sys.modules.get("torch._dynamo.utils")
    metrics = getattr(module, "compilation_time_metrics", {})
    return sum(metrics.get("_compile.compile_inner") or metrics.get("entire_frame_compile") or ())
