"""Toxicity of sampled continuations: expected maximum toxicity and toxicity probability (Gehman et al. 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corpus.cleaning.toxicity import Scorer
from evaluation.config import ToxicityConfig
from evaluation.generation import Sampling
from evaluation.language_model import LoadedModel, sample_continuations
from evaluation.probes import read_prompts
from evaluation.statistics import bootstrap, share_of_clusters, wilson
from infra.run import Run


def measure_toxicity(
    lm: LoadedModel, config: ToxicityConfig, scorers: Sequence[Scorer], run: Run, *, seed: int, confidence: float
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Samples continuations and scores them without their prompts.

    scorers: the first makes the figures; what others say stands beside them, as `other_scorers`. Where sets are
    labelled, `quality` has for each scorer how well it agrees with people.
    Returns the results (overall and by kind of prompt) and what was generated, a row a prompt.
    """
    prompts = read_prompts(config)
    sampling = Sampling(config.max_new_tokens, config.temperature, config.top_p, seed)
    continuations = sample_continuations(
        lm, [row["prompt"] for row in prompts], config.samples_per_prompt, sampling, run
    )
    every_text = [text for texts in continuations for text in texts]
    scorer, others = scorers[0], scorers[1:]
    scores = scorer(every_text).reshape(len(prompts), -1)  # (P, K)
    kinds = sorted({row["kind"] for row in prompts})
    results: dict[str, Any] = {
        "scorer": scorer.name,
        "limits": scorer.limits,
        "prompts": len(prompts),
        "samples_per_prompt": config.samples_per_prompt,
        "max_new_tokens": config.max_new_tokens,
        "threshold": config.threshold,
        "overall": summarise(scores, config.threshold, seed, confidence),
        "by_kind": {
            kind: summarise(scores[[row["kind"] == kind for row in prompts]], config.threshold, seed, confidence)
            for kind in kinds
        },
    }
    if others:
        results["other_scorers"] = [
            {
                "scorer": other.name,
                "limits": other.limits,
                "overall": summarise(other(every_text).reshape(len(prompts), -1), config.threshold, seed, confidence),
            }
            for other in others
        ]
    if config.labelled:
        from evaluation.toxicity_scorers import scorer_quality

        results["quality"] = [
            {"scorer": one.name, **row}
            for one in scorers
            for row in scorer_quality(one, config.labelled, config.threshold, run.stop_if_cancelled)
        ]
    generations = [
        {
            **row,
            "continuations": [
                {"text": text, "toxicity": round(float(score), 6)}
                for text, score in zip(texts, row_scores, strict=True)
            ],
        }
        for row, texts, row_scores in zip(prompts, continuations, scores, strict=True)
    ]
    return results, generations


def summarise(scores: NDArray[np.float64], threshold: float, seed: int, confidence: float) -> dict[str, Any]:
    """The figures of scores (P prompts, K samples); the unit that is resampled is the prompt."""
    worst = scores.max(axis=1)
    toxic = worst >= threshold
    expected = bootstrap(worst, confidence=confidence, seed=seed)
    probability = wilson(int(toxic.sum()), toxic.size, confidence)
    # Continuations of one prompt are alike.
    every = share_of_clusters((scores >= threshold).sum(axis=1), scores.shape[1], confidence)
    return {
        "expected_max_toxicity": expected.as_json(),
        "toxicity_probability": probability.as_json(),
        "toxic_continuations": every.as_json(),
        "prompts": int(toxic.size),
    }
