"""Effects and costs of a toxicity mitigation, against the plain model over the same prompts and items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from evaluation.config.mitigations import MitigationsConfig
from infra.run import Run

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from evaluation.generation.language_model import LoadedModel
    from evaluation.statistics.intervals import Interval


@dataclass(frozen=True)
class Measured:
    """Measurements of one mitigation, or of the plain model.

    chosen_by: selector of its continuations, if any. drawn_per_kept: continuations drawn per kept continuation.
    scores: (P prompts, K continuations). right: by task, the score of each item, 0 or 1 except in a few tasks; None if
    likelihoods are unchanged. nats: of its continuations under the plain model, per token.
    """

    name: str
    kind: str
    chosen_by: str | None
    drawn_per_kept: int
    texts: list[list[str]]
    scores: NDArray[np.float64]
    right: dict[str, dict[int, float]] | None
    nats: float


def nats_per_token(lm: LoadedModel, prompts: Sequence[str], texts: Sequence[Sequence[str]], run: Run) -> float:
    """Return the mean negative log likelihood per token of all continuations after their prompts, in nats: fluency as
    Liu et al. 2021 (DExperts) measure it, but by the plain model instead of a larger one; 0 if all continuations are
    empty."""
    from evaluation.generation.language_model import token_log_likelihoods

    sequences, starts = [], []
    for prompt, prompt_texts in zip(prompts, texts, strict=True):
        prompt_ids = [lm.start_token, *lm.tokenizer.encode(prompt, add_special_tokens=False)]
        for text in prompt_texts:
            if ids := lm.tokenizer.encode(text, add_special_tokens=False):
                prompt_budget = max(1, lm.max_tokens - len(ids))
                starts.append(len(prompt_ids[-prompt_budget:]) - 1)
                sequences.append([*prompt_ids[-prompt_budget:], *ids][: lm.max_tokens])
    if not sequences:
        return 0.0
    scored = token_log_likelihoods(lm, sequences, run, "fluency")
    answer_scores = [scores[start:] for (scores, _), start in zip(scored, starts, strict=True)]
    return -sum(float(scores.sum()) for scores in answer_scores) / sum(scores.numel() for scores in answer_scores)


def distinct_pairs(texts: Sequence[Sequence[str]]) -> float:
    """Return distinct word pairs over all pairs, in the continuations of each prompt (Li et al. 2016); their mean."""
    shares = []
    for prompt_texts in texts:
        pairs = [pair for words in map(str.split, prompt_texts) for pair in pairwise(words)]
        if pairs:
            shares.append(len(set(pairs)) / len(pairs))
    return float(np.mean(shares)) if shares else 0.0


def accuracies(right: Mapping[str, Mapping[int, float]] | None, config: MitigationsConfig) -> dict[str, Any]:
    from evaluation.statistics.intervals import bootstrap, wilson

    def accuracy(items: list[float]) -> Interval:
        if set(items) <= {0, 1}:
            return wilson(int(sum(items)), len(items), config.confidence)
        return bootstrap(items, confidence=config.confidence, seed=config.seed)

    return {task: accuracy([*items.values()]).as_json() for task, items in (right or {}).items()}


def changes(plain: Measured, mitigated: Measured, config: MitigationsConfig) -> dict[str, Any]:
    """Return the changes by a mitigation over the same prompts and items, with intervals: the bootstrap over prompts
    for means, Newcombe's for pairs of shares, and McNemar's p-value. For tasks see `_paired_score`."""
    from evaluation.statistics.intervals import bootstrap

    worst = mitigated.scores.max(axis=1), plain.scores.max(axis=1)
    toxic = [side >= config.toxicity.threshold for side in worst]
    tasks: dict[str, dict[str, float]] = {}
    for task, items in (mitigated.right or {}).items():
        before = (plain.right or {}).get(task, {})
        if items.keys() == before.keys():
            now, baseline = (np.array([side[number] for number in items]) for side in (items, before))
            if change := _paired_score(now, baseline, config):
                tasks[task] = change
    mean = bootstrap(worst[0] - worst[1], confidence=config.confidence, seed=config.seed)
    return {
        "change": {
            "expected_max_toxicity": mean.as_json(),
            "toxicity_probability": _paired_share(*toxic, confidence=config.confidence),
        },
        "task_changes": tasks,
    }


def _paired_score(now: NDArray[np.float64], before: NDArray[np.float64], config: MitigationsConfig) -> dict[str, float]:
    """Return the change of an accuracy over the same items (N,). If items have scores between right and wrong, the
    interval is the bootstrap's and the p-value is that of sign flips; empty for a single item, which does not show how
    items differ."""
    from evaluation.statistics.intervals import bootstrap
    from evaluation.statistics.paired import sign_flip_p_value

    if np.isin([now, before], (0, 1)).all():
        return _paired_share(now == 1, before == 1, confidence=config.confidence)
    gains = now - before
    if len(gains) < 2:
        return {}
    interval = bootstrap(gains, confidence=config.confidence, seed=config.seed)
    return {**interval.as_json(), "p_value": round(sign_flip_p_value(gains), 6)}


def _paired_share(now: NDArray[np.bool_], before: NDArray[np.bool_], *, confidence: float) -> dict[str, float]:
    from evaluation.statistics.intervals import difference_of_paired_proportions, mcnemar_p_value

    both, neither = int((now & before).sum()), int((~now & ~before).sum())
    only_now, only_before = int((now & ~before).sum()), int((~now & before).sum())
    interval = difference_of_paired_proportions(both, only_now, only_before, neither, confidence)
    return {**interval.as_json(), "p_value": round(mcnemar_p_value(only_before, only_now), 6)}
