"""Stops a training whose weights do not move: it costs what any other costs, and learns nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from infra.errors import stage_error
from training import ranks
from training.callbacks import Callback
from training.train_state import TrainState

# One batch may have no gradient, as when none of its tokens bears loss.
_UPDATES = 3
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightsMove(Callback):
    """Raises StageError `no_update` when the first three updates leave every weight as it was, to the bit.

    updated: whether a batch was to change the weights at all: one that is passed over is not.
    """

    def __init__(self, stage: str, updated: Callable[[int], bool]) -> None:
        self._stage = stage
        self._updated = updated
        self._before: Tensor | None = None
        self._unmoved = 0
        self._moved = False

    def batch_start(self, state: TrainState) -> None:
        if not self._moved and self._before is None:
            self._before = bits_of(state.model)

    def batch_end(self, state: TrainState) -> None:
        rates = [float(group["lr"]) for group in state.optimizer.param_groups]
        if self._moved or not self._updated(state.clock.batch - 1) or not any(rates):
            return
        assert self._before is not None
        changed = torch.ne(bits_of(state.model), self._before).any().to(torch.int32)
        self._unmoved += 1
        if bool(ranks.all_reduce(changed, "max")):
            self._moved, self._before = True, None
        elif self._unmoved >= _UPDATES:
            raise stage_error(
                "no_update",
                f"{self._stage}.optimizer",
                f"the weights are the same to the bit after {self._unmoved} updates with a learning rate of "
                f"{max(rates):.3g}: nothing is learnt",
                "an optimizer's step must call the closure that it is given and change the weights; a learning rate "
                "that is too small for fp32 changes nothing either",
            )


def bits_of(model: nn.Module) -> Tensor:
    """A number for each weight tensor (of this rank's part), from its bits: another one if a weight moved."""
    parts = [weight.detach() for weight in model.parameters()]
    parts = [part.to_local() if isinstance(part, DTensor) else part for part in parts]
    device = next((part.device for part in parts), torch.device("cpu"))
    sums = [part.reshape(-1).view(_BITS[part.element_size()]).sum(dtype=torch.int64).to(device) for part in parts]
    return torch.stack(sums)
