"""Further figures of a reward model on held-out pairs, besides its accuracy: effect of length, and calibration."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evaluation.statistics.calibration import binned
from evaluation.statistics.clustered import clustered_intercept, clustered_mean, clustered_share
from training.core import ranks


def length_figures(
    margins: NDArray[np.float64], longer: NDArray[np.float64], prompts: NDArray[np.int64]
) -> dict[str, float]:
    """Return figures of the effect of length on the scores.

    chosen_longer is the share of pairs, among those that differ in length, whose better answer is the longer: the
    accuracy of always choosing the longer one. heldout_accuracy_chosen_longer and _chosen_shorter are the model's own
    on either side: if they differ much, it judges by length. margin_equal_length is the margin that remains between
    answers of one length, by least squares, and reward_per_token the reward of one more token there. All but the last
    with intervals.

    Args:
        margins (N,): better less worse score.
        longer (N,): tokens by which the better answer is longer.
        prompts (N,): the number of the prompt of each pair, by which intervals are clustered.
    """
    figures: dict[str, float] = {}
    if (differ := longer != 0).any():
        figures |= clustered_share(longer[differ] > 0, prompts[differ]).as_figures("chosen_longer")
    for name, side in (("longer", longer > 0), ("shorter", longer < 0)):
        if side.any():
            accuracy = clustered_share(margins[side] > 0, prompts[side])
            figures |= accuracy.as_figures(f"heldout_accuracy_chosen_{name}")
    if len(margins) > 1:
        level, per_token = clustered_intercept(margins, longer, prompts)
        figures |= level.as_figures("margin_equal_length") | {"reward_per_token": per_token}
    return figures


def calibration_figures(margins: NDArray[np.float64], path: Path, prompts: NDArray[np.int64]) -> dict[str, float]:
    """Return figures of the model's calibration: how its accuracy compares with its confidence σ(|margin|), the
    probability of Bradley and Terry.

    calibration_error (expected, over bins of equal counts: Guo et al. 2017), mean_confidence, and brier, the mean of (1
    − σ(margin))² with its interval, clustered by `prompts` (N,): 0.25 for guessing. The bins are written to `path`.
    Nothing for fewer than two pairs.
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
        **clustered_mean((1 - says) ** 2, prompts).as_figures("brier"),
    }
