"""The loops that train: Composer's, and a plain one of our own. Both work with the same batches, callbacks and
checkpoints, and come to the same result."""

from __future__ import annotations

from typing import Protocol

from training.core.train_state import TrainState


class Backend(Protocol):
    """A loop over the batches of `state.loader`, which tells `state.callbacks` what happens.

    It seeds the random states of Python, numpy and torch with `state.seed`, and joins the ranks by DDP where the model
    is not sharded already.

    batches: of the whole training.
    microbatch: examples that a device computes at once. Each microbatch counts by its labelled tokens: the gradient is
        that of the mean over those of all ranks.
    """

    def __init__(self, state: TrainState, *, batches: int, microbatch: int) -> None: ...

    def train(self) -> None:
        """Goes on from `state.clock` to the last batch. What a callback raises comes through; after that, or after
        another checkpoint was put in place, it may be called again."""

    def close(self) -> None:
        """Gives back what the loop holds."""


def load_backend(name: str) -> type[Backend]:
    """The one that `launch.trainer` names. Imported here: Composer takes seconds, and `native` has to do without."""
    if name == "native":
        from training.backends.native import Native

        return Native
    from training.backends.composer import Composer

    return Composer
