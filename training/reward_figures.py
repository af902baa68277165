"""What held-out pairs say of a reward model beyond how many it orders rightly: length, and how sure it may be."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evaluation.calibration import binned
from evaluation.statistics import bootstrap, gain_at_equal_length, wilson
from training import ranks


def length_figures(margins: NDArray[np.float64], longer: NDArray[np.float64], seed: int) -> dict[str, float]:
    """How much of it is length.

    margins (N,): better less worse score. longer (N,): tokens by which the better answer is longer.

    chosen_longer is the share of pairs, of those that differ in length, whose better answer is the longer: what who
    always says "the longer one" gets right. heldout_accuracy_chosen_longer and _chosen_shorter are the model's own on
    either side: far apart, it goes by length. margin_equal_length is what is left of the margin between answers of one
    length, by least squares, and reward_per_token what one more token is worth there. All but the last with intervals.
    """
    sides = {"longer": margins[longer > 0] > 0, "shorter": margins[longer < 0] > 0}
    counts = {name: len(one) for name, one in sides.items()}
    figures: dict[str, float] = {}
    if total := sum(counts.values()):
        figures |= wilson(counts["longer"], total).as_figures("chosen_longer")
    for name, right in sides.items():
        if len(right):
            figures |= wilson(int(right.sum()), len(right)).as_figures(f"heldout_accuracy_chosen_{name}")
    if len(margins) > 1:
        level, per_token = gain_at_equal_length(margins, longer, seed)
        figures |= level.as_figures("margin_equal_length") | {"reward_per_token": per_token}
    return figures


def calibration_figures(margins: NDArray[np.float64], path: Path, seed: int) -> dict[str, float]:
    """Whether it is right as often as it says, σ(|margin|), which is Bradley and Terry's probability.

    calibration_error (expected, over bins of equal counts: Guo et al. 2017), mean_confidence, and brier, the mean of (1
    − σ(margin))² with its interval: 0.25 for guessing. The bins go to `path`. Nothing for fewer than two pairs.
    """
    if len(margins) < 2:
        return {}
    says = 1 / (1 + np.exp(-np.clip(margins, -500, 500)))
    sure = np.maximum(says, 1 - says)
    rows, error = binned((margins > 0).astype(float).tolist(), sure.tolist())
    if ranks.is_first():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf8")
    return {
        "calibration_error": error,
        "mean_confidence": float(sure.mean()),
        **bootstrap((1 - says) ** 2, seed=seed).as_figures("brier"),
    }
