"""The callback that watches a training and stops it at an alarm."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from training.config.guard import GuardConfig
from training.core import ranks
from training.core.callbacks import Callback
from training.core.train_state import TrainState
from training.guard.corrections import Alarm, Corrections
from training.guard.judge import Figures, LossJudge
from training.guard.loss_scale import LossScale
from training.guard.norms import ActivationNorm, GradientClip


@runtime_checkable
class TellsOfExamples(Protocol):
    """A model that returns the losses of single examples; see Judge for `chance_loss`."""

    chance_loss: float

    def example_losses(self, outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
        """Each example's summed loss (B,) and its weight (B,) in the batch's mean, from what `forward` gave."""
        ...


class Alarmed(Exception):
    """Training went wrong at a batch; the caller of the training loop must go back."""

    def __init__(self, alarm: Alarm) -> None:
        super().__init__(str(alarm))
        self.alarm = alarm


class Guard(Callback):
    """Raise `Alarmed` at the end of the batch that causes the alarm; skip the batches of past corrections.

    Every rank gets the same figures and therefore makes the same decision. clip and activations must be called before
    it.
    """

    def __init__(
        self,
        config: GuardConfig,
        corrections: Corrections,
        model: nn.Module,
        clip: GradientClip,
        activations: ActivationNorm,
        scale: LossScale | None = None,
    ) -> None:
        self._model = model if isinstance(model, TellsOfExamples) else None
        self._judge = LossJudge(config, self._model.chance_loss if self._model else 0.0)
        self._scale = scale
        self._corrections = corrections
        self._clip = clip
        self._activations = activations
        self._examples: list[tuple[Tensor, Tensor]] = []

    def batch_start(self, state: TrainState) -> None:
        self._examples = []
        if self._corrections.skips(state.clock.batch):
            # One sequence is computed, so that no rank waits for another; its gradients are dropped.
            state.batch = {name: value[:1] for name, value in state.batch.items()}

    def after_forward(self, state: TrainState) -> None:
        if self._model is not None and self._judge.learns_the_noise:
            self._examples.append(self._model.example_losses(state.outputs, state.batch))

    def after_train_batch(self, state: TrainState) -> None:
        if self._corrections.skips(state.clock.batch):
            # AdamW skips parameters without a gradient: neither moments nor decay are applied.
            for weight in state.model.parameters():
                weight.grad = None

    def batch_end(self, state: TrainState) -> None:
        batch = state.clock.batch - 1
        if self._corrections.skips(batch):
            return
        overflowed = self._scale.overflowed if self._scale else 0
        noise, examples = noise_of_mean(self._examples)
        figures = Figures(
            state.losses["total"],
            noise,
            examples,
            # A loss scale finds its size by infinite gradients; the update is left out.
            None if overflowed else self._clip.norm,
            self._activations.norm,
            self._scale.scale if self._scale else None,
        )
        alarm = self._judge.look(batch, figures, first=batch - max(0, overflowed - 1))
        if alarm is not None:
            raise Alarmed(alarm)

    def state_dict(self) -> dict[str, Any]:
        return self._judge.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:  # a training without a guard has no state, and the usual values are learnt again
            self._judge.load_state_dict(state)


def noise_of_mean(examples: list[tuple[Tensor, Tensor]]) -> tuple[float | None, int]:
    """Return the standard error of a batch's mean loss from the spread of its examples, None for fewer than two, and
    the number of examples, over all ranks. For weighted means, the error of a ratio (Cochran 1977, equation 2.39)."""
    if not examples:
        return None, 0
    losses, weights = (torch.cat(part).double() for part in zip(*examples, strict=True))
    counts = torch.ones_like(losses)
    products = [losses, weights, losses**2, losses * weights, weights**2, counts]
    sums = torch.stack([product.sum() for product in products])
    # Ranks that share layers or sequences have the same examples.
    loss, weight, squared, both, weight_squared, count = (ranks.all_reduce(sums) / ranks.group_size()).tolist()
    if count < 2 or not weight:
        return None, int(count)
    mean = loss / weight
    rest = max(0.0, squared - 2 * mean * both + mean**2 * weight_squared)
    return float((rest * count / (count - 1)) ** 0.5 / weight), int(count)
