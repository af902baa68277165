"""Figures of held-out answers of two models: the model that a training began from, and the trained one.

Shapes: P prompts, A answers; the answers to each prompt, equally many, are consecutive.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from evaluation.statistics.clustered import clustered_intercept, clustered_mean, clustered_share
from evaluation.statistics.intervals import Interval, share_of_clusters
from training.chat.base import Chat
from training.core.hardware import Hardware
from training.generation.completions import Completions, scores_of
from training.train_modules.scorer import Scorer


def raw_scores(
    scorer: Scorer, answers: Mapping[str, Completions], chat: Chat, hardware: Hardware
) -> dict[str, NDArray[np.float64]]:
    """Raw scores (A,) of the answers of each model."""
    return {name: scores_of(scorer, side, chat, hardware).double().numpy() for name, side in answers.items()}


def score_figures(
    by: str,
    scores: Mapping[str, NDArray[np.float64]],
    lengthening: NDArray[np.float64],
    of: NDArray[np.bool_],
    clusters: NDArray[np.int64],
) -> dict[str, float]:
    """Return figures of the reward model's or the judge's scores (`by`) on the prompts `of`; nothing where these are
    fewer than two.

    Args:
        scores: by model, the one before and the one after, the mean of its answers (P,).
        lengthening (P,): tokens by which the later one's are longer.
        clusters (P,): the number of the conversation of each prompt.
    """
    if of.sum() < 2:
        return {}
    before, after = scores.values()
    gain = after[of] - before[of]
    level, per_token = clustered_intercept(gain, lengthening[of], clusters[of])
    figures = clustered_mean(gain, clusters[of]).as_figures(f"{by}_gain")
    figures |= level.as_figures(f"{by}_gain_equal_length")
    for name, each in scores.items():
        figures |= clustered_mean(each[of], clusters[of]).as_figures(f"heldout_{by}_{name}")
    return {**figures, f"{by}_per_token": per_token}


def lengthening(before: Completions, after: Completions) -> NDArray[np.float64]:
    """Tokens (A,) by which the answers after are longer than those before."""
    return np.array([len(a) - len(b) for a, b in zip(after.ids, before.ids, strict=True)], float)


def means(values: NDArray[np.float64], each: int) -> NDArray[np.float64]:
    """The mean (P,) over the `each` answers to a prompt, from values (A,)."""
    averages: NDArray[np.float64] = values.reshape(-1, each).mean(1)
    return averages


def share(hits: NDArray[np.float64], each: int, clusters: NDArray[np.int64]) -> Interval:
    """Return the share of hits over all answers, with its interval.

    The `each` answers to a prompt may be correlated, as may those of prompts in one cluster.

    Args:
        hits: 1 for a hit, else 0, of each answer (A,).
        each: number of answers to each prompt; A = P · each.
        clusters: number of each prompt's cluster (P,).
    """
    if each > 1 and len(np.unique(clusters)) == len(clusters):
        return share_of_clusters(hits.reshape(-1, each).sum(1), each)
    return clustered_share(hits, np.repeat(clusters, each))


def answer_figures(answers: Mapping[str, Completions], each: int, clusters: NDArray[np.int64]) -> dict[str, float]:
    """Return answer_tokens_… and ends_share_… (the share that ended by themselves, with its interval) of each model."""
    figures: dict[str, float] = {}
    for name, side in answers.items():
        figures[f"answer_tokens_{name}"] = sum(map(len, side.ids)) / len(side.ids)
        figures |= share(side.finished.double().numpy(), each, clusters).as_figures(f"ends_share_{name}")
    return figures
