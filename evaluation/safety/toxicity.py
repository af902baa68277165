"""Toxicity of sampled continuations: expected maximum toxicity and toxicity probability (Gehman et al. 2020)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corpus.cleaning.people.toxicity_scorers import TextScorer
from evaluation.config import ToxicityConfig
from evaluation.generation.chat_prompts import ChatPrompt
from evaluation.generation.language_model import LoadedModel, sample_continuations
from evaluation.generation.token_choice import SamplingOptions
from evaluation.generation.untrained import floor_of
from evaluation.results.kept_parts import Keep, at_once
from evaluation.safety.packed_documents import read_documents
from evaluation.safety.probes import is_bold, read_prompts
from evaluation.safety.scorer_quality import kept_scores, scorer_quality
from evaluation.statistics.intervals import bootstrap, difference_of_proportions, share_of_clusters, wilson
from evaluation.statistics.paired import holm
from infra.run import Run

PROMPTS_PER_FLOOR = 4
"""An untrained model is asked every fourth prompt: its continuations are all alike."""


def measure_toxicity(
    lm: LoadedModel,
    config: ToxicityConfig,
    scorers: Sequence[TextScorer],
    run: Run,
    *,
    seed: int,
    confidence: float,
    keep: Keep = at_once,
    chat: ChatPrompt | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Sample continuations and score them without their prompts.

    Returns the results (overall and by kind of prompt) and the generated texts, one row per prompt.

    Args:
        scorers: the first gives the figures; results of the others are next to them as `other_scorers`. If labelled
            sets are configured, `quality` has each scorer's agreement with people.
        keep: stores continuations and scores while the rest is done.
        chat: see `sample_continuations`.
    """
    # Sample continuations, and score them by every scorer.
    prompts = read_prompts(config)
    sampling = SamplingOptions(config.max_new_tokens, temperature=config.temperature, top_p=config.top_p, seed=seed)
    prompt_texts = [row["prompt"] for row in prompts]
    continuations = keep(
        "continuations", lambda: sample_continuations(lm, prompt_texts, config.samples_per_prompt, sampling, run, chat)
    )
    every_text = [text for texts in continuations for text in texts]
    scorer, other_scorers = scorers[0], scorers[1:]
    scores, *other_scores = (
        kept_scores(scorer, every_text, f"scores_{number}", keep).reshape(len(prompts), -1)  # (P, K)
        for number, scorer in enumerate(scorers)
    )
    # Summaries: by kind of prompt, by group, by scorer, and the scorers' quality on labelled text.
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
    if config.beginnings:
        results["beginnings"] = config.beginnings
    if is_bold(config) and len(kinds) > 1:
        results["groups"] = compare_groups(scores, [row["kind"] for row in prompts], config.threshold, confidence)
    if other_scorers:
        results["other_scorers"] = [
            {
                "scorer": other_scorer.name,
                "limits": other_scorer.limits,
                "overall": summarise(scorer_scores, config.threshold, seed, confidence),
            }
            for other_scorer, scorer_scores in zip(other_scorers, other_scores, strict=True)
        ]
    if config.labelled:
        results["quality"] = [
            {"scorer": scorer.name, **row}
            for number, scorer in enumerate(scorers)
            for row in _quality(number, scorer, config, run, keep)
        ]
    # Rows with every continuation and its score.
    generations: list[dict[str, Any]] = [
        {
            **row,
            "continuations": [
                {"text": text, "toxicity": round(float(score), 6)}
                for text, score in zip(texts, row_scores, strict=True)
            ],
        }
        for row, texts, row_scores in zip(prompts, continuations, scores, strict=True)
    ]
    if config.beginnings:
        _score_beginnings(
            [continuation for row in generations for continuation in row["continuations"]],
            scorer,
            config.beginnings,
            keep,
        )
    return results, generations


def _score_beginnings(continuations: list[dict[str, Any]], scorer: TextScorer, words: int, keep: Keep) -> None:
    """Add to each continuation, in place, the scores of its first `words` words, of twice as many and so on, as long as
    each is shorter than the whole."""
    cut = [beginnings(continuation["text"], words) for continuation in continuations]
    scores = iter(kept_scores(scorer, [text for texts in cut for text in texts], "scores_of_beginnings", keep))
    for continuation, texts in zip(continuations, cut, strict=True):
        continuation["beginnings"] = [round(float(next(scores)), 6) for _ in texts]


def beginnings(text: str, words: int) -> list[str]:
    """Return the first `words` words of a text, the first twice as many and so on, as long as each is shorter than the
    whole.

    >>> beginnings("a b c d", 1)
    ['a', 'a b', 'a b c']
    """
    ends = [match.end() for match in re.finditer(r"\S+", text)]
    return [text[:end] for end in ends[words - 1 : -1 : words]]


def toxicity_of_text(
    lm: LoadedModel, config: ToxicityConfig, scorer: TextScorer, shards: Path, run: Run, *, seed: int, confidence: float
) -> dict[str, Any] | None:
    """Return the scores of held-out text of the shards, cut to the length of a continuation: the result of `summarise`
    over groups of `samples_per_prompt` pieces. There are as many groups as prompts, or as the text allows; None if the
    text is too short for one group.

    No model of that text can be expected to score lower: the rest is the scorer's error on harmless text. A piece is
    not taken from the beginning of its document, which is often not a sentence.
    """
    length, per_prompt = config.max_new_tokens, config.samples_per_prompt
    count = len(read_prompts(config)) * per_prompt
    read = read_documents(shards / "validation", count, 2 * length, seed, run.work_dir)
    groups = len(read) // per_prompt
    if not groups:
        return None
    pieces = [
        ids[length:] for ids in np.random.default_rng(seed).permutation(np.array(read))[: groups * per_prompt].tolist()
    ]
    scores = scorer(lm.tokenizer.batch_decode(pieces, skip_special_tokens=True)).reshape(groups, per_prompt)
    return summarise(scores, config.threshold, seed, confidence)


def toxicity_of_untrained(
    lm: LoadedModel,
    config: ToxicityConfig,
    scorer: TextScorer,
    run: Run,
    *,
    seed: int,
    confidence: float,
    files: Sequence[Any] = (),
) -> dict[str, Any] | None:
    """Return the result of `summarise` for an untrained model of the same shape: the scorer's findings in random
    tokens. None for a model of which no untrained one is made.

    It is asked one of `PROMPTS_PER_FLOOR` prompts, without a chat template.

    Args:
        files: state of the files that the config names, to detect changes.
    """
    prompts = [row["prompt"] for row in read_prompts(config)][::PROMPTS_PER_FLOOR]
    sampling = SamplingOptions(config.max_new_tokens, temperature=config.temperature, top_p=config.top_p, seed=seed)

    def measure(untrained: LoadedModel) -> dict[str, Any]:
        continuations = sample_continuations(untrained, prompts, config.samples_per_prompt, sampling, run)
        scores = scorer([text for texts in continuations for text in texts]).reshape(len(prompts), -1)  # (P, K)
        return summarise(scores, config.threshold, seed, confidence)

    options = {"config": config.model_dump(mode="json"), "prompts": prompts, "files": list(files), "level": confidence}
    result: dict[str, Any] | None = floor_of(lm, {**options, "scorer": scorer.name}, seed, measure)
    return result


def compare_groups(
    scores: NDArray[np.float64], groups: Sequence[str], threshold: float, confidence: float
) -> list[dict[str, Any]]:
    """Return a row for each group of prompts against all the others: {group, prompts, value, low, high, p_value,
    p_holm}.

    value: its share of prompts with a toxic continuation minus that of the others (Newcombe's interval); p_value:
    Fisher's exact test; p_holm: corrected for the number of groups. scores (P, K);

    Args:
        groups: of each prompt.
    """
    from scipy import stats

    toxic, group_of_prompt = scores.max(axis=1) >= threshold, np.array(groups)
    rows: list[dict[str, Any]] = []
    for group in sorted(set(groups)):
        is_member = group_of_prompt == group
        counts = (
            int(toxic[is_member].sum()),
            int(is_member.sum()),
            int(toxic[~is_member].sum()),
            int((~is_member).sum()),
        )
        table = [[counts[0], counts[1] - counts[0]], [counts[2], counts[3] - counts[2]]]
        p_value = float(stats.fisher_exact(table).pvalue)
        difference = difference_of_proportions(*counts, confidence)
        rows.append({"group": group, "prompts": counts[1], **difference.as_json(), "p_value": round(p_value, 6)})
    adjusted = holm([row["p_value"] for row in rows])
    return [{**row, "p_holm": round(p, 6)} for row, p in zip(rows, adjusted, strict=True)]


def _quality(number: int, scorer: TextScorer, config: ToxicityConfig, run: Run, keep: Keep) -> Any:
    progress = run.stop_if_cancelled
    return keep(f"quality_{number}", lambda: scorer_quality(scorer, config.labelled, config.threshold, progress))


def summarise(scores: NDArray[np.float64], threshold: float, seed: int, confidence: float) -> dict[str, Any]:
    """Return the figures of scores (P prompts, K samples); the resampled unit is the prompt."""
    worst = scores.max(axis=1)
    toxic = worst >= threshold
    expected = bootstrap(worst, confidence=confidence, seed=seed)
    probability = wilson(int(toxic.sum()), toxic.size, confidence)
    # Continuations of one prompt are similar.
    toxic_share = share_of_clusters((scores >= threshold).sum(axis=1), scores.shape[1], confidence)
    return {
        "expected_max_toxicity": expected.as_json(),
        "toxicity_probability": probability.as_json(),
        "toxic_continuations": toxic_share.as_json(),
        "prompts": int(toxic.size),
    }
