"""The one place that drives Composer: a model, a loader and a length in, a trained model out.

Composer's quirks that are mended here or in training/checkpoints.py: it refuses bf16 on CPU (our models cast in their
forward pass instead), forgets the random state on a resume within an epoch, writes checkpoints in place, sets the
learning rate a batch late, and talks.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from composer import Trainer
from composer.core import Callback, DataSpec, State, TimeUnit
from composer.loggers import Logger
from composer.models import ComposerModel

from infra.launch.config import LaunchConfig
from infra.run import Run
from training.checkpoints import Checkpointer, RandomStateAfterResume, batch_of, newest
from training.config import TrainerConfig, batches
from training.hardware import Hardware
from training.optimizers import adamw, learning_rate_share, warmup_batches

_SAY_EVERY_S = 0.5


@dataclass(frozen=True)
class Plan:
    """How long one fit is.

    batches: optimizer steps in all.
    batch_size: examples of one of them.
    batch_tokens: tokens of one of them (about, where examples differ in length).
    epoch_batches: batches of one pass over the data.
    whole_epochs: the loader can only continue at an epoch's start.
    """

    batches: int
    batch_size: int
    batch_tokens: int
    epoch_batches: int
    whole_epochs: bool = False


@dataclass(frozen=True)
class Fit:
    """What a fit came to.

    tokens: seen in all, by earlier processes too.
    tokens_per_s: of this process, without its first batches; 0 if it did none.
    """

    batches: int
    tokens: int
    tokens_per_s: float


def fit(
    stage: str,
    model: ComposerModel,
    loader: DataSpec,
    plan: Plan,
    config: TrainerConfig,
    hardware: Hardware,
    run: Run,
    callbacks: Sequence[Callback] = (),
) -> Fit:
    """Trains `model` in place with Composer and returns when `plan.batches` are done.

    Continues from the newest whole checkpoint in `run.work_dir`. Raises infra.errors.Cancelled at the next batch once
    the run is cancelled.
    """
    optimizer = adamw(model, config.optimizer)
    warmup = warmup_batches(config.schedule, plan.batches, plan.batch_tokens, plan.epoch_batches)

    learning_rate = _LearningRate(config, plan.batches, warmup)
    every = batches(config.checkpoint_every, batch_tokens=plan.batch_tokens, epoch_batches=plan.epoch_batches)
    folder = run.work_dir / "checkpoints"
    if plan.whole_epochs:
        checkpointer = Checkpointer(folder, max(1, every // plan.epoch_batches), TimeUnit.EPOCH)
    else:
        checkpointer = Checkpointer(folder, every)
    random_state = RandomStateAfterResume()
    voice = _Voice(plan, config.optimizer.gradient_clip, run)
    start = newest(folder)
    _quieten()
    trainer = Trainer(
        model=model,
        optimizers=optimizer,
        train_dataloader=loader,
        max_duration=f"{plan.batches}ba",
        device="gpu" if hardware.device.type == "cuda" else "cpu",
        # The models compute in bf16 by themselves, on CPU too.
        precision="fp32",
        device_train_microbatch_size=_microbatch(run.launch, plan.batch_size),
        accumulate_train_batch_on_tokens=True,
        seed=config.seed,
        load_path=None if start is None else str(start),
        load_progress_bar=False,
        progress_bar=False,
        callbacks=[random_state, learning_rate, voice, *callbacks, checkpointer],
    )
    try:
        if start is not None:
            run.event("continued", f"continuing {stage} at batch {batch_of(start):,} of {plan.batches:,}")
            if trainer.state.timestamp.batch_in_epoch.value:
                random_state.saved, trainer._rng_state = trainer._rng_state, None
        if start is None or batch_of(start) < plan.batches:
            trainer.fit()
        return Fit(trainer.state.timestamp.batch.value, trainer.state.timestamp.token.value, voice.tokens_per_s())
    finally:
        trainer.close()


def _microbatch(launch: LaunchConfig, batch_size: int) -> int:
    return batch_size if launch.microbatch == "auto" else min(launch.microbatch, batch_size)


def _quieten() -> None:
    logging.getLogger("composer").setLevel(logging.ERROR)
    logging.getLogger("streaming").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="composer")


class _LearningRate(Callback):
    """Sets each batch's learning rate. Composer's schedulers are a batch late: they step before the clock does."""

    def __init__(self, config: TrainerConfig, total: int, warmup: int) -> None:
        self._config = config
        self._total = total
        self._warmup = warmup

    def batch_start(self, state: State, logger: Logger) -> None:
        share = learning_rate_share(self._config.schedule, state.timestamp.batch.value, self._total, self._warmup)
        for group in state.optimizers[0].param_groups:
            group["lr"] = share * group["scale"] * self._config.optimizer.learning_rate


class _Voice(Callback):
    """Clips gradients, tells metrics and progress, and looks whether the run was cancelled."""

    def __init__(self, plan: Plan, gradient_clip: float, run: Run) -> None:
        self._plan = plan
        self._clip = gradient_clip
        self._run = run
        self._norm = 0.0
        self._said = 0.0
        self._learning_rate = 0.0
        self._marks: list[tuple[float, int]] = []

    def batch_start(self, state: State, logger: Logger) -> None:
        self._run.stop_if_cancelled()
        self._learning_rate = float(state.optimizers[0].param_groups[0]["lr"])

    def after_train_batch(self, state: State, logger: Logger) -> None:
        self._norm = float(torch.nn.utils.clip_grad_norm_(state.model.parameters(), self._clip))

    def batch_end(self, state: State, logger: Logger) -> None:
        batch, now = state.timestamp.batch.value, time.monotonic()
        self._marks.append((now, state.timestamp.token.value))
        loss = float(state.total_loss_dict["loss/train/total"])
        values = {"train/loss": loss, "train/lr": self._learning_rate, "train/grad_norm": self._norm}
        if speed := self.tokens_per_s():
            values["train/tokens_per_s"] = speed
        self._run.metrics(values, batch)
        if now - self._said > _SAY_EVERY_S or batch == self._plan.batches:
            self._said = now
            self._run.progress(batch, self._plan.batches, "batches", f"loss {loss:.3f}")

    def tokens_per_s(self) -> float:
        """Tokens a second since the first batch, which pays for warming up."""
        if len(self._marks) < 2:
            return 0.0
        (began, first), (now, last) = self._marks[0], self._marks[-1]
        return (last - first) / max(now - began, 1e-9)

    def state_dict(self) -> dict[str, Any]:
        return {}
