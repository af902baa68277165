"""Train a model on a loader for a given length: everything that a training needs around a backend's loop."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from infra.errors import Cancelled, stage_error
from infra.run import Run
from infra.store.states import KeptState
from training.backends import load_backend
from training.checkpoint.manager import CheckpointManager
from training.checkpoint.states import beginning, corrections_before, keep_states
from training.config import TrainerConfig
from training.core import ranks
from training.core.callbacks import Callback, Callbacks
from training.core.hardware import Hardware
from training.core.plan import Plan
from training.core.train_state import EndOfTraining, Loader, Trainable, TrainState
from training.distributed.expert_parallel import IdleExperts
from training.distributed.parallel import parallelize, shard_optimizer, unshard_root
from training.guard.callback import Alarmed, Guard
from training.guard.corrections import Correction, Corrections, write_log
from training.guard.finite import check_finite
from training.guard.liveness import SignsOfLife, SlowRanks
from training.guard.loss_scale import LossScale
from training.guard.norms import ActivationNorm, GradientClip
from training.guard.stuck import WeightsMove
from training.model.blocks import checkpoint_activations
from training.planner.measured import MemoryWatch, write_measured
from training.trainer import profiling
from training.trainer.metrics import MetricsLogger, Throughput
from training.trainer.microbatch import choose, lower_limit, out_of_memory
from training.trainer.optimizers import optimizer_of
from training.trainer.profiling import Profiler
from training.trainer.schedules import LearningRate, LearningRateSchedule
from training.trainer.step_times import StepTimes


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
    step_s, memory_bytes, microbatch: measured values of what the planner estimates.
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
    step_s: float = 0.0
    memory_bytes: int = 0
    microbatch: int = 0
    profile: Path | None = None

    def leave(self, out_dir: Path, planned: Mapping[str, Any] | None) -> None:
        """Write the guard's corrections, the kept states, the profile, and the planner's estimate (`planned`, if there
        is one) with the measured values to the artifact's aux/."""
        write_log(self.corrections, out_dir)
        keep_states(self.states, out_dir)
        if ranks.is_first():
            if planned:
                write_measured(out_dir, planned, self.step_s, self.memory_bytes, self.microbatch)
            if self.profile:
                profiling.leave(self.profile, out_dir)

    def figures(self) -> dict[str, float]:
        """Return the figures of a stage that trains on conversations."""
        lengths = {"batches": float(self.batches), "tokens": float(self.tokens), "tokens_per_s": self.tokens_per_s}
        return {**lengths, **self.guard_figures()}

    def guard_figures(self) -> dict[str, float]:
        """Return the guard's figures of a stage that trains."""
        return {
            "corrections": float(len(self.corrections)),
            "skipped_batches": float(self.skipped),
            "lr_multiplier": self.lr_multiplier,
        }

    def headline(self, text: str) -> str:
        """Return a stage's headline, with a warning if the guard cut the learning rate permanently."""
        if self.lr_multiplier == 1:
            return text
        return f"{text}; LEARNING RATE CUT PERMANENTLY to {self.lr_multiplier:.3g} of the schedule's by the guard"


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

    Args:
        callbacks: the stage's own; each batch they follow the metrics and precede guard and checkpoints.
        networks: parts of the model whose gradients are clipped separately.
        inputs: inputs of the stage; if `state` is among them, training continues from a state of that artifact
            (`config.continues`).
    """
    backend = load_backend(run.launch.trainer)

    # Checkpoints. What cannot be uploaded or continued is an error before anything else is computed.
    begin = beginning(config, inputs, plan.batches)
    corrections = Corrections(run.work_dir, config.guard, corrections_before(begin))
    checkpoints = CheckpointManager(
        stage,
        config,
        run,
        data=loader.fingerprint,
        batches=plan.batches,
        to_batches=plan.to_batches,
        corrections=corrections,
        begin=begin,
    )
    run.listen()  # Composer installs handlers for SIGTERM and SIGINT on import, which end the process
    logging.getLogger("streaming").setLevel(logging.ERROR)

    # The model on this device, and the optimizer of its weights.
    checkpoint_activations(model, run.launch.recompute)
    # If batches grow, all microbatches have the size of the first one: changing shapes would trigger recompilation.
    microbatch = choose(model, loader, ranks.per_rank_batch(plan.smallest_batch), hardware, run)
    memory = MemoryWatch(hardware.device)
    parallelize(model, run.launch, hardware)
    optimizer = optimizer_of(model, config.optimizer, torch.bfloat16 if hardware.bf16 else torch.float32, model.experts)
    optimizer = shard_optimizer(optimizer, run.launch, hardware, model.experts)

    # The parts of a step besides its forward and backward pass, in the order in which each event calls them.
    peak = hardware.peak_flops() if plan.flops_per_token else None
    peak = peak and peak * ranks.world_size()
    throughput = Throughput(plan.batches, plan.flops_per_token, peak, work=plan.examples)
    schedule = LearningRateSchedule.of(
        config.schedule, plan.batches, plan.batch_tokens, plan.epoch_batches, plan.rampup
    )
    scale = LossScale(corrections.skips) if hardware.fp16 else None
    clip = GradientClip(config.optimizer.gradient_clip, networks)
    activations = ActivationNorm(model)
    profile = run.work_dir / "profile" if run.launch.profile else None
    generates = hasattr(loader.dataloader.dataset, "write")
    times = (
        StepTimes(run.times, run.work_dir.name, hardware.device, generates=generates, saved=lambda: checkpoints.newest)
        if run.times
        else None
    )
    parts: list[Callback | None] = [
        # Watchers of time come first, so that they see all others' work.
        times,
        SignsOfLife(),
        SlowRanks(model, run),
        Profiler(profile, run.launch.profile) if profile and ranks.is_first() else None,
        # Before a batch: its learning rate.
        LearningRate(optimizer, schedule, corrections.lr_multiplier),
        # Gradients: divide by the loss scale, remove those of idle experts, clip, check that they lead to an update.
        scale,
        IdleExperts(model) if ranks.world_size() > 1 else None,
        clip,
        activations,
        WeightsMove(stage, lambda batch: not corrections.skips(batch) and not (scale and scale.overflowed), run),
        # After the update: metrics, then what the stage measures.
        MetricsLogger(
            plan.batches, throughput, clip, activations, scale, corrections, run, grows=plan.rampup is not None
        ),
        *callbacks,
        # The guard judges these figures, and stops at an alarm before the batch can reach a checkpoint.
        Guard(config.guard, corrections, model, clip, activations, scale) if config.guard.enabled else None,
        checkpoints,
    ]
    members = Callbacks([part for part in parts if part is not None])
    state = TrainState(model, optimizer, loader, members, hardware.device, config.seed + ranks.rank())
    trainer = backend(state, batches=plan.batches, microbatch=microbatch)
    try:
        # Train to the end, again after each correction of the guard.
        while True:
            checkpoints.resume(state)
            if times:
                times.begin(state.clock.batch, state.clock.token)
            try:
                if state.clock.batch < plan.batches:
                    trainer.train()
                break
            except EndOfTraining:
                break
            except Alarmed as alarmed:
                if times and run.times:
                    times.end()
                    run.times.write("fault", cause="rollback")
                correction = corrections.answer(alarmed.alarm)
                throughput.restart()
                run.event("correction", f"{stage}: {correction}", **correction.as_json())
                if not correction.recover:
                    run.event(
                        "rate_cut",
                        f"{stage}: the learning rate is permanently cut to {correction.factor:.3g} of the schedule's, "
                        f"from batch {correction.back_to:,} on: check optimizer.learning_rate",
                    )
        if times and run.times:
            times.end()
            run.times.write("done", key=run.work_dir.name)
        checkpoints.finish(run.launch.grace_s)
        unshard_root(model)

        # A model that learnt nothing, or whose weights are no numbers, is an error and not a result.
        first, last = begin.batch if begin else 0, state.clock.batch
        if first < last and all(corrections.skips(batch) for batch in range(first, last)):
            message = f"the guard left out all {last - first:,} batches, so that nothing was learnt"
            fix = "look at the first alarm in its logs and at the data of that batch, and lower optimizer.learning_rate"
            raise stage_error("diverged", stage, message, fix)
        check_finite(stage, model, 0.0 if corrections.skips(last - 1) else state.losses.get("total", 0.0))
        speed = throughput.mean()
        return Fit(
            batches=last,
            tokens=state.clock.token,
            tokens_per_s=speed,
            mfu=throughput.mfu(speed) if speed else None,
            corrections=tuple(corrections.made),
            skipped=corrections.skipped(plan.batches),
            lr_multiplier=corrections.healed,
            states=checkpoints.kept(last),
            begin=begin,
            step_s=throughput.step_s(),
            memory_bytes=memory.peak(),
            microbatch=microbatch,
            profile=profile,
        )
    except Cancelled:
        checkpoints.finish(run.launch.grace_s / 2)  # the machine may be reclaimed as soon as this process ends
        raise
    except torch.OutOfMemoryError as error:
        lower_limit(run.work_dir, microbatch)
        raise out_of_memory(microbatch, run.launch.microbatch == "auto") from error
    finally:
        if times:
            times.end()
        checkpoints.close()
        trainer.close()
