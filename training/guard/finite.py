"""Final checks of a training: a model with NaN or infinity is an error, not a result."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import nn

from corpus.model_folders.folder import named
from corpus.model_folders.pretrained import is_finite
from infra.errors import stage_error
from training.core import ranks
from training.distributed.gradients import local

_FIX = (
    "lower optimizer.learning_rate, leave guard.enabled at true, look for batches of extreme data, and build the stage "
    "again with --force"
)


def check_finite(stage: str, model: nn.Module, loss: float) -> None:
    """Raise StageError `not_finite` where a weight of a trained model, or the loss of its last batch, is NaN or
    infinite. The guard stops at such a loss while it trains; it may be off, and an update after the last loss has
    none. Every rank must call.

    Args:
        stage: its dotted key.
        model: as it was trained, sharded or not.
        loss: of the last batch that the weights were updated by, over all ranks.
    """
    broken = [name for name, weight in model.named_parameters() if not is_finite(local(weight.detach()))]
    gathered = ranks.gather((broken, loss))
    broken = sorted({name for names, _ in gathered for name in names})
    losses = [loss for _, loss in gathered if not math.isfinite(loss)]
    if not broken and not losses:
        return
    finding = f"found NaN or infinity in {named(broken)}" if broken else f"the last loss is {losses[0]}"
    raise stage_error("not_finite", stage, f"expected a trained model of finite numbers; {finding}", _FIX)


def check_measured(stage: str, figures: Mapping[str, float]) -> None:
    """Raise StageError `not_finite` where a loss or KL that was measured of a trained model is NaN or infinite: its
    weights may be finite and its hidden states not."""
    broken = [
        f"{name} is {value}"
        for name, value in figures.items()
        if ("loss" in name or "kl" in name.split("_"))
        and not name.endswith(("_low", "_high"))
        and not math.isfinite(value)
    ]
    if broken:
        raise stage_error("not_finite", stage, f"expected a trained model with finite losses; {named(broken)}", _FIX)
