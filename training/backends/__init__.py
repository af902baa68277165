"""Training loops: Composer's, and a plain one. Both use the same batches, callbacks and checkpoints, and produce the
same result."""

from __future__ import annotations

from typing import Protocol

from training.core.train_state import TrainState


class Backend(Protocol):
    """A loop over the batches of `state.loader` that calls `state.callbacks` on every event.

    It seeds the random states of Python, numpy and torch with `state.seed`, and wraps the model in DDP unless the model
    is already sharded.

    batches: batches of the whole training.
    microbatch: examples that a device computes at once. Microbatches are weighted by their labelled tokens: the
        gradient is that of the mean over the labelled tokens of all ranks.
    """

    def __init__(self, state: TrainState, *, batches: int, microbatch: int) -> None: ...

    def train(self) -> None:
        """Train from `state.clock` to the last batch. Exceptions of callbacks propagate; after one, or after another
        checkpoint was loaded, this method may be called again."""

    def close(self) -> None:
        """Release the resources of the loop."""


def load_backend(name: str) -> type[Backend]:
    """Return the backend named by `launch.trainer`. Imports are local: Composer's takes seconds, and `native` must work
    without Composer."""
    if name == "native":
        from training.backends.native import Native

        return Native
    from training.backends.composer import Composer

    return Composer
