"""The needle test: numbers found in long texts, by length and by place."""

from __future__ import annotations

from typing import Any

from evaluation.pages.parts import Section, Table
from evaluation.pages.words import percent
from evaluation.results.pipeline import PipelineResults


def needle(pipeline: PipelineResults, id: str) -> Section:
    """Return the section on one step's needle test; empty if it has no results."""
    artifact = pipeline.get(id)
    results: dict[str, Any] = (artifact.read_json("results.json") if artifact else None) or {}
    lengths = results.get("lengths", {})
    if not lengths:
        return Section("needle", "")
    depths = list(next(iter(lengths.values()))["depths"])
    positions = results.get("positions")
    rows = [
        [
            f"{int(length):,}{' *' if positions and int(length) > positions else ''}",
            f"{percent(entry['value'])} ({percent(entry['low'])} to {percent(entry['high'])})",
            *(percent(entry["depths"][depth]["value"]) for depth in depths),
        ]
        for length, entry in lengths.items()
    ]
    columns = ["tokens", "found", *(f"at {percent(float(depth), 0)}" for depth in depths)]
    chance = results["chance"]
    note = f"A number in repeated sentences, among {1 / chance:.0f} choices; chance is {percent(chance)}."
    if positions:
        note += f" * beyond the {positions:,} positions of the model."
    step = "" if id == "needle" else f": {id}"
    return Section(
        f"needle{f'-{id}' if step else ''}",
        f"Needle test{step}",
        "Real text has other distractors: this finds models that cannot read that far, not those that read well.",
        [],
        [Table("Numbers found by length and place", columns, rows, note, numeric=tuple(range(1, len(columns))))],
    )
