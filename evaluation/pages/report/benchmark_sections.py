"""Benchmarks of the models side by side, and their answers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from statistics import fmean

from evaluation.harness.integrity import COUNTS
from evaluation.pages.charts import IntervalRow, Mark, interval_plot
from evaluation.pages.parts import Figure, Section, Table
from evaluation.pages.words import (
    between,
    fixed,
    p_value,
    percent,
    signed,
    whole_percent,
)
from evaluation.results.pipeline import PipelineResults
from evaluation.statistics.calibration import calibration
from evaluation.statistics.intervals import Interval


def benchmarks(pipeline: PipelineResults) -> Section:
    tasks: dict[str, list[tuple[str, dict[str, float]]]] = {}
    for model in pipeline.models:
        for task, metrics in pipeline.results("benchmarks", model).get("tasks", {}).items():
            if "acc" in metrics:
                tasks.setdefault(task, []).append((model, metrics["acc"]))
    rows = [
        IntervalRow(
            task,
            [Mark(model, pipeline.style(model), acc["value"], acc.get("low"), acc.get("high")) for model, acc in found],
            found[0][1].get("chance"),
        )
        for task, found in tasks.items()
    ]
    chart = interval_plot("accuracy", rows, value_format=whole_percent, span=(0, 1), reference_label="guessing")
    if not chart:
        return Section("benchmarks", "Benchmarks", tables=[*_texts(pipeline), *_answers(pipeline)])
    figure = Figure(
        "Accuracy",
        chart,
        _benchmark_sentence(tasks),
        _weakness(pipeline),
        pipeline.legend(pipeline.models),
        wide=True,
    )
    tables = []
    compared = [
        (f"{second} − {first}", pair)
        for i, first in enumerate(pipeline.models)
        for second in pipeline.models[i + 1 :]
        for pair in pipeline.paired(first, second)
    ]
    if compared:
        body = [
            [
                one.task,
                models,
                f"{signed(100 * one.difference.value, 1)} points",
                f"{signed(100 * one.difference.low, 1)} to {signed(100 * one.difference.high, 1)}",
                p_value(one.p_value),
                "cannot be told from zero" if one.difference.includes(0) else "real for these items",
            ]
            for models, one in compared
        ]
        columns = ["task", "models", "difference", "interval", "p", "so"]
        note = (
            "Differences over the same items, which is sharper than comparing two intervals by eye. p is McNemar's "
            "where items are right or wrong, else that of sign flips."
        )
        tables.append(Table("Paired differences", columns, body, note, numeric=(2, 3, 4)))
    tables += [
        *_alignment_tax(pipeline),
        *_shots(pipeline),
        *_generalisation(pipeline),
        *_texts(pipeline),
        *_calibration(pipeline),
        *_answers(pipeline),
        *_parts(pipeline),
    ]
    return Section("benchmarks", "Benchmarks", "", [figure], tables)


def _calibration(pipeline: PipelineResults) -> list[Table]:
    """Return the difference between each model's confidence in a choice and its accuracy, from its answers."""
    rows = []
    for model in pipeline.models:
        artifact = pipeline.evaluation("benchmarks", model)
        for task in pipeline.results("benchmarks", model).get("tasks", {}):
            lines = artifact.read_lines(f"aux/samples_{task}.jsonl") if artifact else []
            asked = [{**line, "filtered_resps": line.get("responses", [])} for line in lines]
            if found := calibration(asked):
                brier = Interval(found["brier"], found["brier_low"], found["brier_high"])
                rows.append(
                    [
                        pipeline.long_name(model),
                        task,
                        f"{found['n']:,}",
                        fixed(found["mean_confidence"]),
                        fixed(found["accuracy"]),
                        fixed(found["ece"]),
                        f"{fixed(brier.value)} {between(brier)}",
                    ]
                )
    columns = ["model", "task", "items", "mean confidence", "accuracy", "ECE", "Brier score"]
    note = (
        "Confidence is the likeliest choice's share of exp(log likelihood). ECE: how far it is from accuracy, over ten "
        "bins (Guo et al. 2017); 0 is calibrated, and few items make it too large. Brier: 0 is best, 2 worst."
    )
    return [Table("Calibration of choices", columns, rows, note, numeric=(2, 3, 4, 5, 6))] if rows else []


def _answers(pipeline: PipelineResults) -> list[Table]:
    """Return the counts of the items behind each score, by task and filter."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for model in pipeline.models:
        found = pipeline.results("benchmarks", model)
        by_shots = ((f", {shots} shots", tasks) for shots, tasks in found.get("shots", {}).items())
        for shots, tasks in [("", found.get("tasks", {})), *by_shots]:
            for task, metrics in tasks.items():
                for entry in metrics.values():
                    counts = [f"{entry[field]:,.0f}" for field in COUNTS if field in entry]
                    row = [pipeline.long_name(model), task + shots, *counts]
                    if counts:  # one line for all metrics of the same answers
                        lines.setdefault(tuple(row), row)
    columns = ["model", "task", *COUNTS]
    note = (
        "Items. Failed: no answer, or a likelihood that is no number. Truncated: the prompt does not fit the context, "
        "or the answer reached its length limit. Unparsable: the task's filter finds nothing in the answer. lm-eval "
        "scores all of them as they are, most as wrong."
    )
    rows = list(lines.values())
    numeric = tuple(range(2, len(columns)))
    return [Table("Answers behind the scores", columns, rows, note, folded=True, numeric=numeric)] if rows else []


def _alignment_tax(pipeline: PipelineResults) -> list[Table]:
    """Return the cost or gain of tuning and alignment on each task, step by step, if there are two steps or more."""
    tables = []
    for first, last in pipeline.first_and_last():
        line = [last]
        while line[0] != first and (parent := pipeline.parent(line[0])):
            line.insert(0, parent)
        steps = [*pairwise(line), (first, last)]
        found = {step: {one.task: one for one in pipeline.paired(*step)} for step in steps}
        tasks = [task for task in found[first, last] if all(task in one for one in found.values())]
        if len(line) < 3 or not tasks:
            continue
        rows = [
            [
                task,
                percent(found[first, last][task].first),
                *(
                    f"{signed(100 * one.value, 1)} ({signed(100 * one.low, 1)} to {signed(100 * one.high, 1)})"
                    for one in (found[step][task].difference for step in steps)
                ),
            ]
            for task in tasks
        ]
        columns = ["task", first, *(f"{second} − {before}" for before, second in steps)]
        note = "Points of accuracy over the same items, with 95 % intervals; below zero is what alignment cost."
        name = "Alignment tax" if last in ("sft", "rlhf") else f"Alignment tax, {last}"
        tables.append(Table(name, columns, rows, note, numeric=tuple(range(1, len(columns)))))
    return tables


def _texts(pipeline: PipelineResults) -> list[Table]:
    """Return the bits per byte of whole documents, by domain if the task has domains."""
    cells: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for model in pipeline.models:
        found = pipeline.results("benchmarks", model)
        for task, metrics in found.get("tasks", {}).items():
            if "bits_per_byte" in metrics:
                cells.setdefault((task, "all"), {})[model] = metrics["bits_per_byte"]
        for task, parts in found.get("domains", {}).items():
            for domain, entry in parts.items():
                cells.setdefault((task, domain), {})[model] = entry
    models = [model for model in pipeline.models if any(model in found for found in cells.values())]
    rows = []
    for (task, domain), found in cells.items():
        n = next(iter(found.values()))["n"]
        rows.append([task, domain, f"{n:,.0f}", *(_bits(found.get(model)) for model in models)])
    columns = ["task", "domain", "documents", *map(pipeline.long_name, models)]
    note = "Bits a byte, less is better; 95 % intervals are over documents."
    return [Table("Text", columns, rows, note, numeric=tuple(range(2, len(columns))))] if rows else []


def _bits(cell: Mapping[str, float] | None) -> str:
    if cell is None:
        return "–"
    interval = f" ({fixed(cell['low'], 3)} to {fixed(cell['high'], 3)})" if "low" in cell else ""
    return f"{fixed(cell['value'], 3)}{interval}"


def _shots(pipeline: PipelineResults) -> list[Table]:
    """Return scores by the number of solved examples before each question, if the config asks for several."""
    cells = {
        (task, metric, model, int(shots)): cell
        for model in pipeline.models
        for shots, tasks in pipeline.results("benchmarks", model).get("shots", {}).items()
        for task, metrics in tasks.items()
        for metric, cell in metrics.items()
    }
    models = [model for model in pipeline.models if any(key[2] == model for key in cells)]
    numbers = sorted({key[3] for key in cells})
    rows = []
    for task, metric in dict.fromkeys(key[:2] for key in cells):
        shown = [cells.get((task, metric, model, shots)) for model in models for shots in numbers]
        rows.append([task, metric, *(_score(metric, cell) for cell in shown)])
    columns = ["task", "metric", *(f"{model}, {shots} shots" for model in models for shots in numbers)]
    note = "The same items with so many solved examples before each, of rows that are not scored; 95 % intervals."
    return [Table("By number of shots", columns, rows, note, numeric=tuple(range(2, len(columns))))] if rows else []


def _generalisation(pipeline: PipelineResults) -> list[Table]:
    """Compare tasks of kinds that tuning has seen with tasks of other kinds, by model and number of shots."""
    found = [one for model in pipeline.models if (one := pipeline.evaluation("benchmarks", model)) and one.manifest]
    seen = {name for one in found if one.manifest for name in one.manifest.config.get("tuned_on", [])}
    if not seen:
        return []
    # Accuracies of the tasks by model and number of shots.
    scores: dict[tuple[str, int], dict[str, float]] = {}
    for model in pipeline.models:
        results = pipeline.results("benchmarks", model)
        for shots, tasks in (results.get("shots") or {"0": results.get("tasks", {})}).items():
            named = {task: metrics["acc"]["value"] for task, metrics in tasks.items() if "acc" in metrics}
            if named:
                scores[model, int(shots)] = named
    tasks = sorted({task for one in scores.values() for task in one})
    groups = {
        "tuned on": [one for one in tasks if one in seen],
        "never seen": [one for one in tasks if one not in seen],
    }
    rows = []
    for label, names in groups.items():
        for name in names:
            rows.append([label, name, *(percent(one[name]) if name in one else "–" for one in scores.values())])
        if names:
            means = [[one[name] for name in names if name in one] for one in scores.values()]
            rows.append([label, "mean", *(percent(fmean(one)) if one else "–" for one in means)])
    columns = ["kind of task", "task", *(f"{model}, {shots} shots" for model, shots in scores)]
    note = (
        "Accuracy. What a tuned model gains on kinds of tasks that it never saw is generalisation; what it gains on "
        "those it was tuned on is not. Intervals are in the table by number of shots."
    )
    return [Table("Task generalisation", columns, rows, note, numeric=tuple(range(2, len(columns))))] if rows else []


def _score(metric: str, cell: Mapping[str, float] | None) -> str:
    if cell is None:
        return "–"
    scale, digits = (100, 1) if metric.startswith(("acc", "exact_match")) else (1, 3)
    bounds = f" ({scale * cell['low']:.{digits}f} to {scale * cell['high']:.{digits}f})" if "low" in cell else ""
    return f"{scale * cell['value']:.{digits}f}{' %' if scale == 100 else ''}{bounds}"


def _weakness(pipeline: PipelineResults) -> str:
    """State the limits of the project's own tasks, and that the difficulty of the user's tasks is unknown here."""
    found = [one for model in pipeline.models if (one := pipeline.evaluation("benchmarks", model)) and one.manifest]
    tasks = [task for one in found if one.manifest for task in one.manifest.config.get("tasks", [])]
    own = {task["name"] for task in tasks if task.get("kind") == "project"}
    others = {task["name"] for task in tasks} - own
    said = []
    if own:
        said.append(
            f"{', '.join(sorted(own))}: small, easy tasks of the project's own. They show whether a model learnt any "
            "English at all and whether tuning harmed it, not how it compares with published models."
        )
    if others:
        said.append(f"{', '.join(sorted(others))}: tasks of yours, whose difficulty this page cannot know.")
    return " ".join(said)


def _benchmark_sentence(tasks: dict[str, list[tuple[str, dict[str, float]]]]) -> str:
    said = []
    for task, found in tasks.items():
        above = [model for model, acc in found if acc.get("low", 0) > acc.get("chance", math.inf)]
        unsure = [model for model, acc in found if "chance" in acc and acc["low"] <= acc["chance"]]
        if above:
            said.append(f"{task}: {', '.join(above)} above guessing.")
        if unsure:
            said.append(f"{task}: {', '.join(unsure)} cannot be told from guessing.")
    return " ".join(said)


def _parts(pipeline: PipelineResults) -> list[Table]:
    tables = []
    found = {model: pipeline.results("benchmarks", model).get("parts", {}) for model in pipeline.models}
    for task in sorted({task for parts in found.values() for task in parts}):
        models = [model for model in pipeline.models if task in found[model]]
        names = sorted({part for model in models for part in found[model][task]})
        rows = []
        for part in names:
            cells = [found[model][task].get(part) for model in models]
            n = next((cell["n"] for cell in cells if cell), 0)
            shown = [
                f"{percent(c['value'], 0)} ({100 * c['low']:.0f} to {100 * c['high']:.0f})" if c else "–" for c in cells
            ]
            rows.append([part.replace("_", " "), f"{n:.0f}", *shown])
        numeric = tuple(range(1, 2 + len(models)))
        note = "Few items each, so that the intervals are wide; read it for the pattern."
        tables.append(Table(f"{task} in parts", ["part", "items", *models], rows, note, folded=True, numeric=numeric))
    return tables
