"""What a training tells of every batch."""

from __future__ import annotations

import time

from infra.run import Run
from training.activations import ActivationNorm
from training.callbacks import Callback
from training.clipping import GradientClip
from training.guard.corrections import Corrections
from training.guard.loss_scale import LossScale
from training.throughput import Throughput, clock_time
from training.train_state import TrainState

_SAY_EVERY_S = 0.5


class MetricsLogger(Callback):
    """Tells metrics and progress. clip, activations and scale come before it.

    last: batches of the whole training.
    grows: whether batches differ in size.
    """

    def __init__(
        self,
        last: int,
        throughput: Throughput,
        clip: GradientClip,
        activations: ActivationNorm,
        scale: LossScale | None,
        corrections: Corrections,
        run: Run,
        *,
        grows: bool = False,
    ) -> None:
        self._last = last
        self._grows = grows
        self._throughput = throughput
        self._clip = clip
        self._activations = activations
        self._scale = scale
        self._corrections = corrections
        self._run = run
        self._said = 0.0
        self._learning_rate = 0.0

    def batch_start(self, state: TrainState) -> None:
        self._learning_rate = float(state.optimizer.param_groups[0]["lr"])

    def batch_end(self, state: TrainState) -> None:
        batch, now = state.clock.batch, time.monotonic()
        self._throughput.mark(batch, state.clock.token)
        made = self._corrections.before(batch)
        corrected = {"guard/corrections": float(made)} if made else {}
        if self._corrections.skips(batch - 1):
            self._run.metrics({"guard/skipped": 1.0, **corrected}, batch)
            return
        loss = state.losses["total"]
        values = {"train/loss": loss, "train/lr": self._learning_rate, "train/grad_norm": self._clip.norm}
        values |= {f"train/grad_norm_{name}": norm for name, norm in self._clip.norms.items()}
        if self._activations.norm is not None:
            values["train/activation_norm"] = self._activations.norm
        if self._scale is not None:
            values["train/loss_scale"] = self._scale.scale
        if self._grows:
            values["train/batch_tokens"] = float(state.batch_tokens)
        values |= self._throughput.values() | corrected
        self._run.metrics(values, batch)
        if now - self._said > _SAY_EVERY_S or batch == self._last:
            self._said = now
            note = f"loss {loss:.3f}"
            if speed := values.get("train/tokens_per_s"):
                note += f", {speed:,.0f} tokens/s, {clock_time(self._throughput.left_s())} left"
            self._run.progress(batch, self._last, "batches", note)
