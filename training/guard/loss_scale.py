"""Dynamic loss scaling for fp16, on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from training.core import ranks
from training.core.callbacks import Callback
from training.core.train_state import TrainState
from training.distributed.gradients import local

_FIRST = 2.0**16
_GROW_AFTER = 2000


class LossScale(Callback):
    """Multiply gradients by `scale` in the backward pass, so that small ones do not vanish in fp16 (Micikevicius et al.
    2018, section 3.2), and divide by it again before the update.

    Infinite gradients halve the scale and skip the update; 2,000 batches without one double it (the defaults of torch's
    GradScaler). It must be called before all callbacks that read gradients.

    ignored: returns True for batches that do not count, since they are skipped.
    """

    def __init__(self, ignored: Callable[[int], bool], scale: float = _FIRST, grow_after: int = _GROW_AFTER) -> None:
        self._ignored = ignored
        self._grow_after = grow_after
        self._good = 0
        self.scale = scale
        self.overflowed = 0
        """Batches in a row whose gradients were infinite."""

    def before_backward(self, state: TrainState) -> None:
        loss = state.loss["total"] if isinstance(state.loss, dict) else state.loss
        assert loss is not None
        # The loss itself does not change, so that it can be logged.
        loss.register_hook(lambda gradient: gradient * self.scale)

    def after_train_batch(self, state: TrainState) -> None:
        # Parts, since torch divides no list in which some weights are shared among ranks and others are not.
        gradients = [local(weight.grad) for weight in state.model.parameters() if weight.grad is not None]
        torch._foreach_div_(gradients, self.scale)
        if self._ignored(state.clock.batch):
            return
        if _finite_on_all_ranks(gradients):
            self._good += 1
            self.overflowed = 0
            if self._good % self._grow_after == 0:
                self.scale *= 2
            return
        self._good = 0
        self.overflowed += 1
        self.scale /= 2
        for weight in state.model.parameters():
            weight.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "good": self._good, "overflowed": self.overflowed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:  # a checkpoint of another precision has none
            self.scale, self._good, self.overflowed = state["scale"], state["good"], state["overflowed"]


def _finite_on_all_ranks(gradients: Sequence[Tensor]) -> bool:
    """Return True if gradients are finite on all ranks: ranks with different shards must decide alike."""
    finite = torch.stack([torch.isfinite(gradient).all() for gradient in gradients]).all().to(torch.int32)
    return bool(ranks.all_reduce(finite, "min"))
