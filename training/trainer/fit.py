"""Train a model on a loader for a given length: everything that a training needs around a backend's loop."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn

from infra.errors import Cancelled, stage_error
from infra.run import Run
from infra.store.states import KeptState, state_name
from training.backends import Backend, load_backend
from training.checkpoint.checkpointer import Checkpointer, CheckpointPlan, Resumption
from training.checkpoint.folder import batch_of, drop_after
from training.checkpoint.folder import checkpoints as checkpoints_in
from training.checkpoint.remote import CHECKPOINTS, ROLLBACK, STATES, fetch_checkpoints
from training.checkpoint.states import beginning, corrections_before, keep_states
from training.checkpoint.upload import Uploader, check_remote
from training.config import (
    KeepEvery,
    PreferenceTuningConfig,
    RewardModelConfig,
    SftConfig,
    TrainerConfig,
    batches,
)
from training.config.batch_size import BatchSizeRampup
from training.core import ranks
from training.core.callbacks import Callback, Callbacks
from training.core.hardware import Hardware
from training.core.train_state import EndOfTraining, Loader, Trainable, TrainState
from training.distributed.expert_parallel import IdleExperts
from training.distributed.parallel import parallelize, shard_optimizer, unshard_root
from training.guard.callback import Alarmed, Guard
from training.guard.corrections import FILE as CORRECTIONS
from training.guard.corrections import Correction, Corrections, write_log
from training.guard.finite import check_finite
from training.guard.liveness import SignsOfLife, SlowRanks
from training.guard.loss_scale import LossScale
from training.guard.norms import ActivationNorm, GradientClip
from training.guard.stuck import WeightsMove
from training.model.blocks import checkpoint_activations, compile_blocks
from training.planner import measured
from training.trainer import profiling
from training.trainer.metrics import MetricsLogger, Throughput
from training.trainer.microbatch import choose, lower_limit, out_of_memory
from training.trainer.optimizers import optimizer_of
from training.trainer.schedules import LearningRate, LearningRateSchedule

_ROLLBACK_KEPT = 3


@dataclass(frozen=True)
class Plan:
    """Length of one fit.

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

    def examples(self, batches: int) -> int:
        """Examples in the first `batches` batches together."""
        return self.rampup.examples(batches) if self.rampup else batches * self.batch_size

    def place(self, batches: int) -> int:
        """Position in the data after the first `batches` batches, epoch after epoch."""
        return self.rampup.place(batches) if self.rampup else batches * self.batch_size


def plan_of(
    config: SftConfig | RewardModelConfig | PreferenceTuningConfig,
    batch_size: int,
    tokens: Sequence[int],
    epoch_batches: int,
) -> tuple[Plan, int]:
    """Return the length of a training on examples with `tokens` tokens each, and its batches between evaluations."""
    batch_tokens = round(batch_size * float(np.mean(tokens)))
    length = batches(config.duration, batch_tokens=batch_tokens, epoch_batches=epoch_batches)
    every = batches(config.evaluate_every, batch_tokens=batch_tokens, epoch_batches=epoch_batches, whole=length)
    return Plan(length, batch_size, batch_tokens, epoch_batches), every


@dataclass(frozen=True)
class Fit:
    """Outcome of a fit.

    tokens: tokens seen in total, including those of earlier processes.
    tokens_per_s: speed of this process without its first batch; 0 if it ran no other.
    mfu: model FLOPs utilisation at that speed, if peak and FLOPs are known.
    corrections: corrections by the guard, in order.
    skipped: batches skipped because of corrections.
    lr_multiplier: permanent factor on the schedule's learning rate after corrections; 1 if nothing was cut, or healed.
    states: checkpoints to keep with the artifact.
    begin: state of another training from which this one continued.
    planned: the plan for this fit, None if the planner does not know the device or the model. step_s, memory_bytes,
        microbatch: the measured values.
    profile: folder with the profile of some steps; None if no profile was requested.
    """

    batches: int
    tokens: int
    tokens_per_s: float
    mfu: float | None = None
    corrections: Sequence[Correction] = ()
    skipped: int = 0
    lr_multiplier: float = 1.0
    states: Sequence[Path] = ()
    begin: KeptState | None = None
    planned: Mapping[str, Any] | None = None
    step_s: float = 0.0
    memory_bytes: int = 0
    microbatch: int = 0
    profile: Path | None = None

    def leave(self, out_dir: Path) -> None:
        """Write the guard's corrections, the kept states, the plan and the profile to the artifact's aux/."""
        write_log(self.corrections, out_dir)
        keep_states(self.states, out_dir)
        if ranks.is_first():
            if self.planned:
                measured.write(out_dir, self.planned, self.step_s, self.memory_bytes, self.microbatch)
            if self.profile:
                profiling.leave(self.profile, out_dir)

    def guard_figures(self) -> dict[str, float]:
        return {
            "corrections": float(len(self.corrections)),
            "skipped_batches": float(self.skipped),
            "lr_multiplier": self.lr_multiplier,
        }

    def headline(self, said: str) -> str:
        """Return a stage's headline, with a warning if the guard cut the learning rate permanently."""
        if self.lr_multiplier == 1:
            return said
        return f"{said}; LEARNING RATE CUT FOR GOOD to {self.lr_multiplier:.3g} of the schedule's by the guard"


def fit(
    stage: str,
    model: Trainable,
    loader: Loader,
    plan: Plan,
    config: TrainerConfig,
    hardware: Hardware,
    run: Run,
    callbacks: Sequence[Callback] = (),
    networks: Mapping[str, nn.Module] | None = None,
    inputs: Mapping[str, Path] = MappingProxyType({}),
) -> Fit:
    """Train `model` in place with the backend named by `launch.trainer`, and return after `plan.batches`.

    Training continues from the newest complete checkpoint in `run.work_dir`, else in `run.checkpoint_place`, to which
    checkpoints are uploaded during training. When the guard (training/guard) raises an alarm, training goes back to a
    healthy checkpoint and continues with a correction. Raises infra.errors.Cancelled if the run is cancelled, after the
    current batch and once a checkpoint is written; StageError `diverged` if corrections do not help, `no_update` if the
    weights do not change, and `not_finite` if the trained weights or the last loss are not finite.

    networks: parts of the model whose gradients are clipped separately.
    inputs: inputs of the stage; if `state` is among them, training continues from a state of that artifact
        (`config.continues`).
    """
    backend = load_backend(run.launch.trainer)
    if run.checkpoint_place:
        check_remote(run.checkpoint_place, run.work_dir, lambda said: run.event("upload_failed", said))
    run.listen()  # Composer installs handlers for SIGTERM and SIGINT on import, which end the process
    logging.getLogger("streaming").setLevel(logging.ERROR)
    checkpoint_activations(model, run.launch.recompute)
    # If batches grow, all microbatches have the size of the first one: changing shapes would trigger recompilation.
    smallest = plan.rampup.first if plan.rampup else plan.batch_size
    microbatch = choose(model, loader, ranks.per_rank_batch(smallest), hardware, run)
    told = measured.planned(
        config,
        model,
        run.launch,
        hardware.device,
        plan.batches,
        plan.batch_tokens,
        plan.batch_size,
        plan.epoch_batches,
        inputs,
    )
    memory = measured.MemoryWatch(model, hardware.device)
    if model.compiles_blocks:
        compile_blocks(model)
    parallelize(model, run.launch, hardware)
    optimizer = optimizer_of(model, config.optimizer, torch.bfloat16 if hardware.bf16 else torch.float32, model.experts)
    optimizer = shard_optimizer(optimizer, run.launch, hardware, model.experts)
    training = _Training(stage, plan, config, run, loader.fingerprint, beginning(config, inputs, plan.batches))
    peak = hardware.peak_flops() if plan.flops_per_token else None
    peak = peak and peak * ranks.world_size()
    throughput = Throughput(plan.batches, plan.flops_per_token, peak, work=plan.examples)
    together = training.callbacks(model, hardware, throughput, networks, callbacks)
    state = TrainState(model, optimizer, loader, together, hardware.device, config.seed + ranks.rank())
    trainer = backend(state, batches=plan.batches, microbatch=microbatch)
    try:
        training.train(trainer, state, throughput)
        if training.uploader:
            training.uploader.finish(run.launch.grace_s)
        unshard_root(model)
        speed, corrections = throughput.mean(), training.corrections
        first, last = training.begin.batch if training.begin else 0, state.clock.batch
        if first < last and all(corrections.skips(batch) for batch in range(first, last)):
            message = f"the guard left out all {last - first:,} batches, so that nothing was learnt"
            fix = "look at the first alarm in its logs and at the data of that batch, and lower optimizer.learning_rate"
            raise stage_error("diverged", stage, message, fix)
        last_was_skipped = corrections.skips(last - 1)
        check_finite(stage, model, 0.0 if last_was_skipped else state.losses.get("total", 0.0))
        return Fit(
            batches=state.clock.batch,
            tokens=state.clock.token,
            tokens_per_s=speed,
            mfu=throughput.mfu(speed) if speed else None,
            corrections=tuple(corrections.made),
            skipped=corrections.skipped(plan.batches),
            lr_multiplier=corrections.healed,
            states=training.kept_states(state.clock.batch),
            begin=training.begin,
            planned=told,
            step_s=throughput.step_s(),
            memory_bytes=memory.peak(),
            microbatch=microbatch,
            profile=training.profile,
        )
    except Cancelled:
        if training.uploader:  # the machine may be reclaimed as soon as this process ends
            training.uploader.finish(run.launch.grace_s / 2)
        raise
    except torch.OutOfMemoryError as error:
        lower_limit(run.work_dir, microbatch)
        raise out_of_memory(microbatch, run.launch.microbatch == "auto") from error
    finally:
        if training.uploader:
            training.uploader.stop()
        trainer.close()


class _Training:
    """Persistent parts of one fit: corrections of the guard, checkpoints and their uploads.

    data: fingerprint of the training data. begin: state of another training from which this one continues.
    """

    def __init__(
        self, stage: str, plan: Plan, config: TrainerConfig, run: Run, data: str, begin: KeptState | None
    ) -> None:
        self._stage, self._plan, self._config, self._run = stage, plan, config, run
        self.begin = begin
        self.corrections = Corrections(run.work_dir, config.guard, corrections_before(begin) if begin else ())
        self._checkpoints = CheckpointPlan(
            run.work_dir / CHECKPOINTS,
            self._batches(config.checkpoint_every),
            config.keep_checkpoints,
            config.keep_checkpoints_hours,
            data,
            plan.batches,
        )
        self._rollback = replace(
            self._checkpoints,
            folder=run.work_dir / ROLLBACK,
            every=config.guard.rollback_every,
            keep=_ROLLBACK_KEPT,
            keep_hours=0.0,
            resumes=False,
            from_start=True,
        )
        self._states = replace(self._checkpoints, folder=run.work_dir / STATES, resumes=False, keep=plan.batches)
        self.uploader = (
            Uploader(
                run.checkpoint_place,
                config.keep_checkpoints,
                config.keep_checkpoints_hours,
                run,
                [run.work_dir / CORRECTIONS],
            )
            if run.checkpoint_place
            else None
        )
        self._resumption = Resumption(
            self._checkpoints,
            run,
            [self._rollback.folder],
            begin.folder if begin else None,
            lambda: _from_elsewhere(run, self.corrections),
        )
        self.profile = run.work_dir / "profile" if run.launch.profile else None

    def _batches(self, length: str) -> int:
        return batches(length, batch_tokens=self._plan.batch_tokens, epoch_batches=self._plan.epoch_batches)

    def callbacks(
        self,
        model: Trainable,
        hardware: Hardware,
        throughput: Throughput,
        networks: Mapping[str, nn.Module] | None,
        given: Sequence[Callback],
    ) -> Callbacks:
        """Return all callbacks, in the order in which they are called for a batch. given: callbacks of the stage.

        networks: parts of the model whose gradients are clipped separately.
        """
        plan, config, run, corrections = self._plan, self._config, self._run, self.corrections
        schedule = LearningRateSchedule.of(
            config.schedule, plan.batches, plan.batch_tokens, plan.epoch_batches, plan.rampup
        )
        clip = GradientClip(config.optimizer.gradient_clip, networks)
        activations = ActivationNorm(model)
        scale = LossScale(corrections.skips) if hardware.fp16 else None
        watch: list[Callback] = [SignsOfLife(), SlowRanks(model, run)]
        if self.profile and ranks.is_first():
            watch.append(profiling.Profiler(self.profile, run.launch.profile))
        guards: list[Callback] = []
        if config.guard.enabled:
            guards = [
                Guard(config.guard, corrections, model, clip, activations, scale),
                Checkpointer(self._rollback, run, self.uploader),
            ]
        keepers: list[Callback] = []
        if isinstance(config.keep_state, KeepEvery):
            kept = replace(self._states, every=self._batches(config.keep_state.every))
            keepers = [Checkpointer(kept, run, self.uploader)]
        return Callbacks(
            [
                *watch,
                self._resumption,
                LearningRate(schedule, config.optimizer.learning_rate, corrections.lr_multiplier),
                *([scale] if scale else []),
                *([IdleExperts(model)] if ranks.world_size() > 1 else []),
                clip,
                activations,
                WeightsMove(
                    self._stage, lambda batch: not corrections.skips(batch) and not (scale and scale.overflowed), run
                ),
                MetricsLogger(
                    plan.batches, throughput, clip, activations, scale, corrections, run, grows=plan.rampup is not None
                ),
                *given,
                *guards,
                *keepers,
                Checkpointer(self._checkpoints, run, self.uploader),
            ]
        )

    def train(self, trainer: Backend, state: TrainState, throughput: Throughput) -> None:
        """Load the newest complete checkpoint and train to the end; repeat this after each correction of the guard.

        Raises StageError `no_way_back` if a correction has no checkpoint to go back to.
        """
        plan, run, stage, corrections = self._plan, self._run, self._stage, self.corrections
        while True:
            if corrections.unfinished:
                self._drop_after(corrections.made[-1].back_to)
                corrections.finish()
            start = self._resumption.load(state)
            if start is None and state.clock.batch:
                raise stage_error(
                    "no_way_back",
                    str(run.work_dir),
                    f"expected a checkpoint from before batch {corrections.made[-1].back_to + 1:,} to go back to",
                    "run again: training begins anew, with the guard's correction",
                )
            if start:
                run.event("continued", f"continuing {stage} at batch {start:,} of {plan.batches:,}")
            try:
                if start is None or start < plan.batches:
                    trainer.train()
                return
            except EndOfTraining:
                return
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

    def _drop_after(self, batch: int) -> None:
        """Remove checkpoints of later batches, both local and uploaded ones."""
        for plan in (self._checkpoints, self._rollback, self._states):
            drop_after(plan.folder, batch)
        if self.uploader:
            self.uploader.drop_after(batch)

    def kept_states(self, batch: int) -> list[Path]:
        """Checkpoints to keep with the artifact of a training that ended at `batch`, by `config.keep_state`."""
        if self._config.keep_state == "none":
            return []
        # A training that ended early may have no checkpoint of its last batch.
        last = self._checkpoints.folder / state_name(batch)
        return [*{batch_of(one): one for one in (*checkpoints_in(self._states.folder), last) if one.exists()}.values()]


def _from_elsewhere(run: Run, corrections: Corrections) -> Iterator[Path]:
    """Uploaded checkpoints that match the guard's corrections, newest first; every rank must request each of them."""
    if not run.checkpoint_place:
        return

    def say(message: str) -> None:
        run.event("passed_over", message)

    for path in fetch_checkpoints(run.checkpoint_place, run.work_dir, say):
        if corrections.adopt(path / CORRECTIONS, batch_of(path)):
            run.event("fetched", f"the checkpoint of batch {batch_of(path):,} was fetched from {run.checkpoint_place}")
            yield path
            continue
        say(f"passing over the uploaded checkpoint of batch {batch_of(path):,}: it is from before a correction")
        if ranks.is_first():
            shutil.rmtree(path, ignore_errors=True)
        ranks.wait_for_all()
