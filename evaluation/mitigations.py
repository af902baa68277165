"""The mitigations stage: what each way to make a model less toxic does, and what it costs, in one table.

python -m evaluation.mitigations --config mitigations.yaml --input model=MODEL_DIR [--input tuned=MODEL_DIR] --out OUT
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from evaluation.mitigation_config import Mitigation, MitigationsConfig
from infra.run import Result, Run

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from corpus.cleaning.toxicity import Scorer
    from evaluation.generation import Sampling
    from evaluation.language_model import LoadedModel
    from evaluation.statistics import Interval
    from evaluation.word_bias import Bias

PLAIN = "plain"
TUNED = "tuned"


def mitigations(config: MitigationsConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Measures the plain model, every mitigation of the config, and the model `tuned` where there is one.

    inputs: model; tuned (optional), one that was trained to be less toxic.
    Writes results.json: {"scorer", "limits", "prompts", "samples_per_prompt", "threshold", "rows": [{"name", "kind",
    "chosen_by", "expected_max_toxicity", "toxicity_probability", "change": {"expected_max_toxicity",
    "toxicity_probability"}, "tasks": {task: {value, low, high}}, "task_changes": {task: {value, low, high, p_value}},
    "nats_per_token", "distinct_2", "drawn_per_kept"}]}, and aux/continuations.jsonl, a line a prompt.
    """
    from corpus.cleaning.toxicity import ProfanityScorer
    from evaluation.language_model import load_model
    from evaluation.probes import read_prompts
    from evaluation.toxicity import summarise
    from evaluation.toxicity_scorers import make_scorer

    lm = load_model(inputs["model"], run)
    prompts = [row["prompt"] for row in read_prompts(config.toxicity)]
    scorer = make_scorer(config.toxicity.scorers[0]) if config.toxicity.scorers else ProfanityScorer()
    ways = [_Way(PLAIN, "plain", lm), *(_way(one, lm) for one in config.tried)]
    if TUNED in inputs:
        ways.append(_Way(TUNED, TUNED, load_model(inputs[TUNED], run)))
    measured = []
    for number, way in enumerate(ways):
        run.event("mitigation", f"{way.name}, {number + 1} of {len(ways)}")
        texts = way.continuations(prompts, config, run)
        scores = scorer([text for some in texts for text in some]).reshape(len(prompts), -1)
        measured.append(_Measured(way, texts, scores, _right(way, config, run), _nats(lm, prompts, texts, run)))
    plain = measured[0]
    rows = []
    for one in measured:
        overall = summarise(one.scores, config.toxicity.threshold, config.seed, config.confidence)
        rows.append(
            {
                "name": one.way.name,
                "kind": one.way.kind,
                "chosen_by": one.way.chosen_by,
                "expected_max_toxicity": overall["expected_max_toxicity"],
                "toxicity_probability": overall["toxicity_probability"],
                "tasks": _accuracies(one.right, config),
                "nats_per_token": round(one.nats, 6),
                "distinct_2": round(_distinct(one.texts), 6),
                "drawn_per_kept": one.way.drawn_per_kept,
                **({} if one is plain else _changes(plain, one, config)),
            }
        )
    results = {
        "scorer": scorer.name,
        "limits": scorer.limits,
        "prompts": len(prompts),
        "samples_per_prompt": config.toxicity.samples_per_prompt,
        "max_new_tokens": config.toxicity.max_new_tokens,
        "threshold": config.toxicity.threshold,
        "rows": rows,
    }
    (out_dir / "results.json").write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    _write_continuations(out_dir / "aux" / "continuations.jsonl", prompts, measured)
    figures = mitigation_figures(results)
    run.metrics(figures)
    return Result(figures, _headline(rows))


@dataclass(frozen=True)
class _Way:
    """One way to have a model write and answer. drawn_per_kept: continuations drawn for one that is kept."""

    name: str
    kind: str
    lm: LoadedModel
    prefix: str = ""
    bias: Bias | None = None
    chooser: Scorer | None = None
    drawn_per_kept: int = 1

    @property
    def chosen_by(self) -> str | None:
        return self.chooser.name if self.chooser else None

    def continuations(self, prompts: Sequence[str], config: MitigationsConfig, run: Run) -> list[list[str]]:
        """The kept continuations of every prompt."""
        from evaluation.generation import Sampling
        from evaluation.language_model import sample_continuations

        asked, kept = config.toxicity, config.toxicity.samples_per_prompt
        drawn = Sampling(asked.max_new_tokens, asked.temperature, asked.top_p, config.seed)
        sampling: Sampling = replace(drawn, bias=self.bias)
        given = [self.prefix + prompt for prompt in prompts]
        found = sample_continuations(self.lm, given, kept * self.drawn_per_kept, sampling, run)
        return found if self.chooser is None else [self._least_toxic(texts) for texts in found]

    def _least_toxic(self, texts: Sequence[str]) -> list[str]:
        assert self.chooser is not None
        scores = self.chooser(texts).reshape(-1, self.drawn_per_kept)
        starts = range(0, len(texts), self.drawn_per_kept)
        return [texts[start + int(best)] for start, best in zip(starts, scores.argmin(axis=1), strict=True)]


def _way(one: Mitigation, lm: LoadedModel) -> _Way:
    """Raises StageError `bad_lexicon`, `bad_scorer`."""
    from evaluation.toxicity_scorers import make_scorer, read_words
    from evaluation.word_bias import bias_of

    match one.kind:
        case "prefix":
            return _Way(one.label, one.kind, lm, prefix=one.text)
        case "logit_bias":
            return _Way(one.label, one.kind, lm, bias=bias_of(read_words(Path(str(one.words))), lm.tokenizer, one.bias))
        case "rerank":
            return _Way(one.label, one.kind, lm, chooser=make_scorer(one.scorer), drawn_per_kept=one.candidates)


@dataclass(frozen=True)
class _Measured:
    """What came of one way.

    scores: (P prompts, K continuations). right: by task, how far each item was got right, 0 or 1 but in a few tasks;
    None for a way that changes no likelihoods. nats: of its continuations to the plain model, a token."""

    way: _Way
    texts: list[list[str]]
    scores: NDArray[np.float64]
    right: dict[str, dict[int, float]] | None
    nats: float


def _right(way: _Way, config: MitigationsConfig, run: Run) -> dict[str, dict[int, float]] | None:
    from evaluation.harness import evaluate_model
    from evaluation.word_bias import scoring_with

    if way.chooser is not None:
        return None
    # The shared contexts of our own scoring take logits past the hook.
    with scoring_with(way.lm.model, way.bias) if way.bias else nullcontext():
        found = evaluate_model(config.benchmarks(), way.lm, run, prefix=way.prefix or None, share=not way.bias)
    samples = {task: [row for row in rows if "acc" in row] for task, rows in found.get("samples", {}).items()}
    return {task: {int(row["doc_id"]): float(row["acc"]) for row in rows} for task, rows in samples.items() if rows}


def _nats(lm: LoadedModel, prompts: Sequence[str], texts: Sequence[Sequence[str]], run: Run) -> float:
    """The mean negative log likelihood a token of all continuations after their prompts, in nats: fluency as Liu et al.
    2021 (DExperts) measure it, by the plain model instead of a larger one; 0 where nothing was said."""
    from evaluation.language_model import token_log_likelihoods

    sequences, starts = [], []
    for prompt, some in zip(prompts, texts, strict=True):
        given = [lm.start_token, *lm.tokenizer.encode(prompt, add_special_tokens=False)]
        for text in some:
            if ids := lm.tokenizer.encode(text, add_special_tokens=False):
                room = max(1, lm.max_tokens - len(ids))
                starts.append(len(given[-room:]) - 1)
                sequences.append([*given[-room:], *ids][: lm.max_tokens])
    if not sequences:
        return 0.0
    scored = token_log_likelihoods(lm, sequences, run, "fluency")
    own = [likely[start:] for (likely, _), start in zip(scored, starts, strict=True)]
    return -sum(float(one.sum()) for one in own) / sum(one.numel() for one in own)


def _distinct(texts: Sequence[Sequence[str]]) -> float:
    """Distinct pairs of words over all pairs, in the continuations of each prompt (Li et al. 2016); their mean."""
    shares = []
    for some in texts:
        pairs = [pair for words in map(str.split, some) for pair in pairwise(words)]
        if pairs:
            shares.append(len(set(pairs)) / len(pairs))
    return float(np.mean(shares)) if shares else 0.0


def _accuracies(right: Mapping[str, Mapping[int, float]] | None, config: MitigationsConfig) -> dict[str, Any]:
    from evaluation.statistics import bootstrap, wilson

    def accuracy(items: list[float]) -> Interval:
        if set(items) <= {0, 1}:
            return wilson(int(sum(items)), len(items), config.confidence)
        return bootstrap(items, confidence=config.confidence, seed=config.seed)

    return {task: accuracy([*items.values()]).as_json() for task, items in (right or {}).items()}


def _changes(plain: _Measured, one: _Measured, config: MitigationsConfig) -> dict[str, Any]:
    """What a way changed over the same prompts and items, with intervals: the bootstrap over prompts for means,
    Newcombe's for pairs of shares, and McNemar's p-value; `_paired_score` says more of tasks."""
    from evaluation.statistics import bootstrap

    worst = one.scores.max(axis=1), plain.scores.max(axis=1)
    toxic = [side >= config.toxicity.threshold for side in worst]
    tasks: dict[str, dict[str, float]] = {}
    for task, items in (one.right or {}).items():
        before = (plain.right or {}).get(task, {})
        if items.keys() == before.keys():
            now, then = (np.array([side[number] for number in items]) for side in (items, before))
            if change := _paired_score(now, then, config):
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
    """The change of an accuracy over the same items (N,). Where these are more or less right, the interval is the
    bootstrap's and the p-value that of sign flips; nothing of a single one, which does not tell how items differ."""
    from evaluation.paired import sign_flip_p_value
    from evaluation.statistics import bootstrap

    if np.isin([now, before], (0, 1)).all():
        return _paired_share(now == 1, before == 1, confidence=config.confidence)
    gains = now - before
    if len(gains) < 2:
        return {}
    found = bootstrap(gains, confidence=config.confidence, seed=config.seed)
    return {**found.as_json(), "p_value": round(sign_flip_p_value(gains), 6)}


def _paired_share(now: NDArray[np.bool_], before: NDArray[np.bool_], *, confidence: float) -> dict[str, float]:
    from evaluation.statistics import difference_of_paired_proportions, mcnemar_p_value

    both, neither = int((now & before).sum()), int((~now & ~before).sum())
    only_now, only_before = int((now & ~before).sum()), int((~now & before).sum())
    found = difference_of_paired_proportions(both, only_now, only_before, neither, confidence)
    return {**found.as_json(), "p_value": round(mcnemar_p_value(only_before, only_now), 6)}


def _write_continuations(path: Path, prompts: Sequence[str], measured: Sequence[_Measured]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for number, prompt in enumerate(prompts):
            said = {
                one.way.name: [
                    {"text": text, "toxicity": round(float(score), 6)}
                    for text, score in zip(one.texts[number], one.scores[number], strict=True)
                ]
                for one in measured
            }
            file.write(json.dumps({"prompt": prompt, "continuations": said}, ensure_ascii=False) + "\n")


def mitigation_figures(results: Mapping[str, Any]) -> dict[str, float]:
    """The figures of results.json by the names that gates and manifests use, e.g. rerank_toxicity_change_high."""
    from evaluation.benchmarks import snake_case

    figures: dict[str, float] = {}
    for row in results["rows"]:
        name = snake_case(row["name"])
        figures[f"{name}_expected_max_toxicity"] = row["expected_max_toxicity"]["value"]
        figures[f"{name}_toxicity_probability"] = row["toxicity_probability"]["value"]
        changed = {"toxicity": row["change"]["expected_max_toxicity"]} if "change" in row else {}
        changed |= {snake_case(task): change for task, change in row.get("task_changes", {}).items()}
        for figure, change in changed.items():
            for suffix, field in (("", "value"), ("_low", "low"), ("_high", "high")):
                figures[f"{name}_{figure}_change{suffix}"] = change[field]
    return figures


def _headline(rows: Sequence[Mapping[str, Any]]) -> str:
    tried = [row for row in rows if "change" in row]
    if not tried:
        return "nothing was tried"
    best = min(tried, key=lambda row: float(row["change"]["expected_max_toxicity"]["value"]))
    change = best["change"]["expected_max_toxicity"]
    said = (
        f"{best['name']} does most: max toxicity {change['value']:+.2f} ({change['low']:+.2f} to {change['high']:+.2f})"
    )
    return f"{said}, of {len(tried)} tried"


if __name__ == "__main__":
    from infra.alone import main

    main(mitigations, MitigationsConfig)
