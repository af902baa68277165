"""Toxicity of the models side by side: their continuations, and the quality of the scorers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from evaluation.pages.charts import IntervalRow, Mark, interval_plot
from evaluation.pages.parts import Figure, Section, Table
from evaluation.pages.words import (
    between,
    between_percent,
    fixed,
    percent,
    signed,
    whole_percent,
)
from evaluation.results.comparison import PairedToxicity
from evaluation.results.pipeline import PipelineResults
from evaluation.statistics.intervals import Interval, difference_of_independent


def toxicity(pipeline: PipelineResults) -> Section:
    by_model = {m: t for m in pipeline.models if (t := pipeline.results("safety", m).get("toxicity"))}
    if not by_model:
        return Section("toxicity", "Toxicity")
    kinds = sorted({kind for result in by_model.values() for kind in result["by_kind"]})
    groups = ["overall", *(kinds if len(kinds) > 1 else [])]

    def part(result: dict[str, Any], group: str) -> dict[str, Any]:
        return result["overall"] if group == "overall" else result["by_kind"].get(group, {})

    def marks(group: str, name: str) -> list[Mark]:
        cells = [(model, part(result, group).get(name)) for model, result in by_model.items()]
        return [
            Mark(model, pipeline.style(model), cell["value"], cell["low"], cell["high"])
            for model, cell in cells
            if cell
        ]

    plot_rows = [IntervalRow(group, marks(group, "toxicity_probability")) for group in groups]
    highest = max((mark.high or 0.0 for row in plot_rows for mark in row.marks), default=1.0)
    chart = interval_plot(
        "toxicity probability",
        plot_rows,
        value_format=whole_percent,
        span=(0, min(1.0, math.ceil(10 * highest) / 10 or 0.1)),
    )
    first, pairs = next(iter(by_model.values())), _pairs(pipeline)
    figure = Figure(
        "Prompts with at least one toxic continuation",
        chart,
        f"{first['prompts']} prompts, {first['samples_per_prompt']} continuations of {first['max_new_tokens']} tokens "
        f"each; toxic is a score of at least {first['threshold']:g}. {_differences(pairs)}{_empty(pipeline)}"
        f"{_floor(by_model)}",
        f"Scored by {first['scorer']}. {first['limits']}",
        pipeline.legend(list(by_model)),
        wide=True,
    )
    rows = []
    for model, result in by_model.items():
        for group in groups:
            cells = part(result, group)
            if not cells:
                continue
            rows.append([pipeline.long_name(model), group, *_cells(cells)])
    if text := next((result["text"] for result in by_model.values() if result.get("text")), None):
        rows.append(
            ["held-out text, unchanged", f"{text['prompts']} × {first['samples_per_prompt']} pieces", *_cells(text)]
        )
    if floor := next((result["untrained"] for result in by_model.values() if result.get("untrained")), None):
        rows.append(["untrained model of this shape", f"{floor['prompts']} of them", *_cells(floor)])
    table = Table(
        "Figures",
        ["model", "prompts", "expected maximum toxicity", "toxicity probability", "toxic continuations"],
        rows,
        "The maximum grows with the number of continuations: compare only runs with the same number.",
        numeric=(2, 3, 4),
    )
    tables = [
        table,
        *_groups(pipeline, by_model),
        *_paired_table(pairs),
        *_adversarial(pipeline),
        *_other_scorers(pipeline, by_model),
        *_quality(first),
    ]
    return Section("toxicity", "Toxicity", "", [figure], tables, folded=[*_worst(pipeline), *_broken(pipeline)])


def _floor(by_model: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the toxicity that the scorer finds in the random tokens of an untrained model, which is its error."""
    floor = next((result["untrained"] for result in by_model.values() if result.get("untrained")), None)
    if floor is None:
        return ""
    toxic = Interval(**floor["toxicity_probability"])
    return f" An untrained model of this shape: {percent(toxic.value)} {between_percent(toxic)}."


def _cells(figures: Mapping[str, Any]) -> list[str]:
    """Return expected maximum, toxicity probability and toxic continuations with intervals, as cells of a table."""
    names = ("expected_max_toxicity", "toxicity_probability", "toxic_continuations")
    worst, *shares = (Interval(**figures[name]) for name in names)
    return [
        f"{fixed(worst.value)} {between(worst)}",
        *(f"{percent(share.value)} {between_percent(share)}" for share in shares),
    ]


def _groups(pipeline: PipelineResults, by_model: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    """Return BOLD's groups, each against all the others."""
    rows = []
    for model, result in by_model.items():
        for row in result.get("groups", []):
            share = Interval(row["value"], row["low"], row["high"])
            difference = f"{signed(100 * share.value, 1)} points {between_percent(share)}"
            rows.append(
                [pipeline.long_name(model), row["group"], f"{row['prompts']:,}", difference, f"{row['p_holm']:.2g}"]
            )
    columns = ["model", "group", "prompts", "toxicity probability less that of the others", "p (Holm)"]
    note = "Each group of prompts against all the others; Fisher's exact test, corrected for the number of groups."
    return [Table("Between groups", columns, rows, note, numeric=(2, 3, 4))] if rows else []


def _empty(pipeline: PipelineResults) -> str:
    """Return the number of empty continuations by model; they count as harmless, which is no merit."""
    counts = []
    for model in pipeline.models:
        artifact = pipeline.evaluation("safety", model)
        lines = artifact.read_lines("aux/generations.jsonl") if artifact else []
        empty = [not continuation["text"].strip() for line in lines for continuation in line["continuations"]]
        if any(empty):
            counts.append(f"{sum(empty):,} of {len(empty):,} by {pipeline.long_name(model)}")
    return f" Empty, which counts as harmless: {', '.join(counts)}." if counts else ""


def _adversarial(pipeline: PipelineResults) -> list[Table]:
    """Return the number of harmless prompts that a search made toxic, against as many tries of unchanged prompts."""
    by_model = {m: result for m in pipeline.models if (result := pipeline.results("safety", m).get("adversarial"))}
    rows = []
    for model, result in by_model.items():
        broken, plain, difference = (Interval(**result[name]) for name in ("broken", "broken_plain", "difference"))
        by_queries = ", ".join(f"{whole_percent(row['changed'])} by {row['queries']}" for row in result["by_queries"])
        rows.append(
            [
                pipeline.long_name(model),
                f"{result['prompts']}",
                by_queries,
                f"{percent(broken.value)} {between_percent(broken)}",
                f"{percent(plain.value)} {between_percent(plain)}",
                f"{signed(difference.value)} {between(difference)}",
            ]
        )
    columns = ["model", "harmless prompts", "made toxic by queries", "in the end", "without changes", "difference"]
    note = (
        "Each query changes words of a harmless prompt and draws a few continuations; changed prompts must score as "
        "harmless too. Without changes: the original prompts, asked as often."
    )
    return [Table("How easily it is made toxic", columns, rows, note, numeric=(1, 3, 4, 5))] if rows else []


def _broken(pipeline: PipelineResults) -> list[tuple[str, str]]:
    """Return the prompts that a search found, for the last model."""
    for model in reversed(pipeline.models):
        artifact = pipeline.evaluation("safety", model)
        lines = [line for line in (artifact.read_lines("aux/adversarial.jsonl") if artifact else []) if line["queries"]]
        if lines:
            texts = [
                f"{line['changed']}\n  → {line['continuation'].strip()} "
                f"({line['toxicity']:.2f}, found by query {line['queries']})"
                for line in lines[:5]
            ]
            return [(f"Harmless prompts that made it toxic, {pipeline.long_name(model)}", "\n\n".join(texts))]
    return []


def _other_scorers(pipeline: PipelineResults, by_model: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    rows = []
    for model, result in by_model.items():
        for scorer_result in result.get("other_scorers", []):
            worst, prob = (
                Interval(**scorer_result["overall"][n]) for n in ("expected_max_toxicity", "toxicity_probability")
            )
            cells = f"{fixed(worst.value)} {between(worst)}", f"{percent(prob.value)} {between_percent(prob)}"
            rows.append([pipeline.long_name(model), scorer_result["scorer"], *cells])
    columns = ["model", "scorer", "expected maximum toxicity", "toxicity probability"]
    note = "The same continuations. Scores of different scorers have no common scale."
    return [Table("By other scorers", columns, rows, note, numeric=(2, 3))] if rows else []


def _quality(result: Mapping[str, Any]) -> list[Table]:
    """Return the quality of each scorer on labelled sets."""
    rows = [
        [row["scorer"], row["set"], f"{row['n']:,}", f"{row['toxic']:,}", fixed(row["auc"]), fixed(row["f1"])]
        for row in result.get("quality", [])
    ]
    columns = ["scorer", "labelled set", "comments", "toxic", "AUC", "F1"]
    note = f"Against people's labels; F1 where {result['threshold']:g} and more is toxic. An AUC of 0.5 is guessing."
    return [Table("What the scorers are worth", columns, rows, note, numeric=(2, 3, 4, 5))] if rows else []


def _pairs(pipeline: PipelineResults) -> list[tuple[str, PairedToxicity]]:
    return [
        (f"{second} − {first}", pair)
        for i, first in enumerate(pipeline.models)
        for second in pipeline.models[i + 1 :]
        if (pair := pipeline.paired_toxicity(first, second))
    ]


def _differences(pairs: list[tuple[str, PairedToxicity]]) -> str:
    """Name the models whose differences over the same prompts are more than chance."""
    if not pairs:
        return ""
    differing = [
        models for models, comparison in pairs if not (comparison.worst.includes(0) and comparison.toxic.includes(0))
    ]
    if not differing:
        return "Over the same prompts no difference between the models is shown."
    return f"More than chance over the same prompts: {', '.join(differing)}; see the table of paired differences."


def _paired_table(pairs: list[tuple[str, PairedToxicity]]) -> list[Table]:
    rows = [
        [
            models,
            f"{signed(comparison.worst.value, 3)} {between(comparison.worst, 3)}",
            f"{signed(100 * comparison.toxic.value, 1)} points {between_percent(comparison.toxic)}",
            f"{signed(comparison.length.value, 1)} {between(comparison.length, 1)}",
        ]
        for models, comparison in pairs
    ]
    columns = ["models", "expected maximum toxicity", "toxicity probability", "characters per continuation"]
    note = (
        "Over the same prompts, which is sharper than comparing two intervals by eye. Where the length differs too, "
        "part of a difference in toxicity may be that of the length."
    )
    return [Table("Paired differences", columns, rows, note, numeric=(1, 2, 3))] if rows else []


def length_of_text(paired: PairedToxicity) -> str:
    """Return a sentence that compares the length of the second model's continuations with the first's."""
    before, after = paired.length_of
    if not paired.lengths_differ or not before:
        return "Its continuations are not shown to differ in length."
    share = percent(abs(after / before - 1), 0)
    if after < before:
        return f"Its continuations are {share} shorter, and less text has less room for toxicity."
    return f"Its continuations are {share} longer, and more text has more room for toxicity."


def beside_text(pipeline: PipelineResults, model: str) -> str:
    """Compare a model's toxicity with that of the text that it was trained on, in two sentences; "" if unknown.

    A scorer's findings in harmless text are its error, which no alignment can remove.
    """
    intervals = _against_text(pipeline, model)
    if intervals is None:
        return ""
    text, above = intervals
    conclusion = (
        f"is more toxic than that, by {fixed(above.value, 3)} {between(above, 3)}."
        if above.low > 0
        else f"is not shown to be more toxic than that ({signed(above.value, 3)}, {between(above, 3).strip('()')})."
    )
    return (
        f"Held-out text of the corpus in pieces as long has an expected maximum of {fixed(text.value, 3)} "
        f"{between(text, 3)}: the {pipeline.long_name(model)} {conclusion}"
    )


def is_as_its_text(pipeline: PipelineResults, model: str) -> bool:
    """Return True if a model is not shown to be more toxic than the text that it was trained on."""
    intervals = _against_text(pipeline, model)
    return intervals is not None and intervals[1].low <= 0


def _against_text(pipeline: PipelineResults, model: str) -> tuple[Interval, Interval] | None:
    """Return the expected maximum toxicity of held-out text, and the model's minus that; None if unknown."""
    results = pipeline.results("safety", model).get("toxicity", {})
    if not results.get("text"):
        return None
    text, generated = (Interval(**result["expected_max_toxicity"]) for result in (results["text"], results["overall"]))
    return text, difference_of_independent(generated, text)


def _worst(pipeline: PipelineResults) -> list[tuple[str, str]]:
    """Return the continuation of each model with the highest score, so that a reader can judge the scorer."""
    examples = []
    for model in pipeline.models:
        artifact = pipeline.evaluation("safety", model)
        lines = artifact.read_lines("aux/generations.jsonl") if artifact else []
        scored = [(c["toxicity"], row["prompt"], c["text"]) for row in lines for c in row["continuations"]]
        if scored:
            score, prompt, text = max(scored)
            examples.append((f"Highest score of the {pipeline.long_name(model)} ({fixed(score)})", f"{prompt} ▸{text}"))
    return examples
