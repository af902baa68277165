"""The moments of a training loop at which callbacks are called."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any

from training.core.train_state import TrainState


class Event(Enum):
    """The moments of a training, in their order; each is a method of Callback."""

    FIT_START = "fit_start"
    BEFORE_DATALOADER = "before_dataloader"
    AFTER_DATALOADER = "after_dataloader"
    BATCH_START = "batch_start"
    BEFORE_FORWARD = "before_forward"
    AFTER_FORWARD = "after_forward"
    BEFORE_BACKWARD = "before_backward"
    AFTER_TRAIN_BATCH = "after_train_batch"
    BATCH_END = "batch_end"
    BATCH_CHECKPOINT = "batch_checkpoint"
    FIT_END = "fit_end"


class Callback:
    """Listener for the events whose methods a class overrides, or for all events if it overrides `run_event`."""

    def run_event(self, event: Event, state: TrainState) -> None:
        getattr(self, event.value)(state)

    def fit_start(self, state: TrainState) -> None:
        """Before the first batch, also of a training that continues or goes back."""

    def before_dataloader(self, state: TrainState) -> None:
        """Before a batch is read; once more at an epoch's end."""

    def after_dataloader(self, state: TrainState) -> None:
        """After a batch is read; it is still on the CPU."""

    def batch_start(self, state: TrainState) -> None:
        """Before the first microbatch."""

    def before_forward(self, state: TrainState) -> None:
        """Before a microbatch's forward pass."""

    def after_forward(self, state: TrainState) -> None:
        """After it."""

    def before_backward(self, state: TrainState) -> None:
        """After a microbatch's loss is computed."""

    def after_train_batch(self, state: TrainState) -> None:
        """After the batch's gradients are reduced over all ranks, before the update; the clock is before the batch."""

    def batch_end(self, state: TrainState) -> None:
        """After the weights are updated; the clock is after the batch."""

    def batch_checkpoint(self, state: TrainState) -> None:
        """After all work at the end of the batch."""

    def fit_end(self, state: TrainState) -> None:
        """After the last batch."""

    def state_dict(self) -> dict[str, Any]:
        """State to keep in a checkpoint, serializable as JSON."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from a checkpoint; empty if the checkpoint has none."""


class Callbacks:
    """`members` in their order, each called only for the events that it listens to; states are keyed by the names of
    their classes."""

    def __init__(self, members: Sequence[Callback]) -> None:
        self._members = list(members)
        self._listening = {event: [callback for callback in members if _listens(callback, event)] for event in Event}

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._members)

    def run_event(self, event: Event, state: TrainState) -> None:
        for callback in self._listening[event]:
            callback.run_event(event, state)

    def state_dict(self) -> dict[str, Any]:
        return {type(callback).__qualname__: callback.state_dict() for callback in self._members}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for callback in self._members:
            callback.load_state_dict(state.get(type(callback).__qualname__, {}))


def _listens(callback: Callback, event: Event) -> bool:
    kind = type(callback)
    return any(getattr(kind, name) is not getattr(Callback, name) for name in ("run_event", event.value))
