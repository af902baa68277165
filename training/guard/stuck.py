"""Says when a pretraining does not get going: its loss stays near what the frequencies of tokens alone give.

A learning rate that is far too high often ends there without any spike, and one that is too low stays there long. The
loss does not tell one from the other, so the guard, which would cut the rate, leaves this to whoever reads it.
"""

from __future__ import annotations

from statistics import median

from infra.run import Run
from training.callbacks import Callback
from training.train_state import TrainState

# A network that had learnt frequencies and where documents begin came to 0.97 of the frequencies' loss.
_NEAR = 0.95
# Batches in which the loss has to fall, and by how much from one half's median to the other's: trainings that went on
# to learn fell by 4 % and more.
_WINDOW = 200
_FALL = 0.02


class Stuck(Callback):
    """Writes the event `stuck`, once.

    frequencies_loss: nats a token that the frequencies of tokens alone give.
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
