"""Judge from the figures of each batch if a training fails: plain numbers in, an alarm out.

Usual values come from the run itself. After the first batch, the spread of its examples' losses determines how far the
means of batches may differ; once there are enough batches, their spread does.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cache
from statistics import fmean
from typing import Any, NamedTuple

from scipy.special import ndtri, stdtrit

from training.config.guard import GuardConfig
from training.guard.corrections import Alarm
from training.guard.watch import LossWatch

# A loss that moves by less than 1 % of itself, an activation norm by less than a tenth, is never a spike.
_LEAST_LOSS_SPREAD = 0.01
_LEAST_ACTIVATION_SPREAD = 0.1
# Gradient norms often double harmlessly: with the default limit of 6 an alarm needs more than four times the usual one.
_LEAST_GRADIENT_SPREAD = 0.25
# A batch counts for an alarm by its excess over this share of `limit`, and against one by its deficit: a sum that
# restarts at 0 (Page 1954). A batch above this share with a suspicious norm counts in full.
_HALF = 0.5
# Batches whose mean is the loss at the start.
_FIRST = 5
# A spread of few examples is uncertain: Student's t at this tail probability quantifies it.
_TAIL = 1.0e-3


@dataclass(frozen=True)
class Figures:
    """Figures of one batch, the same on every rank; None if unknown.

    loss: mean over positions with a loss.
    noise: standard error of `loss`, from the spread of the batch's examples.
    examples: number of these examples.
    gradient: global norm before clipping.
    activation: mean length of the last hidden states.
    loss_scale: of fp16.
    """

    loss: float
    noise: float | None = None
    examples: int = 0
    gradient: float | None = None
    activation: float | None = None
    loss_scale: float | None = None


@dataclass
class _Start:
    """The loss at the start, from the first healthy batches: each one's loss, noise and examples."""

    batches: list[tuple[float, float, int]]

    def level(self) -> float:
        return fmean(loss for loss, _, _ in self.batches[:_FIRST])

    def noise(self) -> float:
        """Standard error of a batch's loss: the larger of the estimates from the first and the latest batches."""
        return max(_pooled(self.batches[:_FIRST]), _pooled(self.batches[-_FIRST:]))

    def room(self, noise: float) -> float:
        """Effective size of one spread, including the noise of the level and the uncertainty of the spread."""
        freedom = max(1, sum(examples - 1 for _, _, examples in self.batches[:_FIRST]))
        return noise * math.sqrt(1 + 1 / min(len(self.batches), _FIRST)) * _widening(freedom)


@cache
def _widening(freedom: int) -> float:
    return float(stdtrit(freedom, _TAIL) / ndtri(_TAIL))


def _pooled(batches: list[tuple[float, float, int]]) -> float:
    return math.sqrt(fmean(noise**2 for _, noise, _ in batches))


class _Suspicion(NamedTuple):
    """Evidence against a batch: a share of `limit`, its figure, and True if it is relative to the start."""

    share: float
    cause: str
    value: float
    usual: float
    since_start: bool


class LossJudge:
    """Judge of each batch in turn. It never raises, has no effect on the training, and works on any rank.

    chance: loss that never counts as a failure, however low it was before: the loss of guessing, for a reward model. A
        language model has none: it may collapse and still predict better than a uniform distribution.
    """

    def __init__(self, config: GuardConfig, chance: float = 0.0) -> None:
        self._config = config
        self._chance = chance
        self._loss = LossWatch("loss", config.window, config.window_least, _LEAST_LOSS_SPREAD)
        self._norms = (
            LossWatch("gradient norm", config.window, config.window_least, _LEAST_GRADIENT_SPREAD, logarithmic=True),
            LossWatch(
                "activation norm", config.window, config.window_least, _LEAST_ACTIVATION_SPREAD, logarithmic=True
            ),
        )
        self._start = _Start([])
        self._evidence = 0.0
        self._row: list[Figures] = []
        self._row_began = 0
        self._above: int | None = None

    @property
    def learns_the_noise(self) -> bool:
        """True if the next batch's `noise` is needed; later the spread of the batches is a better estimate."""
        return len(self._start.batches) < self._config.window_least

    def look(self, batch: int, figures: Figures, *, first: int | None = None) -> Alarm | None:
        """Return the alarm for batch number `batch`; None if there is none.

        Args:
            first: the batch in which its problem started, if that was earlier.
        """
        if self._start.batches and figures.loss <= self._config.divergence * self._start.level():
            self._above = None
        elif self._above is None:
            self._above = batch
        began = batch if first is None else first
        if broken := self._broken(figures):
            return Alarm(batch, self._row_began if self._evidence else began, *broken)
        suspicion = self._suspicious(figures)
        if not self._evidence:
            self._row_began = began
        self._evidence = max(0.0, self._evidence + (min(1.0, suspicion.share) if suspicion else 0.0) - _HALF)
        if suspicion and suspicion.share > _HALF:
            self._row.append(figures)
            if self._evidence >= (1 - _HALF) * self._config.patience:
                began = self._row_began
                if suspicion.since_start and self._above is not None:
                    began = min(began, self._above)
                return Alarm(batch, began, suspicion.cause, suspicion.value, suspicion.usual)
            return None
        if not self._evidence:
            # Batches whose suspicion did not last are healthy, too; but one that fell apart in between must not
            # raise the level of noise that the start tolerates.
            for earlier in self._row:
                self._see(earlier)
            self._row = []
        if self.learns_the_noise and figures.noise is not None:
            self._start.batches.append((figures.loss, figures.noise, figures.examples))
        self._see(figures)
        return None

    def _watched(self, figures: Figures) -> list[tuple[LossWatch, float]]:
        values = (figures.loss, figures.gradient, figures.activation)
        watches = (self._loss, *self._norms)
        return [(watch, value) for watch, value in zip(watches, values, strict=True) if value is not None]

    def _broken(self, figures: Figures) -> tuple[str, float, float] | None:
        """Return a failure that needs no confirmation by a second batch: cause, value and usual value."""
        if figures.loss_scale is not None and figures.loss_scale < self._config.least_loss_scale:
            return "loss scale", figures.loss_scale, math.nan
        for watch, value in self._watched(figures):
            if not math.isfinite(value):
                return watch.name, value, watch.usual()
        return None

    def _suspicious(self, figures: Figures) -> _Suspicion | None:
        """Return the strongest evidence against this batch."""
        loss, limit = figures.loss, self._config.limit
        if loss <= self._config.divergence * self._chance:
            return None
        suspicion = _Suspicion(self._loss.z(loss) / limit, "loss", loss, self._loss.usual(), False)
        if self._start.batches and loss > self._config.divergence * (level := self._start.level()):
            noise = max(self._start.noise(), self._loss.spread() if self._loss.knows else 0.0)
            share = (loss - level) / max(1e-12, limit * self._start.room(noise))
            if share > suspicion.share:
                suspicion = _Suspicion(share, "loss", loss, level, True)
        if _HALF < suspicion.share < 1 and (norm := self._beside_a_norm(figures)):
            return _Suspicion(1.0, *norm, False)
        return suspicion

    def _beside_a_norm(self, figures: Figures) -> tuple[str, float, float] | None:
        """Return the norm that is far above its usual value, if there is one."""
        for watch, value in self._watched(figures)[1:]:
            if watch.z(value) > self._config.limit:
                return watch.name, value, watch.usual()
        return None

    def _see(self, figures: Figures) -> None:
        for watch, value in self._watched(figures):
            watch.accept(value)

    def state_dict(self) -> dict[str, Any]:
        return {
            "watches": [watch.state_dict() for watch in (self._loss, *self._norms)],
            "start": [list(item) for item in self._start.batches],
            "row": [self._evidence, self._row_began, [asdict(item) for item in self._row]],
            "above": self._above,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for watch, saved in zip((self._loss, *self._norms), state["watches"], strict=True):
            watch.load_state_dict(saved)
        self._start.batches = [(loss, noise, examples) for loss, noise, examples in state["start"]]
        self._evidence, self._row_began, row = state["row"]
        self._row = [Figures(**item) for item in row]
        self._above = state["above"]
