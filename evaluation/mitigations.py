"""The mitigations stage: effect and cost of each way to make a model less toxic, in one table.

python -m evaluation.mitigations --config mitigations.yaml --input model=MODEL_DIR [--input tuned=MODEL_DIR] …
    --out OUT
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evaluation.config import ToxicityScorer
from evaluation.config.mitigations import Mitigation, MitigationsConfig
from evaluation.results.kept_parts import Keep, parts_of
from evaluation.safety.mitigation_costs import Measured, accuracies, changes, distinct_pairs, nats_per_token
from infra.errors import StageError
from infra.run import Result, Run

if TYPE_CHECKING:
    from evaluation.generation.language_model import LoadedModel
    from evaluation.generation.word_bias import Bias
    from evaluation.safety.scorer_quality import WatchedScorer

PLAIN = "plain"
TUNED = "tuned"


def mitigations(config: MitigationsConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Measure the plain model, every mitigation of the config, and the models that were trained to be less toxic.

    Writes results.json: {"scorer", "limits", "prompts", "samples_per_prompt", "threshold", "rows": [{"name", "kind",
    "chosen_by", "expected_max_toxicity", "toxicity_probability", "change": {"expected_max_toxicity",
    "toxicity_probability"}, "tasks": {task: {value, low, high}}, "task_changes": {task: {value, low, high, p_value}},
    "nats_per_token", "distinct_2", "drawn_per_kept"}]}, and aux/continuations.jsonl, one line per prompt. Until then,
    finished parts are in the run's work folder, and an interrupted build continues from them.

    Args:
        inputs: model; any others are models trained to be less toxic, such as tuned, each a row under the input's
            name.
    """
    from evaluation.generation.language_model import check_tokenizers, load_model
    from evaluation.safety.probes import read_prompts
    from evaluation.safety.scorer_quality import kept_scores, make_scorer
    from evaluation.safety.toxicity import summarise

    # The models, prompts and scorer; a part that was measured before an interruption is read again.
    trained = sorted(inputs.keys() - {"model"})
    if problems := config.same_names(trained):
        raise StageError(*problems)
    check_tokenizers(inputs.values())
    scorer = make_scorer(next(iter(config.toxicity.scorers), ToxicityScorer()))
    lm = load_model(inputs["model"], run)
    prompts = [row["prompt"] for row in read_prompts(config.toxicity)]
    keep = parts_of(config, config.sources(), inputs, run)
    variants = [_Way(PLAIN, "plain", lm), *(_variant(mitigation, lm) for mitigation in config.tried)]
    # Measure each variant: toxicity of its continuations, accuracy on tasks, likelihood under the plain model.
    measured = []
    for number, name in enumerate([*(variant.name for variant in variants), *trained]):
        run.event("mitigation", f"{name}, {number + 1} of {len(variants) + len(trained)}")
        variant = variants[number] if number < len(variants) else _Way(name, TUNED, load_model(inputs[name], run))
        texts = variant.continuations(prompts, config, run, keep)
        scores = kept_scores(scorer, [text for prompt_texts in texts for text in prompt_texts], f"{name}_scores", keep)
        right = _item_scores(variant, config, run, keep)
        nats = keep(f"{name}_nats", partial(nats_per_token, lm, prompts, texts, run))
        scores = scores.reshape(len(prompts), -1)
        measured.append(
            Measured(name, variant.kind, variant.chosen_by, variant.drawn_per_kept, texts, scores, right, nats)
        )
    # Rows of results, with differences from the plain model.
    plain = measured[0]
    rows = []
    for measurement in measured:
        overall = summarise(measurement.scores, config.toxicity.threshold, config.seed, config.confidence)
        rows.append(
            {
                "name": measurement.name,
                "kind": measurement.kind,
                "chosen_by": measurement.chosen_by,
                "expected_max_toxicity": overall["expected_max_toxicity"],
                "toxicity_probability": overall["toxicity_probability"],
                "tasks": accuracies(measurement.right, config),
                "nats_per_token": round(measurement.nats, 6),
                "distinct_2": round(distinct_pairs(measurement.texts), 6),
                "drawn_per_kept": measurement.drawn_per_kept,
                **({} if measurement is plain else changes(plain, measurement, config)),
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
    keep.clear()
    figures = mitigation_figures(results)
    run.metrics(figures)
    return Result(figures, _headline(rows))


@dataclass(frozen=True)
class _Way:
    """One way to make a model write and answer. drawn_per_kept: continuations drawn per kept continuation."""

    name: str
    kind: str
    lm: LoadedModel
    prefix: str = ""
    bias: Bias | None = None
    chooser: WatchedScorer | None = None
    drawn_per_kept: int = 1

    @property
    def chosen_by(self) -> str | None:
        return self.chooser.name if self.chooser else None

    def continuations(self, prompts: Sequence[str], config: MitigationsConfig, run: Run, keep: Keep) -> list[list[str]]:
        """Return the kept continuations of every prompt."""
        from evaluation.generation.language_model import sample_continuations
        from evaluation.generation.token_choice import SamplingOptions, TokenBias

        settings, kept = config.toxicity, config.toxicity.samples_per_prompt
        sampling = SamplingOptions(
            settings.max_new_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            seed=config.seed,
            bias=TokenBias(self.bias) if self.bias else None,
        )
        prefixed = [self.prefix + prompt for prompt in prompts]
        count = kept * self.drawn_per_kept
        texts: list[list[str]] = keep(
            f"{self.name}_drawn", lambda: sample_continuations(self.lm, prefixed, count, sampling, run)
        )
        return texts if self.chooser is None else self._least_toxic(texts, keep)

    def _least_toxic(self, drawn: Sequence[Sequence[str]], keep: Keep) -> list[list[str]]:
        """Return the least toxic of each prompt's continuations, stored for some prompts at a time."""
        from evaluation.safety.scorer_quality import SCORED_AT_ONCE

        assert self.chooser is not None
        per_prompt, chooser = len(drawn[0]), self.chooser
        at_once = max(1, SCORED_AT_ONCE // per_prompt)
        chosen: list[list[str]] = []

        def choose_batch(start: int) -> list[list[str]]:
            kept = []
            for number, texts in enumerate(drawn[start : start + at_once], start):
                scores = chooser.scored(texts, number * per_prompt, len(drawn) * per_prompt).reshape(
                    -1, self.drawn_per_kept
                )
                starts = range(0, per_prompt, self.drawn_per_kept)
                kept.append(
                    [texts[first + int(best)] for first, best in zip(starts, scores.argmin(axis=1), strict=True)]
                )
            return kept

        for start in range(0, len(drawn), at_once):
            chosen += keep(f"{self.name}_chosen_{start}", partial(choose_batch, start))
        return chosen


def _variant(mitigation: Mitigation, lm: LoadedModel) -> _Way:
    """Return the way of one mitigation. Raises StageError `bad_lexicon`, `bad_scorer`."""
    from corpus.cleaning.people.toxicity_scorers import read_words
    from evaluation.generation.word_bias import bias_of
    from evaluation.safety.scorer_quality import make_scorer

    match mitigation.kind:
        case "prefix":
            return _Way(mitigation.label, mitigation.kind, lm, prefix=mitigation.text)
        case "logit_bias":
            return _Way(
                mitigation.label,
                mitigation.kind,
                lm,
                bias=bias_of(read_words(Path(str(mitigation.words))), lm.tokenizer, mitigation.bias),
            )
        case "rerank":
            return _Way(
                mitigation.label,
                mitigation.kind,
                lm,
                chooser=make_scorer(mitigation.scorer),
                drawn_per_kept=mitigation.candidates,
            )


def _item_scores(variant: _Way, config: MitigationsConfig, run: Run, keep: Keep) -> dict[str, dict[int, float]] | None:
    """Return the score of each item by task; None for a way that changes no likelihoods."""
    from evaluation.generation.word_bias import scoring_with
    from evaluation.harness.integrity import check_answers
    from evaluation.harness.tasks import evaluate_model

    if variant.chooser is not None:
        return None

    def score_tasks() -> dict[str, list[tuple[int, float]]]:
        # With shared contexts, this project's own scoring bypasses the hook on the logits.
        with scoring_with(variant.lm.model, variant.bias) if variant.bias else nullcontext():
            benchmarks = config.benchmarks()
            results = evaluate_model(benchmarks, variant.lm, run, prefix=variant.prefix or None, share=not variant.bias)
        check_answers(results, benchmarks.answer_limits, run)
        samples = {task: [row for row in rows if "acc" in row] for task, rows in results.get("samples", {}).items()}
        return {
            task: [(int(row["doc_id"]), float(row["acc"])) for row in rows] for task, rows in samples.items() if rows
        }

    return {task: dict(items) for task, items in keep(f"{variant.name}_tasks", score_tasks).items()}


def _write_continuations(path: Path, prompts: Sequence[str], measured: Sequence[Measured]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for number, prompt in enumerate(prompts):
            continuations = {
                measurement.name: [
                    {"text": text, "toxicity": round(float(score), 6)}
                    for text, score in zip(measurement.texts[number], measurement.scores[number], strict=True)
                ]
                for measurement in measured
            }
            file.write(json.dumps({"prompt": prompt, "continuations": continuations}, ensure_ascii=False) + "\n")


def mitigation_figures(results: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of results.json by the names that gates and manifests use, e.g.
    rerank_toxicity_change_high."""
    from evaluation.results.artifacts import snake_case

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
    summary = (
        f"{best['name']} does most: max toxicity {change['value']:+.2f} ({change['low']:+.2f} to {change['high']:+.2f})"
    )
    return f"{summary}, of {len(tried)} tried"


if __name__ == "__main__":
    from infra.alone import main

    main(mitigations, MitigationsConfig)
