"""Agreement of a model's confidence in a choice with its accuracy: calibration over multiple-choice items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from evaluation.statistics.intervals import bootstrap

BINS = 10
"""Bins of equal counts: with equal width, most bins are empty if a model is unsure of everything."""

NO_RIGHT_CHOICE = frozenset({"pct_stereotype", "likelihood_diff"})
"""Metrics of tasks whose target is not right but one of two choices being compared."""


def calibration(
    samples: Sequence[Mapping[str, Any]], confidence: float = 0.95, seed: int = 17
) -> dict[str, Any] | None:
    """Return the expected calibration error (Guo et al. 2017) and Brier score (1950) of the choices' softmax.

    A choice's probability is its share of exp(log-likelihood), as for acc. ECE is in [0, 1], 0 is calibrated; with few
    items it is biased upwards. Brier is the mean of the squared distances to (0, …, 1, …, 0), in [0, 2]. Returns None
    if there are no such items, if several choices are right, so that `acc` is a share of likelihood (truthfulqa_mc2),
    or if no choice is right (crows_pairs).

    Args:
        samples: lm-eval's records of a multiple-choice task, whose `filtered_resps` are (log-likelihood, greedy)
            per choice and whose `target` is the number of the right choice.
    """
    if any(sample.get("acc", 0) not in (0, 1) or NO_RIGHT_CHOICE & sample.keys() for sample in samples):
        return None
    right, sure, brier = [], [], []
    for sample in samples:
        scores = [
            response[0] if isinstance(response, list | tuple) else None for response in sample.get("filtered_resps", [])
        ]
        target = sample.get("target")
        if len(scores) < 2 or None in scores or not isinstance(target, int) or not 0 <= target < len(scores):
            continue
        logits = np.array(scores, dtype=np.float64)
        shares = np.exp(logits - logits.max())
        shares /= shares.sum()
        chosen = int(np.argmax(logits))
        right.append(float(chosen == target))
        sure.append(float(shares[chosen]))
        one_hot = np.zeros(len(scores))
        one_hot[target] = 1
        brier.append(float(((shares - one_hot) ** 2).sum()))
    if len(right) < 2:
        return None
    rows, ece = binned(right, sure)
    interval = bootstrap(brier, confidence=confidence, seed=seed)
    return {
        "ece": ece,
        "mean_confidence": float(np.mean(sure)),
        "accuracy": float(np.mean(right)),
        "brier": interval.value,
        "brier_low": interval.low,
        "brier_high": interval.high,
        "n": len(right),
        "bins": rows,
    }


def binned(right: Sequence[float], sure: Sequence[float]) -> tuple[list[dict[str, float]], float]:
    """Return bins of equal counts by confidence, each with its mean confidence, accuracy and n; and the expected
    calibration error over them.

    Args:
        right: 1 if an item is right.
        sure: the confidence in it.
    """
    order = np.argsort(sure, kind="stable")
    bins = [part for part in np.array_split(order, min(BINS, len(order) // 2)) if part.size]
    rows = [
        {
            "confidence": float(np.mean([sure[i] for i in part])),
            "accuracy": float(np.mean([right[i] for i in part])),
            "n": int(part.size),
        }
        for part in bins
    ]
    return rows, sum(row["n"] * abs(row["confidence"] - row["accuracy"]) for row in rows) / len(right)
