"""Benchmarks of the models side by side, and their answers."""

from __future__ import annotations

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
                tasks.setdefault(task, []).append((model, pipeline.scores_of(model, task)))
    rows = [
        IntervalRow(
            task,
            [
                Mark(model, pipeline.style(model), acc["value"], acc.get("low"), acc.get("high"))
                for model, acc in accuracies
            ],
            accuracies[0][1].get("untrained", accuracies[0][1].get("chance")),
        )
        for task, accuracies in tasks.items()
    ]
    has_floor = any("untrained" in acc for accuracies in tasks.values() for _, acc in accuracies)
    reference = "untrained" if has_floor else "guessing"
    chart = interval_plot("accuracy", rows, value_format=whole_percent, span=(0, 1), reference_label=reference)
    if not chart:
        return Section("benchmarks", "Benchmarks", tables=[*_texts(pipeline), *_answers(pipeline)])
    figure = Figure(
        "Accuracy",
        chart,
        f"{_benchmark_sentence(tasks)}{_floors(pipeline, tasks)}",
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
                comparison.task,
                models,
                f"{signed(100 * comparison.difference.value, 1)} points",
                f"{signed(100 * comparison.difference.low, 1)} to {signed(100 * comparison.difference.high, 1)}",
                p_value(comparison.p_value),
                "not distinguishable from zero" if comparison.difference.includes(0) else "real for these items",
            ]
            for models, comparison in compared
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
            samples = [{**line, "filtered_resps": line.get("responses", [])} for line in lines]
            if figures := calibration(samples):
                brier = Interval(figures["brier"], figures["brier_low"], figures["brier_high"])
                rows.append(
                    [
                        pipeline.long_name(model),
                        task,
                        f"{figures['n']:,}",
                        fixed(figures["mean_confidence"]),
                        fixed(figures["accuracy"]),
                        fixed(figures["ece"]),
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
        results = pipeline.results("benchmarks", model)
        by_shots = ((f", {shots} shots", tasks) for shots, tasks in results.get("shots", {}).items())
        for shots, tasks in [("", results.get("tasks", {})), *by_shots]:
            for task, metrics in tasks.items():
                for entry in metrics.values():
                    counts = [f"{entry[field]:,.0f}" for field in COUNTS if field in entry]
                    row = [pipeline.long_name(model), task + shots, *counts]
                    if counts:  # one line for all metrics of the same answers
                        lines.setdefault(tuple(row), row)
    columns = ["model", "task", *COUNTS]
    note = (
        "Items. Failed: no answer, or a likelihood that is not a number. Truncated: the prompt does not fit the "
        "context, or the answer reached its length limit. Unparsable: the task's filter finds nothing in the answer. "
        "lm-eval scores all of them unchanged, most as wrong."
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
        comparisons = {step: {comparison.task: comparison for comparison in pipeline.paired(*step)} for step in steps}
        tasks = [task for task in comparisons[first, last] if all(task in by_task for by_task in comparisons.values())]
        if len(line) < 3 or not tasks:
            continue
        rows = [
            [
                task,
                percent(comparisons[first, last][task].first),
                *(
                    f"{signed(100 * interval.value, 1)} "
                    f"({signed(100 * interval.low, 1)} to {signed(100 * interval.high, 1)})"
                    for interval in (comparisons[step][task].difference for step in steps)
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
        results = pipeline.results("benchmarks", model)
        for task, metrics in results.get("tasks", {}).items():
            if "bits_per_byte" in metrics:
                cells.setdefault((task, "all"), {})[model] = metrics["bits_per_byte"]
        for task, parts in results.get("domains", {}).items():
            for domain, entry in parts.items():
                cells.setdefault((task, domain), {})[model] = entry
    models = [model for model in pipeline.models if any(model in by_model for by_model in cells.values())]
    rows = []
    for (task, domain), results in cells.items():
        n = next(iter(results.values()))["n"]
        rows.append([task, domain, f"{n:,.0f}", *(_bits(results.get(model)) for model in models)])
    columns = ["task", "domain", "documents", *map(pipeline.long_name, models)]
    note = "Bits per byte, less is better; 95 % intervals are over documents."
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
        row_cells = [cells.get((task, metric, model, shots)) for model in models for shots in numbers]
        rows.append([task, metric, *(_score(metric, cell) for cell in row_cells)])
    columns = ["task", "metric", *(f"{model}, {shots} shots" for model in models for shots in numbers)]
    note = (
        "The same items with this number of solved examples before each, of rows that are not scored; 95 % intervals."
    )
    return [Table("By number of shots", columns, rows, note, numeric=tuple(range(2, len(columns))))] if rows else []


def _generalisation(pipeline: PipelineResults) -> list[Table]:
    """Compare tasks of kinds that tuning has seen with tasks of other kinds, by model and number of shots."""
    evaluations = [
        evaluation
        for model in pipeline.models
        if (evaluation := pipeline.evaluation("benchmarks", model)) and evaluation.manifest
    ]
    tuned_on = {
        name
        for evaluation in evaluations
        if evaluation.manifest
        for name in evaluation.manifest.config.get("tuned_on", [])
    }
    if not tuned_on:
        return []
    # Accuracies of the tasks by model and number of shots.
    scores: dict[tuple[str, int], dict[str, float]] = {}
    for model in pipeline.models:
        results = pipeline.results("benchmarks", model)
        for shots, tasks in (results.get("shots") or {"0": results.get("tasks", {})}).items():
            accuracies = {task: metrics["acc"]["value"] for task, metrics in tasks.items() if "acc" in metrics}
            if accuracies:
                scores[model, int(shots)] = accuracies
    tasks = sorted({task for by_task in scores.values() for task in by_task})
    groups = {
        "tuned on": [task for task in tasks if task in tuned_on],
        "never seen": [task for task in tasks if task not in tuned_on],
    }
    rows = []
    for label, names in groups.items():
        for name in names:
            rows.append(
                [label, name, *(percent(by_task[name]) if name in by_task else "–" for by_task in scores.values())]
            )
        if names:
            score_lists = [[by_task[name] for name in names if name in by_task] for by_task in scores.values()]
            rows.append([label, "mean", *(percent(fmean(column)) if column else "–" for column in score_lists)])
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
    evaluations = [
        evaluation
        for model in pipeline.models
        if (evaluation := pipeline.evaluation("benchmarks", model)) and evaluation.manifest
    ]
    tasks = [
        task
        for evaluation in evaluations
        if evaluation.manifest
        for task in evaluation.manifest.config.get("tasks", [])
    ]
    project_tasks = {task["name"] for task in tasks if task.get("kind") == "project"}
    other_tasks = {task["name"] for task in tasks} - project_tasks
    sentences = []
    if project_tasks:
        sentences.append(
            f"{', '.join(sorted(project_tasks))}: small, easy tasks of the project's own. "
            "They show whether a model learnt any "
            "English at all and whether tuning harmed it, not how it compares with published models."
        )
    if other_tasks:
        sentences.append(f"{', '.join(sorted(other_tasks))}: tasks of yours, whose difficulty this page cannot know.")
    return " ".join(sentences)


def _benchmark_sentence(tasks: dict[str, list[tuple[str, dict[str, float]]]]) -> str:
    """Compare each score with that of an untrained model or, where it is not known, with guessing."""
    sentences = []
    for task, accuracies in tasks.items():
        floors = {model: acc.get("untrained", acc.get("chance")) for model, acc in accuracies}
        word = "an untrained model" if any("untrained" in acc for _, acc in accuracies) else "guessing"
        with_floor = [(model, acc, floor) for model, acc in accuracies if (floor := floors[model]) is not None]
        above = [model for model, acc, floor in with_floor if acc.get("low", 0) > floor]
        unsure = [model for model, acc, floor in with_floor if acc["low"] <= floor]
        if above:
            sentences.append(f"{task}: {', '.join(above)} above {word}.")
        if unsure:
            sentences.append(f"{task}: {', '.join(unsure)} is not distinguishable from {word}.")
    return " ".join(sentences)


def _floors(pipeline: PipelineResults, tasks: dict[str, list[tuple[str, dict[str, float]]]]) -> str:
    """Name the floor and the chance of each task, and the metric where it is not plain accuracy."""
    parts = []
    for task, accuracies in tasks.items():
        acc = next((acc for _, acc in accuracies if "untrained" in acc), None)
        if acc is not None:
            chance = f", guessing {percent(acc['chance'], 0)}" if "chance" in acc else ""
            parts.append(f"{task} {percent(acc['untrained'], 0)}{chance}")
    sentence = f" An untrained model of this shape scores: {'; '.join(parts)}." if parts else ""
    headlines = [pipeline.results("benchmarks", model).get("headlines", {}) for model in pipeline.models]
    normalised = sorted({task for by_task in headlines for task in by_task})
    if normalised:
        sentence += (
            f" {', '.join(normalised)}: by likelihood per character, since the choices differ in length and plain "
            "likelihood prefers the short ones."
        )
    return sentence


def _parts(pipeline: PipelineResults) -> list[Table]:
    tables = []
    parts_by_model = {model: pipeline.results("benchmarks", model).get("parts", {}) for model in pipeline.models}
    for task in sorted({task for parts in parts_by_model.values() for task in parts}):
        models = [model for model in pipeline.models if task in parts_by_model[model]]
        names = sorted({part for model in models for part in parts_by_model[model][task]})
        rows = []
        for part in names:
            cells = [parts_by_model[model][task].get(part) for model in models]
            n = next((cell["n"] for cell in cells if cell), 0)
            percentages = [
                f"{percent(c['value'], 0)} ({100 * c['low']:.0f} to {100 * c['high']:.0f})" if c else "–" for c in cells
            ]
            rows.append([part.replace("_", " "), f"{n:.0f}", *percentages])
        numeric = tuple(range(1, 2 + len(models)))
        note = "Few items each, so that the intervals are wide; read it for the pattern."
        tables.append(Table(f"{task} in parts", ["part", "items", *models], rows, note, folded=True, numeric=numeric))
    return tables
