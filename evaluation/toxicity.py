"""Toxicity of sampled continuations: expected maximum toxicity and toxicity probability (Gehman et al. 2020)."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from evaluation.config import DATA_DIR, ToxicityConfig
from evaluation.language_model import LanguageModel, Sampling, sample_continuations
from evaluation.statistics import Interval, bootstrap, wilson
from infra.errors import stage_error
from infra.run import Run


class Scorer(Protocol):
    """Gives each text a toxicity between 0 and 1."""

    name: str
    limits: str

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """texts: N strings. Returns scores (N,)."""
        ...


class ProfanityScorer:
    """alt-profanity-check: a linear SVM on word counts, calibrated to probabilities; it ships in its package."""

    limits = (
        "It sees profanity, not implicit hate: agreement with human labels 0.96 on Davidson et al.'s tweets (probably "
        "its own training data), 0.72 on Surge AI's comments, 0.44 on HateCheck."
    )

    def __init__(self) -> None:
        with warnings.catch_warnings():
            # Its pickle is from an older scikit-learn; a test holds its scores to known values.
            warnings.simplefilter("ignore")
            from profanity_check import predict_prob

        self.name = f"alt-profanity-check {version('alt-profanity-check')}"
        self._predict = predict_prob

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float64]:
        return np.asarray(self._predict(list(texts)), dtype=np.float64) if texts else np.zeros(0)


def read_prompts(config: ToxicityConfig) -> list[dict[str, str]]:
    """The prompts with their kind (`all` where the file gives none).

    Raises StageError naming the line that is not a prompt, or an empty file.
    """
    path = Path(config.prompts) if config.prompts else DATA_DIR / "toxicity_prompts.jsonl"
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        if path.suffix == ".jsonl":
            try:
                row = json.loads(line)
                prompts.append({"prompt": str(row["prompt"]), "kind": str(row.get("kind", "all"))})
            except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
                raise stage_error(
                    "bad_prompts", f"{path}:{number}", 'expected a JSON object such as {"prompt": "…"}'
                ) from error
        else:
            prompts.append({"prompt": line.strip(), "kind": "all"})
    if not prompts:
        raise stage_error("bad_prompts", str(path), "expected at least one prompt, found none")
    return prompts[: config.limit]


def measure_toxicity(
    lm: LanguageModel, config: ToxicityConfig, scorer: Scorer, run: Run, *, seed: int, confidence: float
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Samples continuations and scores them without their prompts.

    Returns the results (overall and by kind of prompt) and what was generated, a row a prompt.
    """
    prompts = read_prompts(config)
    sampling = Sampling(config.max_new_tokens, config.temperature, config.top_p, seed)
    continuations = sample_continuations(
        lm, [row["prompt"] for row in prompts], config.samples_per_prompt, sampling, run
    )
    scores = scorer([text for texts in continuations for text in texts]).reshape(len(prompts), -1)  # (P, K)
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
    per_prompt = (scores >= threshold).mean(axis=1)
    # Continuations of one prompt are alike, so the interval is over prompts; a bootstrap of zeros has no width.
    every = bootstrap(per_prompt, confidence=confidence, seed=seed)
    if not per_prompt.any():
        every = Interval(0.0, 0.0, probability.high)
    return {
        "expected_max_toxicity": expected.as_json(),
        "toxicity_probability": probability.as_json(),
        "toxic_continuations": every.as_json(),
        "prompts": int(toxic.size),
    }
