"""Failure classes of the models side by side, with the change from first to last and cases to read."""

from __future__ import annotations

from typing import Any

from evaluation.pages.parts import Section, Table
from evaluation.pages.words import p_value, percent, signed
from evaluation.results.pipeline import PipelineResults
from evaluation.statistics.clustered import clustered_difference, number_clusters
from evaluation.statistics.paired import holm

EXAMPLES = 3
"""Failed cases shown per class."""


def failure_classes(pipeline: PipelineResults) -> Section:
    """Return the section on failure classes; empty if the pipeline's benchmarks have none."""
    classes_by_model = {
        model: results["classes"]
        for model in pipeline.models
        if (results := pipeline.results("benchmarks", model).get("failure_classes"))
    }
    if not classes_by_model:
        return Section("failure_classes", "Failure classes")
    names = sorted({name for classes in classes_by_model.values() for name in classes})
    cases = {model: _cases(pipeline, model) for model in classes_by_model}
    return Section(
        "failure_classes",
        "Failure classes",
        "Templated tests (CheckList, Ribeiro et al. 2020): minimum functionality has one right answer, invariance must "
        "not change its answer, direction must move it.",
        tables=[_rates(classes_by_model, names), *_changes(pipeline, cases, names), _tests(classes_by_model, names)],
        folded=[
            (f"Failures of {name}, {pipeline.long_name(model)}", text)
            for model in list(classes_by_model)[-1:]
            for name in names
            if (text := _examples(cases[model], name))
        ],
    )


def _cases(pipeline: PipelineResults, model: str) -> list[dict[str, Any]]:
    artifact = pipeline.evaluation("benchmarks", model)
    return artifact.read_lines("aux/failure_cases.jsonl") if artifact else []


def _rates(classes_by_model: dict[str, dict[str, Any]], names: list[str]) -> Table:
    rows = []
    for name in names:
        cells = [classes.get(name) for classes in classes_by_model.values()]
        description, n = next((cell["about"], cell["n"]) for cell in cells if cell)
        rows.append([name.replace("_", " "), description, f"{n}", *map(_rate, cells)])
    columns = ["class", "a model that does not fail", "cases", *classes_by_model]
    note = (
        "Share of cases failed, with the 95 % interval over templates: a class of few templates is weak evidence about "
        "others. A model that always gives the same answer never fails invariance: read the tests apart."
    )
    return Table("Failure rates", columns, rows, note, numeric=tuple(range(2, 3 + len(classes_by_model))))


def _rate(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "–"
    return f"{percent(cell['value'], 0)} ({100 * cell['low']:.0f} to {100 * cell['high']:.0f})"


def _changes(pipeline: PipelineResults, cases: dict[str, list[dict[str, Any]]], names: list[str]) -> list[Table]:
    """Return the failure rates of the last model minus those of the first, on the same cases."""
    changes = []
    for first, last in pipeline.first_and_last():
        if first not in cases or last not in cases:
            continue
        for name in names:
            left, right = (
                {
                    (row["test"], row["prompt"], row.get("changed")): row["failed"]
                    for row in cases[m]
                    if row["class"] == name
                }
                for m in (first, last)
            )
            if not left or left.keys() != right.keys():
                continue
            templates = number_clusters(test for test, *_ in left)
            change, chance = clustered_difference([right[case] for case in left], [*left.values()], templates)
            changes.append((f"{last} − {first}", name, change, chance))
    rows = [
        [
            models,
            name.replace("_", " "),
            f"{signed(100 * change.value, 1)} points",
            f"{signed(100 * change.low, 1)} to {signed(100 * change.high, 1)}",
            p_value(adjusted),
        ]
        for (models, name, change, _), adjusted in zip(changes, holm([p for *_, p in changes]), strict=True)
    ]
    columns = ["models", "class", "failure rate", "interval", "p (Holm)"]
    note = (
        "Over the same cases, clustered by template; the exact test of the templates' signs, corrected for the number "
        "of rows, shows nothing with fewer than six templates. Below zero is fewer failures."
    )
    return [Table("Before and after alignment", columns, rows, note, numeric=(2, 3, 4))] if rows else []


def _tests(classes_by_model: dict[str, dict[str, Any]], names: list[str]) -> Table:
    rows = []
    for name in names:
        tests = next(classes[name]["tests"] for classes in classes_by_model.values() if name in classes)
        for test, statistics in tests.items():
            cells = [classes.get(name, {}).get("tests", {}).get(test) for classes in classes_by_model.values()]
            guess = percent(statistics["chance"], 0) if "chance" in statistics else "–"
            words = [part.replace("_", " ") for part in (name, test, statistics["kind"])]
            rows.append([*words, f"{statistics['n']}", guess, *map(_rate, cells)])
    columns = ["class", "test", "kind", "cases", "guessing fails", *classes_by_model]
    numeric = tuple(range(3, 5 + len(classes_by_model)))
    note = "Each test is one template; its interval is over the cases drawn from it."
    return Table("Test by test", columns, rows, note, folded=True, numeric=numeric)


def _examples(cases: list[dict[str, Any]], name: str) -> str:
    failed = [row for row in cases if row["class"] == name and row["failed"]]
    examples = [failed[i * len(failed) // EXAMPLES] for i in range(EXAMPLES)] if len(failed) >= EXAMPLES else failed
    return "\n".join(_in_words(row) for row in examples)


def _in_words(row: dict[str, Any]) -> str:
    if row["kind"] == "minimum_functionality":
        return f"{row['prompt']} ▸ {row['answer']} (right: {row['about'].strip()})"
    if row["kind"] == "invariance":
        return f"{row['prompt']} ▸ {row['answer']}; {row['changed']} ▸ {row['answer_after']} (should be the same)"
    return f"{row['prompt']} → {row['changed']}: {row['about'].strip()} should become {row['expect']} likely"
