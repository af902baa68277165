"""Metrics of every batch of a training: loss, norms, learning rate and speed (tokens per second, model FLOPs
utilisation, memory, remaining time).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import cache

import psutil
import torch

from infra.run import Run
from training.core.callbacks import Callback
from training.core.train_state import TrainState
from training.guard.corrections import Corrections
from training.guard.loss_scale import LossScale
from training.guard.norms import ActivationNorm, GradientClip

_WINDOW_S = 20.0


class Throughput:
    """Track time and token count from batch to batch.

    The first batch is excluded, since it includes warm-up and compilation. Live values cover the last 20 seconds,
    evaluation and checkpoints included; `mean` covers everything since the first batch.

    batches: batches of the whole training.
    flops_per_token: FLOPs of a training step per token (training.model.models.flops_per_token); 0 if unknown.
    peak_flops: FLOP/s of all devices together; None if unknown.
    work: amount of work in the first N batches, from which the remaining time is estimated.
    """

    def __init__(
        self,
        batches: int,
        flops_per_token: float,
        peak_flops: float | None,
        clock: Callable[[], float] = time.monotonic,
        work: Callable[[int], int] = int,
    ) -> None:
        self._batches = batches
        self._flops_per_token = flops_per_token
        self._peak_flops = peak_flops
        self._clock = clock
        self._work = work
        self._first: tuple[float, int, int] | None = None
        self._recent: deque[tuple[float, int, int]] = deque()

    def restart(self) -> None:
        """Discard all measurements, before a training goes back to an earlier batch."""
        self._first = None
        self._recent.clear()

    def mark(self, batch: int, tokens: int) -> None:
        """Record the end of batch number `batch` (from 1), after `tokens` tokens in total."""
        now = (self._clock(), batch, tokens)
        if self._first is None:
            self._first = now
        self._recent.append(now)
        while len(self._recent) > 2 and now[0] - self._recent[1][0] >= _WINDOW_S:
            self._recent.popleft()

    def values(self) -> dict[str, float]:
        """Current metrics: train/tokens_per_s, train/tflops, train/mfu, train/time_left_s, train/memory_gb."""
        values = {"train/memory_gb": memory_bytes() / 1e9}
        if len(self._recent) > 1:
            speed = _rate(self._recent[0], self._recent[-1])
            values |= {"train/tokens_per_s": speed, "train/time_left_s": self.left_s()}
            if self._flops_per_token:
                values["train/tflops"] = speed * self._flops_per_token / 1e12
            if (mfu := self.mfu(speed)) is not None:
                values["train/mfu"] = mfu
        return values

    def left_s(self) -> float:
        """Seconds until the end of the last batch, at the speed of recent batches; 0 while unknown."""
        if len(self._recent) < 2:
            return 0.0
        (began, first, _), (now, batch, _) = self._recent[0], self._recent[-1]
        done, left = self._work(batch) - self._work(first), self._work(self._batches) - self._work(batch)
        return (now - began) / done * max(0, left)

    def mean(self) -> float:
        """Tokens per second since the first batch; 0 if there was no other."""
        if self._first is None or self._first is self._recent[-1]:
            return 0.0
        return _rate(self._first, self._recent[-1])

    def step_s(self) -> float:
        """Seconds per batch since the first one; 0 if there was no other."""
        if self._first is None or self._first is self._recent[-1]:
            return 0.0
        (began, first, _), (now, batch, _) = self._first, self._recent[-1]
        return (now - began) / (batch - first)

    def mfu(self, tokens_per_s: float) -> float | None:
        """Model FLOPs utilisation (PaLM, appendix B) at this speed; None if peak or model FLOPs are unknown."""
        if self._peak_flops is None or not self._flops_per_token:
            return None
        return tokens_per_s * self._flops_per_token / self._peak_flops


def _rate(earlier: tuple[float, int, int], other: tuple[float, int, int]) -> float:
    return (other[2] - earlier[2]) / max(other[0] - earlier[0], 1e-9)


def memory_bytes() -> int:
    """Memory of the process: peak memory of tensors on its GPU, or resident memory if it uses no GPU."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return int(_this_process().memory_info().rss)


@cache
def _this_process() -> psutil.Process:
    return psutil.Process()


def clock_time(seconds: float) -> str:
    """Format a duration as `50 s`, `12 min` or `3 h 20 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


_SAY_EVERY_S = 0.5


class MetricsLogger(Callback):
    """Report metrics and progress. clip, activations and scale must be called before it.

    last: batches of the whole training.
    grows: True if batches differ in size.
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
        self._rates: dict[str, float] = {}

    def batch_start(self, state: TrainState) -> None:
        # The first group of each optimizer: matrices, if they have a separate rate.
        self._rates = {
            "train/lr_muon" if "muon" in group else "train/lr": float(group["lr"])
            for group in reversed(state.optimizer.param_groups)
        }

    def batch_end(self, state: TrainState) -> None:
        batch, now = state.clock.batch, time.monotonic()
        self._throughput.mark(batch, state.clock.token)
        made = self._corrections.before(batch)
        corrected = {"guard/corrections": float(made)} if made else {}
        if self._corrections.skips(batch - 1):
            self._run.metrics({"guard/skipped": 1.0, **corrected}, batch)
            return
        loss = state.losses["total"]
        values = {"train/loss": loss, **self._rates, "train/grad_norm": self._clip.norm}
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
