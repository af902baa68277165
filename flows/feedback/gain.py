"""The gain of a round of feedback: its model compared with the one that its answers were drawn from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evaluation.pages.comparison import differs, number_with_bounds
from evaluation.people.outcome import SUMMARY, replace_files
from evaluation.people.pairs import PREFERENCES, Export
from flows.compare.compare import compare
from flows.compare.compared import find
from infra.io.json import read_own_json
from infra.store.store import Store

FEEDBACK, JUDGED = "feedback", "judged"
COMPARISON = "comparison.json"
_OF_LABELS = ("judged_pairs", "judgements", "preferences", "ties", "agreement", "win_rates")
SHOWN_FIGURES = (
    "reward_gain",
    "judge_gain",
    "functions_gain",
    "verified_gain",
    "win_rate",
    "kl_to_sft",
    "kl_to_reference",
)
"""Figures that a line of the command prints, where a model has them."""


def pairs_of(folder: Path) -> Path:
    """The file of a round's judged pairs, once they are judged."""
    return folder / JUDGED / PREFERENCES


def rounds_of(pipeline: str, root: Path) -> list[Path]:
    """The folders of a pipeline's rounds that were judged, from the first on."""
    return [
        folder
        for folder in sorted((root / FEEDBACK).glob("*"))
        if pairs_of(folder).exists() and Export.read(folder).drawn.get("pipeline") == pipeline
    ]


def compare_round(store: Store, folder: Path, model: str, after: str) -> dict[str, Any]:
    """Compare the artifact `after`, which the round made, with the one that its answers were drawn from, as `stemma
    compare` does, and keep it in the round's folder.

    {"round", "model", "before", "after", "labels", "figures", "paired"}: labels are the figures of judgements of this
    round and the one before it, [{"round", "judged_pairs", …}], figures those that differ or have an interval, with
    their values before and after.

    Args:
        model: the name that the export gives the model.

    Raises ConfigError where one of the two is gone.
    """
    export = Export.read(folder)
    before = export.models[model]["artifact"]
    rounds = rounds_of(export.drawn["pipeline"], store.root)
    recent = [round_folder for round_folder in rounds if round_folder.name <= folder.name][-2:]
    comparison: dict[str, Any] = {"round": folder.name, "model": model, "before": before, "after": after}
    comparison["labels"] = [{"round": round_folder.name, **_labels(round_folder)} for round_folder in recent]
    if before == after:
        return _kept(folder, {**comparison, "figures": [], "paired": []})
    document = compare(find(store, [before, after]))
    figures = [
        {name: row[name] for name in ("figure", "values", "intervals")}
        for row in document["figures"]
        if differs(row["values"])
    ]
    return _kept(folder, {**comparison, "figures": figures, "paired": document["paired"]})


def last_comparison(pipeline: str, root: Path) -> dict[str, Any] | None:
    """The comparison of a pipeline's newest round that has ended; None if none has."""
    kept = [folder / COMPARISON for folder in rounds_of(pipeline, root) if (folder / COMPARISON).exists()]
    return read_own_json(kept[-1]) if kept else None


def as_line(comparison: Mapping[str, Any]) -> str:
    """The models and what is known of them in a line."""
    rows = {row["figure"]: row for row in comparison["figures"]}
    cells = [f"{name} {_before_and_after(rows[name])}" for name in SHOWN_FIGURES if name in rows]
    changed = (
        f"{comparison['before']} → {comparison['after']}"
        if comparison["before"] != comparison["after"]
        else "the model is the same"
    )
    return f"round {comparison['round']}: {', '.join([changed, *cells])}"


def as_markdown(comparison: Mapping[str, Any]) -> str:
    """Return the comparison as Markdown for the Prefect page."""
    lines = [
        "# Gain of the round",
        "",
        f"`{comparison['before']}` answered, `{comparison['after']}` learnt from the judgements.",
    ]
    if comparison["before"] == comparison["after"]:
        lines = ["# Gain of the round", "", f"Nothing was learnt: the model is `{comparison['after']}` as before."]
    lines += [
        "",
        "| round | judged pairs | preferences | ties | agreement (α) | win rates |",
        "| --- | ---: | ---: | ---: | --- | --- |",
    ]
    for labels in comparison["labels"]:
        alpha = labels["agreement"]
        rates = [f"{row['model']} over {row['over']} {_interval(row)}" for row in labels["win_rates"]]
        cells = [
            labels["round"],
            labels["judged_pairs"],
            labels["preferences"],
            labels["ties"],
            _interval(alpha) if alpha else "–",
        ]
        lines.append(_row([*cells, "; ".join(rates) or "–"]))
    if comparison["paired"]:
        lines += [
            "",
            "Over the same items, after less before:",
            "",
            "| figure | difference, 95 % interval | |",
            "| --- | --- | --- |",
        ]
        for row in comparison["paired"]:
            change = number_with_bounds(row["difference"], [row["low"], row["high"]])
            lines.append(
                _row([row["figure"], change, "more than chance" if row["shown"] else "no difference is shown"])
            )
    if comparison["figures"]:
        lines += ["", "| figure | before | after |", "| --- | ---: | ---: |"]
        lines += [
            _row([row["figure"], *map(number_with_bounds, row["values"], row["intervals"])])
            for row in comparison["figures"]
        ]
        lines += [
            "",
            "Rewards of different reward models have no common scale: what compares are benchmarks and judgements.",
        ]
    return "\n".join(lines) + "\n"


def _kept(folder: Path, comparison: dict[str, Any]) -> dict[str, Any]:
    replace_files(folder, {}, {COMPARISON: json.dumps(comparison, indent=1) + "\n"})
    return comparison


def _labels(folder: Path) -> dict[str, Any]:
    summary = read_own_json(folder / JUDGED / SUMMARY)
    # Rounds that were imported before ties were recorded have none.
    return {name: summary.get(name, 0) for name in _OF_LABELS}


def _before_and_after(row: Mapping[str, Any]) -> str:
    return " → ".join(map(number_with_bounds, row["values"], row["intervals"]))


def _interval(row: Mapping[str, float]) -> str:
    return number_with_bounds(row["value"], [row["low"], row["high"]])


def _row(cells: list[Any]) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"
