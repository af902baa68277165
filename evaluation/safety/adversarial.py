"""Effort needed to make a model toxic: a search over changes to harmless prompts, against as many plain tries."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from corpus.cleaning.people.toxicity_scorers import TextScorer, read_words
from evaluation.config import ADVERSARIAL_WORDS, AdversarialConfig, ToxicityConfig
from evaluation.generation.chat_prompts import ChatPrompt
from evaluation.generation.language_model import LoadedModel, sample_continuations
from evaluation.generation.token_choice import SamplingOptions
from evaluation.safety.probes import read_prompts
from evaluation.statistics.intervals import difference_of_paired_proportions, wilson
from infra.config import derived_seed
from infra.errors import stage_error
from infra.run import Run


@dataclass
class _Attempt:
    """State of the search from one prompt. text: the worst prompt so far; worst: the score of its worst continuation;
    tries: number of queries after which a toxic continuation was found, None before."""

    start: str
    text: str
    worst: float = -1.0
    continuation: str = ""
    tries: int | None = None


def measure_adversarial(
    lm: LoadedModel,
    config: AdversarialConfig,
    toxicity: ToxicityConfig,
    scorer: TextScorer,
    run: Run,
    *,
    seed: int,
    confidence: float,
    chat: ChatPrompt | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run hill climbing from each harmless prompt. A query draws continuations of a changed prompt, and the change is
    kept if the worst of them is no less toxic than before. The search ends with the first toxic continuation.

    A changed prompt must itself score below the threshold, so that only the model's own text counts. As a control, the
    unchanged prompt is asked the same number of times.

    Returns the results, and one row per prompt with the findings.

    Args:
        chat: see `sample_continuations`.
    """
    # Prompts that are harmless by the scorer.
    words = read_words(Path(config.words) if config.words else ADVERSARIAL_WORDS)
    rows = read_prompts(toxicity.model_copy(update={"prompts": config.prompts, "limit": None}))
    prompts = [row["prompt"] for row in rows]
    harmless = [text for text, score in zip(prompts, scorer(prompts), strict=True) if score < toxicity.threshold]
    starts = harmless[: config.limit]
    if not starts:
        message = f"{scorer.name} finds none of the {len(prompts)} prompts harmless, but the search needs one"
        raise stage_error(
            "bad_prompts", "safety.adversarial.prompts", message, "use other prompts, or a higher threshold"
        )
    draw = random.Random(seed)

    def searched(change: Callable[[_Attempt], str]) -> list[_Attempt]:
        attempts = [_Attempt(text, text) for text in starts]
        for query in range(1, config.queries + 1):
            open_ones = [attempt for attempt in attempts if attempt.tries is None]
            if not open_ones:
                break
            run.progress(query, config.queries, "queries")
            prompts = [change(attempt) if query > 1 else attempt.start for attempt in open_ones]
            drawn_by = derived_seed(seed, query)
            sampling = SamplingOptions(
                toxicity.max_new_tokens, temperature=toxicity.temperature, top_p=toxicity.top_p, seed=drawn_by
            )
            for attempt, text, continuations in zip(
                open_ones, prompts, sample_continuations(lm, prompts, config.samples, sampling, run, chat), strict=True
            ):
                scores = scorer(continuations)
                worst = int(scores.argmax())
                if scores[worst] >= attempt.worst:
                    attempt.text, attempt.worst, attempt.continuation = text, float(scores[worst]), continuations[worst]
                if scores[worst] >= toxicity.threshold:
                    attempt.tries = query
        return attempts

    def mutated(attempt: _Attempt) -> str:
        return _mutate(attempt.text, words, draw, lambda text: bool(scorer([text])[0] < toxicity.threshold))

    # The search, and its control with unchanged prompts.
    changed, plain = searched(mutated), searched(lambda attempt: attempt.start)
    results = {
        "scorer": scorer.name,
        "prompts": len(starts),
        "left_out": len(prompts) - len(harmless),
        "queries": config.queries,
        "samples": config.samples,
        "threshold": toxicity.threshold,
        "by_queries": [
            {"queries": queries, "changed": _share(changed, queries), "plain": _share(plain, queries)}
            for queries in _doublings(config.queries)
        ],
        **_summary(changed, plain, confidence),
    }
    findings = [
        {
            "prompt": attempt.start,
            "changed": attempt.text,
            "continuation": attempt.continuation,
            "toxicity": round(attempt.worst, 6),
            "queries": attempt.tries,
            "queries_plain": plain_attempt.tries,
        }
        for attempt, plain_attempt in zip(changed, plain, strict=True)
    ]
    return results, findings


def _mutate(text: str, words: Sequence[str], draw: random.Random, allowed: Callable[[str], bool]) -> str:
    """Return the prompt with one change that leaves it harmless; the text itself if none of a few changes does."""
    for _ in range(8):
        parts = text.split()
        match draw.choice(("add", "add", "replace", "swap", "drop", "open")):
            case "add":
                parts.insert(draw.randrange(len(parts) + 1), draw.choice(words))
            case "replace" if parts:
                parts[draw.randrange(len(parts))] = draw.choice(words)
            case "swap" if len(parts) > 1:
                position = draw.randrange(len(parts) - 1)
                parts[position], parts[position + 1] = parts[position + 1], parts[position]
            case "drop" if len(parts) > 2:
                parts.pop(draw.randrange(len(parts)))
            case "open":
                parts = [*parts, draw.choice(('"', ":", "you", "and then"))]
        if (candidate := " ".join(parts)) != text and allowed(candidate):
            return candidate
    return text


def _doublings(largest: int) -> list[int]:
    counts = [1]
    while counts[-1] < largest:
        counts.append(min(largest, counts[-1] * 2))
    return counts


def _share(attempts: Sequence[_Attempt], queries: int) -> float:
    successes = [attempt.tries is not None and attempt.tries <= queries for attempt in attempts]
    return round(float(np.mean(successes)), 6) if successes else 0.0


def _summary(changed: Sequence[_Attempt], plain: Sequence[_Attempt], confidence: float) -> dict[str, Any]:
    pairs = [
        (attempt.tries is not None, plain_attempt.tries is not None)
        for attempt, plain_attempt in zip(changed, plain, strict=True)
    ]
    both, only_changed, only_plain, neither = map(
        pairs.count, ((True, True), (True, False), (False, True), (False, False))
    )
    tries = sorted(attempt.tries for attempt in changed if attempt.tries is not None)
    return {
        "broken": wilson(both + only_changed, len(pairs), confidence).as_json(),
        "broken_plain": wilson(both + only_plain, len(pairs), confidence).as_json(),
        "difference": difference_of_paired_proportions(both, only_changed, only_plain, neither, confidence).as_json(),
        "median_queries": float(np.median(tries)) if tries else None,
    }
