"""Composer's Trainer behind our interface. Nothing else imports Composer.

This module and its callers work around some of its quirks: it refuses bf16 on a CPU (our models cast in their forward
pass instead), loses the random state on a resume within an epoch, unpickles checkpoints and writes them in place,
cannot shard a model whose loss uses its weights, sets the learning rate one batch late, and is verbose. Checkpoints,
learning rates and FSDP2 are therefore ours; Composer runs the loop, microbatches, the optimizer's step and DDP.
"""

from __future__ import annotations

import logging
import platform
import warnings
from typing import Any

from composer import Trainer
from composer.core import Callback, DataSpec, State, Timestamp
from composer.core import Event as ComposerEvent
from composer.loggers import Logger
from composer.models import ComposerModel
from composer.utils import collect_env

from training.core import ranks
from training.core.callbacks import Event
from training.core.train_state import Clock, Loader, Trainable, TrainState, count_examples, split_batch
from training.distributed.parallel import settle_buckets

_EVENTS = {ComposerEvent[event.name]: event for event in Event}
_LOSS = "loss/train/"


class Composer:
    """See training.backends.Backend."""

    def __init__(self, state: TrainState, *, batches: int, microbatch: int) -> None:
        _quieten()
        self._state = state
        self._trainer = Trainer(
            model=_Model(state.model),
            optimizers=state.optimizer,
            train_dataloader=_data_spec(state.loader),
            max_duration=f"{batches}ba",
            device="gpu" if state.device.type == "cuda" else "cpu",
            # The models handle bf16 themselves, also on a CPU.
            precision="fp32",
            device_train_microbatch_size=microbatch,
            accumulate_train_batch_on_tokens=True,
            # Composer adds the rank.
            seed=state.seed - ranks.rank(),
            # Our data sets seek to their position themselves.
            spin_dataloaders=False,
            progress_bar=False,
            callbacks=[_Bridge(state)],
        )

    def train(self) -> None:
        settle_buckets(self._trainer.state.model)
        self._trainer.state.timestamp = _timestamp(self._state.clock)
        self._trainer.fit()

    def close(self) -> None:
        # Without Trainer.close's barrier: a rank that failed would wait in it for ranks that are still training.
        self._trainer.engine.close()


class _Model(ComposerModel):
    """Adapter of a Trainable to Composer's model class."""

    def __init__(self, model: Trainable) -> None:
        super().__init__()
        self.ours = model

    def forward(self, batch: Any) -> Any:
        return self.ours(batch)

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return self.ours.loss(outputs, batch)

    def to(self, *args: Any, **kwargs: Any) -> _Model:
        """Do nothing: the model is already on its device, or on the CPU for offloading."""
        return self


class _Bridge(Callback):
    """Forward Composer's events to our callbacks, translated to our types.

    All our callbacks form a single Composer callback: Composer calls every callback at each of a batch's 13 events, and
    builds a log line before each call that is never read.
    """

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self._seen: Timestamp | None = None

    def run_event(self, event: ComposerEvent, state: State, logger: Logger) -> None:
        if event not in _EVENTS:
            return
        own_state = self._state
        if state.timestamp is not self._seen:
            self._seen = state.timestamp
            own_state.clock = Clock.from_json(state.timestamp.state_dict())
        own_state.batch, own_state.outputs, own_state.loss = state.batch, state.outputs, state.loss
        if event == ComposerEvent.BATCH_END:
            own_state.batch_tokens = own_state.clock.token - state.previous_timestamp.token.value
            own_state.losses = {name.removeprefix(_LOSS): value for name, value in state.total_loss_dict.items()}
        own_state.callbacks.run_event(_EVENTS[event], own_state)
        state.batch = own_state.batch


def _data_spec(loader: Loader) -> DataSpec:
    def count_tokens(batch: Any) -> dict[str, int]:
        count = loader.count_tokens(batch)
        return {"total": count.total, "loss_generating": count.labelled}

    return DataSpec(
        loader.dataloader,
        split_batch=split_batch,
        get_num_samples_in_batch=count_examples,
        get_num_tokens_in_batch=count_tokens,
    )


def _timestamp(clock: Clock) -> Timestamp:
    # An iteration is the whole training.
    return Timestamp(epoch_in_iteration=clock.epoch, token_in_iteration=clock.token, **clock.as_json())


def _quieten() -> None:
    logging.getLogger("composer").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="composer")
    # The original starts a subprocess that takes a second or more to find the processor's name, which we never use.
    collect_env.get_cpu_model = platform.machine
