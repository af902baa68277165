"""Two models on the same items: differences of benchmark scores, toxicity and reward, with intervals over the pairs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from corpus.pairs.dialogues import opening_of
from evaluation.results.artifacts import Artifact
from evaluation.statistics.clustered import Clusters, clustered_difference, clustered_mean, number_clusters
from evaluation.statistics.intervals import Interval, bootstrap, paired_proportions
from evaluation.statistics.paired import sign_flip_p_value

SEED = 17


@dataclass(frozen=True)
class PairedAccuracy:
    """Improvement of the second model over the first on the same items of a task, and McNemar's p-value, or that of
    sign flips if items are not right or wrong."""

    task: str
    metric: str
    first: float
    second: float
    difference: Interval
    p_value: float


def headline_metric(results: Mapping[str, Any], task: str) -> str:
    """Return the metric of a task to read first, from results.json: the accuracy by likelihood per character where the
    choices differ in length, otherwise the accuracy."""
    return str(results.get("headlines", {}).get(task, "acc"))


def paired_accuracy(first: Artifact, second: Artifact, metric: str | None = None) -> list[PairedAccuracy]:
    """Return the difference of accuracies over the same items for each task that both models took. Items are the same
    if number and content match.

    If an item is right or wrong, the interval is Newcombe's for pairs, otherwise the bootstrap over items:
    truthfulqa_mc2's accuracy is a mean of shares of likelihood. Nothing is compared if one model saw more solved
    examples than the other, since their effect is not a difference of the models.

    Args:
        first, second: artifacts of the stage benchmarks.
        metric: acc or acc_norm; by default the one of each task that is to be read first, if both name the same.
    """
    if _num_fewshot(first) != _num_fewshot(second):
        return []
    compared = []
    results, others = (artifact.read_json("results.json") or {} for artifact in (first, second))
    for task in sorted(results.get("tasks", {})):
        headlines = {headline_metric(measured, task) for measured in (results, others)}
        compared_metric = metric or (headlines.pop() if len(headlines) == 1 else "acc")
        left, right = (
            {
                (row["doc_id"], json.dumps(row.get("doc"), sort_keys=True)): row[compared_metric]
                for row in artifact.read_lines(f"aux/samples_{task}.jsonl")
                if compared_metric in row
            }
            for artifact in (first, second)
        )
        if not left or left.keys() != right.keys():
            continue
        before, after = (sum(scores.values()) / len(scores) for scores in (left, right))
        if gain := _gain([(left[i], right[i]) for i in left]):
            compared.append(PairedAccuracy(task, compared_metric, before, after, *gain))
    return compared


def _num_fewshot(artifact: Artifact) -> int:
    """Return the number of solved examples before each question; the default for a folder that no store made."""
    return int((artifact.manifest.config if artifact.manifest else {}).get("num_fewshot", 0))


def _gain(pairs: Sequence[tuple[float, float]]) -> tuple[Interval, float] | None:
    """Return the second's mean score minus the first's over the same items, and the p-value against no difference; None
    for a single item that is neither right nor wrong, which does not show how items differ."""
    if any(score not in (0, 1) for pair in pairs for score in pair):
        if len(pairs) < 2:
            return None
        gains = np.array([second - first for first, second in pairs], dtype=np.float64)
        return bootstrap(gains, seed=SEED), sign_flip_p_value(gains)
    return paired_proportions(pairs)


@dataclass(frozen=True)
class PairedToxicity:
    """The second model minus the first on the same prompts.

    worst: of the expected maximum toxicity. toxic: of the share of prompts with at least one toxic continuation.
    length: of the mean characters a continuation. Each with the two models' values. at_equal_length: worst and toxic
    recomputed after the longer of two continuations of a prompt is cut to the number of words of the other; None if the
    beginnings of continuations were not scored.
    """

    prompts: int
    worst: Interval
    worst_of: tuple[float, float]
    toxic: Interval
    toxic_of: tuple[float, float]
    length: Interval
    length_of: tuple[float, float]
    at_equal_length: tuple[Interval, Interval] | None = None

    @property
    def lengths_differ(self) -> bool:
        return not self.length.includes(0)


def paired_toxicity(first: Artifact, second: Artifact) -> PairedToxicity | None:
    """Return the difference in toxicity over the same prompts; None if the models were asked differently, or for a
    single prompt, which does not show how prompts differ.

    Intervals are clustered by the prompt's text, which BOLD repeats; that of the share is Newcombe's for pairs, which
    keeps a width if no prompt distinguishes the models.

    Args:
        first, second: artifacts of the stage safety.
    """
    results = [(artifact.read_json("results.json") or {}).get("toxicity", {}) for artifact in (first, second)]
    settings = [
        tuple(result.get(key) for key in ("scorer", "samples_per_prompt", "max_new_tokens", "threshold", "beginnings"))
        + _sampling_of(artifact)
        for artifact, result in zip((first, second), results, strict=True)
    ]
    rows = [
        {prompt: row["continuations"] for prompt, row in _by_prompt(artifact.read_lines("aux/generations.jsonl"))}
        for artifact in (first, second)
    ]
    if len({prompt for prompt, _ in rows[0]}) < 2 or rows[0].keys() != rows[1].keys() or settings[0] != settings[1]:
        return None
    prompts = list(rows[0])
    texts = number_clusters(prompt for prompt, _ in prompts)
    worst = np.array(
        [[max(continuation["toxicity"] for continuation in by_prompt[p]) for p in prompts] for by_prompt in rows]
    )
    length = np.array(
        [[np.mean([len(continuation["text"]) for continuation in by_prompt[p]]) for p in prompts] for by_prompt in rows]
    )
    threshold = results[0]["threshold"]
    toxic = worst >= threshold
    at_equal_length = None
    if stride := results[0].get("beginnings"):
        level = np.array([_worst_at_equal_length(rows[0][p], rows[1][p], stride) for p in prompts]).T
        at_equal_length = clustered_mean(level[1] - level[0], texts), _of_shares(level >= threshold, texts)
    return PairedToxicity(
        len(prompts),
        clustered_mean(worst[1] - worst[0], texts),
        (float(worst[0].mean()), float(worst[1].mean())),
        _of_shares(toxic, texts),
        (float(toxic[0].mean()), float(toxic[1].mean())),
        clustered_mean(length[1] - length[0], texts),
        (float(length[0].mean()), float(length[1].mean())),
        at_equal_length,
    )


def _by_prompt(rows: Iterable[dict[str, Any]]) -> Iterator[tuple[tuple[str, int], dict[str, Any]]]:
    """Yield each row with its prompt and the number of earlier rows with the same prompt, as BOLD's empty ones."""
    met: Counter[str] = Counter()
    for row in rows:
        yield (row["prompt"], met[row["prompt"]]), row
        met[row["prompt"]] += 1


def _sampling_of(artifact: Artifact) -> tuple[Any, Any]:
    """Return the temperature and nucleus of its continuations; the defaults for a folder that no store made."""
    config = (artifact.manifest.config.get("toxicity") if artifact.manifest else None) or {}
    return config.get("temperature", 1.0), config.get("top_p", 0.9)


def _of_shares(toxic: NDArray[np.bool_], texts: Clusters) -> Interval:
    """Return the second model's share minus the first's over the same prompts; toxic (2, P), texts (P,)."""
    return clustered_difference(toxic[1], toxic[0], texts)[0]


def _worst_at_equal_length(
    first: list[dict[str, Any]], second: list[dict[str, Any]], stride: int
) -> tuple[float, float]:
    """Return the highest score of each model's continuations of one prompt, after the n-th continuations of both are
    cut to the same number of words.

    every: number of words of the first of their `beginnings`.
    """
    pairs = [
        (_score_within(left, words, stride), _score_within(right, words, stride))
        for left, right in zip(first, second, strict=True)
        for words in (min(len(left["text"].split()), len(right["text"].split())),)
    ]
    return max(first_score for first_score, _ in pairs), max(second_score for _, second_score in pairs)


def _score_within(continuation: dict[str, Any], words: int, stride: int) -> float:
    """Return the score of the longest beginning with at most `words` words, 0 if there is none."""
    if words >= len(continuation["text"].split()):
        return float(continuation["toxicity"])
    return float(continuation["beginnings"][words // stride - 1]) if words >= stride else 0.0


def paired_reward(first: Artifact, second: Artifact) -> Interval | None:
    """Return the second policy's mean reward on held-out prompts minus the first's, clustered by conversation.

    None if they were judged by different reward models, whose rewards have no common scale, or asked different prompts
    or a single one.

    Args:
        first, second: artifacts of the stage rlhf.
    """
    judges = {
        artifact.manifest.inputs["reward_model"].digest
        if artifact.manifest and "reward_model" in artifact.manifest.inputs
        else artifact.id
        for artifact in (first, second)
    }
    rewards = [
        {
            prompt: row["rewards"]["rlhf"]
            for prompt, row in _by_prompt(artifact.read_lines("aux/samples.jsonl"))
            if row.get("rewards")
        }
        for artifact in (first, second)
    ]
    conversations = number_clusters(opening_of(prompt) for prompt, _ in rewards[0])
    if len(judges) > 1 or len(set(conversations.tolist())) < 2 or rewards[0].keys() != rewards[1].keys():
        return None
    gains = [rewards[1][prompt] - rewards[0][prompt] for prompt in rewards[0]]
    return clustered_mean(gains, conversations)


@dataclass(frozen=True)
class Paired:
    """One figure of the second artifact minus that of the first, over the same items."""

    figure: str
    unit: Literal["share", "characters", "reward"]
    difference: Interval


def paired_figures(first: Artifact, second: Artifact) -> Iterator[Paired]:
    """Yield every figure whose items both kept, for artifacts of one kind: benchmarks, safety or rlhf."""
    if first.stage.startswith("benchmarks"):
        for comparison in paired_accuracy(first, second):
            name = "accuracy per character" if comparison.metric == "acc_norm" else "accuracy"
            yield Paired(f"{comparison.task} {name}", "share", comparison.difference)
    elif first.stage.startswith("safety"):
        if toxicity := paired_toxicity(first, second):
            yield Paired("expected maximum toxicity", "share", toxicity.worst)
            yield Paired("toxicity probability", "share", toxicity.toxic)
            yield Paired("characters a continuation", "characters", toxicity.length)
    elif reward := paired_reward(first, second):
        yield Paired("reward on held-out prompts", "reward", reward)
