"""Detection of trainings that do not learn: weights that do not change, and a loss that stays at that of unigrams."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn

from infra.errors import stage_error
from infra.run import Run
from training.core import ranks
from training.core.callbacks import Callback
from training.core.train_state import TrainState
from training.distributed.gradients import local

# A network that had learnt frequencies and where documents begin reached 0.97 of the frequencies' loss.
_NEAR = 0.95
# Batches in which the loss has to fall, and by how much from one half's median to the other's: trainings that went on
# to learn fell by 4 % and more.
_WINDOW = 200
_FALL = 0.02


class Stuck(Callback):
    """Write the event `stuck`, once.

    frequencies_loss: nats per token of a model that only knows the frequencies of tokens.
    first: the first batch that counts, the end of the warm-up.
    """

    def __init__(self, frequencies_loss: float, first: int, run: Run) -> None:
        self._frequencies_loss = frequencies_loss
        self._first = first
        self._run = run
        self._losses: list[float] | None = []

    def batch_end(self, state: TrainState) -> None:
        batch = state.clock.batch - 1
        if self._losses is None or batch < self._first:
            return
        self._losses = [*self._losses, state.losses["total"]][-_WINDOW:]
        if len(self._losses) < _WINDOW:
            return
        earlier, later = (median(half) for half in (self._losses[: _WINDOW // 2], self._losses[_WINDOW // 2 :]))
        if later < _NEAR * self._frequencies_loss:
            self._losses = None
        elif later > (1 - _FALL) * earlier:
            self._losses = None
            self._run.event(
                "stuck",
                f"the loss stays at {later:.3g} (batch {batch:,}), and the frequencies of tokens alone give "
                f"{self._frequencies_loss:.3g}: the learning rate is far too high or too low, or data have no order",
            )


_UPDATES = 3
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightsMove(Callback):
    """Raise StageError `no_update` if the first three updates do not change any weight, to the bit.

    A batch with a gradient of zeros, for example if all answers to a prompt have the same reward, needs no update and
    does not count as one; the third such batch writes the event `no_gradient`.
    updated: returns True if a batch should change the weights; False for a skipped batch.
    """

    def __init__(self, stage: str, updated: Callable[[int], bool], run: Run) -> None:
        self._stage = stage
        self._updated = updated
        self._run = run
        self._before: Tensor | None = None
        self._unmoved = 0
        self._without_gradient = 0
        self._is_zero = False
        self._moved = False

    def batch_start(self, state: TrainState) -> None:
        self._is_zero = False
        if not self._moved and self._before is None:
            self._before = bits_of(state.model)

    def after_train_batch(self, state: TrainState) -> None:
        # Not called if an optimizer ignores its closure; and if no weight has a gradient, that is a fault.
        if not self._moved:
            gradients = [local(weight.grad) for weight in state.model.parameters() if weight.grad is not None]
            self._is_zero = bool(gradients) and not any(bool(gradient.any()) for gradient in gradients)

    def batch_end(self, state: TrainState) -> None:
        rates = [float(group["lr"]) for group in state.optimizer.param_groups]
        if self._moved or not self._updated(state.clock.batch - 1) or not any(rates):
            return
        assert self._before is not None
        changed = torch.ne(bits_of(state.model), self._before).any()
        flags = torch.stack([changed, changed.new_tensor(not self._is_zero)]).to(torch.int32)
        moved, pushed = ranks.all_reduce(flags, "max").tolist()
        if moved:
            self._moved, self._before = True, None
        elif not pushed:
            self._without_gradient += 1
            if self._without_gradient == _UPDATES:
                self._run.event(
                    "no_gradient",
                    f"{self._stage}: {_UPDATES} batches from the first on had no gradient, and nothing was learnt of "
                    "them: all answers to a prompt are worth the same, or no example has any weight",
                )
        else:
            self._unmoved += 1
            if self._unmoved >= _UPDATES:
                raise stage_error(
                    "no_update",
                    f"{self._stage}.optimizer",
                    f"the weights are bit-identical after {self._unmoved} updates with a learning rate of "
                    f"{max(rates):.3g}: nothing is learnt",
                    "an optimizer's step must call its closure and change the weights; a learning "
                    "rate that is too small for fp32 changes nothing either",
                )


def bits_of(model: nn.Module) -> Tensor:
    """Return a checksum of the bits of each weight tensor (of this rank's part); it differs if a weight changed."""
    parts = [local(weight.detach()) for weight in model.parameters()]
    device = next((part.device for part in parts), torch.device("cpu"))
    sums = [part.reshape(-1).view(_BITS[part.element_size()]).sum(dtype=torch.int64).to(device) for part in parts]
    return torch.stack(sums)
