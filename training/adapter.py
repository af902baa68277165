"""The one place that drives Composer: a model, a loader and a length in, a trained model out.

Composer's quirks that are mended here, in training/checkpoints.py or in training/parallel.py: it refuses bf16 on CPU
(our models cast in their forward pass instead), forgets the random state on a resume within an epoch, unpickles
checkpoints and writes them in place, cannot shard a model whose loss uses its weights, sets the learning rate a batch
late, and talks.
"""

from __future__ import annotations

import logging
import platform
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from composer import Trainer
from composer.core import Callback, DataSpec, State
from composer.loggers import Logger
from composer.models import ComposerModel
from composer.utils import collect_env
from torch import nn

from infra.run import Run
from training import ranks
from training.activations import ActivationNorm
from training.batch_size import BatchSizeRampup
from training.callbacks import Callbacks
from training.checkpoint_folder import drop_after
from training.checkpoints import Checkpointer, CheckpointPlan, Resumption
from training.clipping import GradientClip
from training.config import TrainerConfig, batches
from training.guard.callback import Alarmed, Guard
from training.guard.corrections import Correction, Corrections
from training.guard.loss_scale import LossScale
from training.guard.unmoved import WeightsMove
from training.hardware import Hardware
from training.liveness import SignsOfLife, SlowRanks
from training.loaders import data_fingerprint
from training.microbatch import choose, lower_limit, out_of_memory
from training.optimizers import adamw
from training.parallel import checkpoint_activations, parallelize, pin_device, unshard_root
from training.schedules import Schedule
from training.throughput import Throughput, clock_time

_ROLLBACK_KEPT = 3
_SAY_EVERY_S = 0.5


@dataclass(frozen=True)
class Plan:
    """How long one fit is.

    batches: optimizer steps in all.
    batch_size: examples of one of them, over all ranks.
    batch_tokens: tokens of one of them (about, where examples differ in length).
    epoch_batches: batches of one pass over the data.
    whole_epochs: the loader can only continue at an epoch's start.
    flops_per_token: of a training step, for MFU; 0 where nobody counted them.
    rampup: of batches that are smaller at first; `batch_size` and `batch_tokens` are of the full ones.
    """

    batches: int
    batch_size: int
    batch_tokens: int
    epoch_batches: int
    whole_epochs: bool = False
    flops_per_token: float = 0.0
    rampup: BatchSizeRampup | None = None

    def examples(self, batches: int) -> int:
        """Examples of the first so many batches together."""
        return self.rampup.examples(batches) if self.rampup else batches * self.batch_size


@dataclass(frozen=True)
class Fit:
    """What a fit came to.

    tokens: seen in all, by earlier processes too.
    tokens_per_s: of this process, without its first batch; 0 if it did no other.
    mfu: model FLOPs utilisation at that speed, where peak and FLOPs are known.
    corrections: what the guard did, in order.
    skipped: batches that were passed over by corrections.
    lr_multiplier: what corrections leave of the schedule's learning rate for good; 1 where nothing was cut, or healed.
    """

    batches: int
    tokens: int
    tokens_per_s: float
    mfu: float | None = None
    corrections: Sequence[Correction] = ()
    skipped: int = 0
    lr_multiplier: float = 1.0

    def guard_figures(self) -> dict[str, float]:
        return {
            "corrections": float(len(self.corrections)),
            "skipped_batches": float(self.skipped),
            "lr_multiplier": self.lr_multiplier,
        }

    def headline(self, said: str) -> str:
        """A stage's headline, with what everyone who reads it must know."""
        if self.lr_multiplier == 1:
            return said
        return f"{said}; LEARNING RATE CUT FOR GOOD to {self.lr_multiplier:.3g} of the schedule's by the guard"


def fit(
    stage: str,
    model: ComposerModel,
    loader: DataSpec,
    plan: Plan,
    config: TrainerConfig,
    hardware: Hardware,
    run: Run,
    callbacks: Sequence[Callback] = (),
    networks: Mapping[str, nn.Module] | None = None,
) -> Fit:
    """Trains `model` in place with Composer and returns when `plan.batches` are done.

    Continues from the newest whole checkpoint in `run.work_dir`. When the guard (training/guard) raises an alarm it
    goes back to a healthy checkpoint and on with a correction. Raises infra.errors.Cancelled after the running batch,
    once a checkpoint is written, when the run is cancelled; StageError `diverged` when corrections do not help, and
    `no_update` when the weights do not move.

    networks: parts of the model whose gradients are clipped apart.
    """
    run.listen()  # Composer takes SIGTERM and SIGINT when it is imported, and ends the process on them
    checkpoint_activations(model, run.launch.recompute)
    # With batches that grow all microbatches are of the first one's size: shapes that change would be compiled anew.
    smallest = plan.rampup.first if plan.rampup else plan.batch_size
    microbatch = choose(model, loader, ranks.per_rank_batch(smallest), hardware, run)
    parallelize(model, run.launch, hardware)
    optimizer = adamw(model, config.optimizer)
    corrections = Corrections(run.work_dir, config.guard)
    schedule = Schedule.of(config.schedule, plan.batches, plan.batch_tokens, plan.epoch_batches, plan.rampup)
    learning_rate = _LearningRate(schedule, config.optimizer.learning_rate, corrections)
    every = batches(config.checkpoint_every, batch_tokens=plan.batch_tokens, epoch_batches=plan.epoch_batches)
    checkpoints = CheckpointPlan(
        run.work_dir / "checkpoints",
        max(1, every // plan.epoch_batches) if plan.whole_epochs else every,
        config.keep_checkpoints,
        config.keep_checkpoints_hours,
        data_fingerprint(loader),
        plan.batches,
        plan.whole_epochs,
    )
    clip = GradientClip(config.optimizer.gradient_clip, networks)
    activations = ActivationNorm(model)
    scale = LossScale(corrections.skips) if hardware.fp16 else None
    guards: list[Callback] = []
    rollback = replace(
        checkpoints,
        folder=run.work_dir / "rollback",
        every=config.guard.rollback_every,
        keep=_ROLLBACK_KEPT,
        keep_hours=0.0,
        for_rollback=True,
    )
    if config.guard.enabled:
        guards = [Guard(config.guard, corrections, model, clip, activations, scale), Checkpointer(rollback, run)]
    resumption = Resumption(checkpoints, run, [rollback.folder])
    peak = hardware.peak_flops() if plan.flops_per_token else None
    peak = peak and peak * ranks.world_size()
    throughput = Throughput(plan.batches, plan.flops_per_token, peak, work=plan.examples)
    watch = [SignsOfLife(), SlowRanks(model, run)]
    together = Callbacks(
        [
            *watch,
            resumption,
            learning_rate,
            *([scale] if scale else []),
            clip,
            activations,
            WeightsMove(stage, lambda batch: not corrections.skips(batch) and not (scale and scale.overflowed)),
            _MetricsLogger(plan, throughput, clip, activations, scale, corrections, run),
            *callbacks,
            *guards,
            Checkpointer(checkpoints, run),
        ]
    )
    _quieten()
    with pin_device(model, run.launch):
        trainer = Trainer(
            model=model,
            optimizers=optimizer,
            train_dataloader=loader,
            max_duration=f"{plan.batches}ba",
            device="gpu" if hardware.device.type == "cuda" else "cpu",
            # The models compute in bf16 by themselves, on CPU too.
            precision="fp32",
            device_train_microbatch_size=microbatch,
            accumulate_train_batch_on_tokens=True,
            seed=config.seed,
            progress_bar=False,
            callbacks=[together],
        )
    try:
        while True:
            if corrections.unfinished:
                for folder in (checkpoints.folder, rollback.folder):
                    drop_after(folder, corrections.made[-1].back_to)
                corrections.finish()
            start = resumption.load(trainer)
            if start:
                run.event("continued", f"continuing {stage} at batch {start:,} of {plan.batches:,}")
            try:
                if start is None or start < plan.batches:
                    trainer.fit()
                break
            except Alarmed as alarmed:
                made = corrections.answer(alarmed.alarm)
                throughput.restart()
                run.event("correction", f"{stage}: {made}", **made.as_json())
                if not made.recover:
                    run.event(
                        "rate_cut",
                        f"{stage}: the learning rate is cut for good, to {made.factor:.3g} of the schedule's, from "
                        f"batch {made.back_to:,} on: look whether optimizer.learning_rate is right",
                    )
        unshard_root(model)
        clock, speed = trainer.state.timestamp, throughput.mean()
        mfu = throughput.mfu(speed) if speed else None
        skipped = corrections.skipped(plan.batches)
        made_all = tuple(corrections.made)
        return Fit(clock.batch.value, clock.token.value, speed, mfu, made_all, skipped, corrections.healed)
    except torch.OutOfMemoryError as error:
        lower_limit(run.work_dir, microbatch)
        raise out_of_memory(microbatch, run.launch.microbatch == "auto") from error
    finally:
        trainer.close()


def _quieten() -> None:
    logging.getLogger("composer").setLevel(logging.ERROR)
    logging.getLogger("streaming").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="composer")
    # A subprocess that takes a second or more to find the processor's name, which we use nowhere.
    collect_env.get_cpu_model = platform.machine


class _LearningRate(Callback):
    """Sets each batch's learning rate. Composer's schedulers are a batch late: they step before the clock does."""

    def __init__(self, schedule: Schedule, peak: float, corrections: Corrections) -> None:
        self._schedule = schedule
        self._peak = peak
        self._corrections = corrections

    def batch_start(self, state: State, logger: Logger) -> None:
        batch = state.timestamp.batch.value
        share = self._schedule.lr_multiplier(batch) * self._corrections.lr_multiplier(batch)
        for group in state.optimizers[0].param_groups:
            group["lr"] = share * group["scale"] * self._peak


class _MetricsLogger(Callback):
    """Tells metrics and progress."""

    def __init__(
        self,
        plan: Plan,
        throughput: Throughput,
        clip: GradientClip,
        activations: ActivationNorm,
        scale: LossScale | None,
        corrections: Corrections,
        run: Run,
    ) -> None:
        self._plan = plan
        self._throughput = throughput
        self._clip = clip
        self._activations = activations
        self._scale = scale
        self._corrections = corrections
        self._run = run
        self._said = 0.0
        self._learning_rate = 0.0

    def batch_start(self, state: State, logger: Logger) -> None:
        self._learning_rate = float(state.optimizers[0].param_groups[0]["lr"])

    def batch_end(self, state: State, logger: Logger) -> None:
        batch, now = state.timestamp.batch.value, time.monotonic()
        self._throughput.mark(batch, state.timestamp.token.value)
        made = self._corrections.before(batch)
        corrected = {"guard/corrections": float(made)} if made else {}
        if self._corrections.skips(batch - 1):
            self._run.metrics({"guard/skipped": 1.0, **corrected}, batch)
            return
        loss = float(state.total_loss_dict["loss/train/total"])
        values = {"train/loss": loss, "train/lr": self._learning_rate, "train/grad_norm": self._clip.norm}
        values |= {f"train/grad_norm_{name}": norm for name, norm in self._clip.norms.items()}
        if self._activations.norm is not None:
            values["train/activation_norm"] = self._activations.norm
        if self._scale is not None:
            values["train/loss_scale"] = self._scale.scale
        if self._plan.rampup:
            values["train/batch_tokens"] = float(state.timestamp.token.value - state.previous_timestamp.token.value)
        values |= self._throughput.values() | corrected
        self._run.metrics(values, batch)
        if now - self._said > _SAY_EVERY_S or batch == self._plan.batches:
            self._said = now
            note = f"loss {loss:.3f}"
            if speed := values.get("train/tokens_per_s"):
                note += f", {speed:,.0f} tokens/s, {clock_time(self._throughput.left_s())} left"
            self._run.progress(batch, self._plan.batches, "batches", note)

    def state_dict(self) -> dict[str, Any]:
        return {}
