"""Mitigations of toxicity side by side: the effect and the cost of each."""

from __future__ import annotations

from typing import Any

from evaluation.pages.parts import Section, Table
from evaluation.pages.words import between, between_percent, fixed, percent, signed
from evaluation.results.pipeline import PipelineResults
from evaluation.statistics.intervals import Interval

EXAMPLES = 3
"""Number of prompts whose worst plain continuation is shown with that of each mitigation."""


def mitigations(pipeline: PipelineResults, id: str) -> Section:
    """Return the section on one step of the stage mitigations."""
    artifact = pipeline.get(id)
    results = (artifact.read_json("results.json") if artifact else None) or {}
    title = "Mitigations" if id == "mitigations" else f"Mitigations ({id})"
    if artifact is None or not results.get("rows"):
        return Section(id, title)
    lead = (
        f"The same {results['prompts']} prompts and {results['samples_per_prompt']} continuations of each, scored by "
        f"{results['scorer']}. {results['limits']}"
    )
    tables = [_effects(results), _costs(results)]
    return Section(id, title, lead, tables=tables, folded=_examples(artifact.read_lines("aux/continuations.jsonl")))


def _effects(results: dict[str, Any]) -> Table:
    rows = []
    for row in results["rows"]:
        worst, toxic = (Interval(**row[name]) for name in ("expected_max_toxicity", "toxicity_probability"))
        change = row.get("change", {})
        chosen = f"{row['name']} (chosen by {row['chosen_by']})" if row["chosen_by"] else row["name"]
        rows.append(
            [
                chosen,
                f"{fixed(worst.value)} {between(worst)}",
                _change(change.get("expected_max_toxicity")),
                f"{percent(toxic.value)} {between_percent(toxic)}",
                _change(change.get("toxicity_probability")),
            ]
        )
    columns = ["model", "expected maximum toxicity", "change", "toxicity probability", "change"]
    same = any(row["chosen_by"] == results["scorer"] for row in results["rows"])
    note = "Changes are over the same prompts, with 95 % intervals."
    if same:
        note += " What is chosen by the scorer that judges looks better than it is."
    return Table("What they do", columns, rows, note, numeric=(1, 2, 3, 4))


def _costs(results: dict[str, Any]) -> Table:
    tasks = sorted({task for row in results["rows"] for task in row["tasks"]})
    rows = []
    for row in results["rows"]:
        cells = []
        for task in tasks:
            if task not in row["tasks"]:
                cells.append("as plain")
                continue
            change = row.get("task_changes", {}).get(task)
            accuracy = percent(row["tasks"][task]["value"])
            cells.append(f"{accuracy}, {_change(change)}" if change else accuracy)
        drawn = str(row["drawn_per_kept"])
        rows.append([row["name"], *cells, fixed(row["nats_per_token"]), fixed(row["distinct_2"]), drawn])
    columns = ["model", *tasks, "nats per token", "distinct pairs", "drawn for one kept"]
    note = (
        "Accuracy and its change on the same items. Nats per token: how unlikely the continuations are to the plain "
        "model after their prompts. Distinct pairs: different pairs of words over all of a prompt (Li et al. 2016)."
    )
    return Table("What they cost", columns, rows, note, numeric=tuple(range(1, len(columns))))


def _change(change: dict[str, float] | None) -> str:
    return f"{signed(change['value'])} ({signed(change['low'])} to {signed(change['high'])})" if change else "–"


def _examples(lines: list[dict[str, Any]]) -> list[tuple[str, str]]:
    def worst(line: dict[str, Any], name: str) -> dict[str, Any]:
        return max(line["continuations"][name], key=lambda continuation: float(continuation["toxicity"]))

    if not lines or "plain" not in lines[0]["continuations"]:
        return []
    worst_lines = sorted(lines, key=lambda line: -float(worst(line, "plain")["toxicity"]))[:EXAMPLES]
    texts = []
    for line in worst_lines:
        paragraphs = [
            f"{name} ({continuation['toxicity']:.2f}): {continuation['text'].strip()}"
            for name in line["continuations"]
            for continuation in [worst(line, name)]
        ]
        texts.append("\n".join([line["prompt"], *paragraphs]))
    return [("The prompts with the most toxic continuations of the plain model", "\n\n".join(texts))]
