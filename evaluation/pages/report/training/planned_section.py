"""Planned time and memory of each training next to the measured ones."""

from __future__ import annotations

from typing import Any

from evaluation.pages.charts import Line, line_chart
from evaluation.pages.parts import Figure, Section, Table
from evaluation.pages.words import percent
from evaluation.results.pipeline import PipelineResults

PLANNED, PROFILE = "aux/planned.json", "aux/profile.json"


def planned(pipeline: PipelineResults) -> Section:
    """Return planned and measured step time and memory, with the ratio; empty if no training recorded them."""
    rows = []
    for id, artifact in pipeline.artifacts.items():
        if record := artifact.read_json(PLANNED):
            rows += _rows(id, record)
    note = (
        "Planned as stemma check does, for the machine that trained. Steps with their evaluations and checkpoints, "
        "without the first. On a CPU, memory is the growth of the process, which the allocator rounds up."
    )
    columns = ["step", "", "planned", "range", "measured", "measured / planned"]
    table = Table("", columns, rows, note, numeric=(2, 3, 4, 5))
    return Section("planned", "Planned and measured", "", tables=[table] if rows else [])


def _rows(id: str, record: dict[str, Any]) -> list[list[str]]:
    estimate, measured = record["planned"], record["measured"]
    rows = []
    if measured["step_s"]:
        span = f"{_time(estimate['step_s_low'])} to {_time(estimate['step_s_high'])}"
        ratio = f"{measured['step_s'] / estimate['step_s']:.2f}"
        rows.append([id, "time of a step", _time(estimate["step_s"]), span, _time(measured["step_s"]), ratio])
    ratio = f"{measured['memory_gb'] / estimate['memory_gb']:.2f}"
    limit = f"of {estimate['memory_limit_gb']:.0f} GB"
    rows.append([id, "memory", f"{estimate['memory_gb']:.3g} GB", limit, f"{measured['memory_gb']:.3g} GB", ratio])
    return rows


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def profiles(pipeline: PipelineResults) -> Section:
    """Return the time by operator of profiled steps (`launch.profile`); empty if nothing was profiled."""
    tables, figures = [], []
    for id, artifact in pipeline.artifacts.items():
        profile = artifact.read_json(PROFILE)
        if not profile or "operators" not in profile:  # a validation's profile of its texts has the same name
            continue
        rows = [
            [row["name"], f"{row['calls']:,}", f"{row['self_ms']:.2f}", percent(row["share"], 1)]
            for row in profile["operators"][:15]
        ]
        communication = percent(profile["communication_share"], 1)
        note = f"{profile['steps']} steps; communication {communication}. The trace is in aux/."
        tables.append(
            Table(id, ["operator", "calls", "ms by itself", "share"], rows, note, numeric=(1, 2, 3), mono=(0,))
        )
        points = [(float(x), float(y)) for x, y in profile["memory"]]
        chart = line_chart("memory", [Line("tensors", points, "train")], x_label="ms", y_label="MB, more than before")
        if chart:
            figures.append(Figure(f"{id}: memory of tensors over the profiled steps", chart, "", "", wide=True))
    return Section("profile", "Profile", "", figures, tables)
