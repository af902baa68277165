"""The page of a comparison: settings that differ, figures side by side, paired differences, and overlaid curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from math import inf
from statistics import fmean
from typing import Any, NamedTuple

from evaluation.pages.charts import IntervalRow, Line, Mark, Point, interval_plot, line_chart, smoothed
from evaluation.pages.parts import Figure, Section, Table, render_page
from evaluation.pages.words import fixed, signed
from evaluation.results.artifacts import Artifact
from evaluation.results.pipeline import PipelineResults
from evaluation.statistics.intervals import Interval

STYLES = ("train", "rlhf", "validation", "other1", "base", "other3", "other4")
SETTINGS_OPEN = 30


class Curve(NamedTuple):
    """A metric of a stage to draw; smoothed if it is measured on one batch only."""

    metric: str
    title: str
    y_label: str
    smooth: bool = False
    weak: str = ""


_TRAINING = Curve(
    "train/loss", "training loss", "loss (nats per token)", True, "Measured on each batch, then smoothed."
)
_SAMPLED = Curve("validation/sample_loss", "loss of a validation sample", "loss (nats per token)")
CURVES: dict[str, Sequence[Curve]] = {
    "pretrain": (_TRAINING, _SAMPLED),
    "sft": (_TRAINING, _SAMPLED._replace(title="loss of held-out answers")),
    "reward_model": (
        _TRAINING._replace(y_label="loss (nats per pair)"),
        _SAMPLED._replace(title="loss of held-out pairs", y_label="loss (nats per pair)"),
    ),
    "preference_tuning": (
        _TRAINING._replace(y_label="loss (nats per pair)"),
        Curve("validation/sample_margin", "margin on held-out pairs", "nats by which the chosen answer rose more"),
    ),
    "distill": (
        _TRAINING._replace(y_label="divergence from the teacher (nats per token)"),
        _SAMPLED._replace(title="divergence on held-out answers", y_label="divergence (nats per token)"),
    ),
    "rlhf": (
        Curve("rlhf/reward", "reward", "reward", weak="Rewards of different reward models have no common scale."),
        Curve("rlhf/judge", "judge's score", "score", weak="Scores of different judges have no common scale."),
        Curve("rlhf/kl", "distance from the start", "KL (nats per answer)"),
    ),
}
"""Curves that are drawn for the steps of a stage."""


def comparison_page(document: Mapping[str, Any], names: Sequence[str], steps: Sequence[Mapping[str, Artifact]]) -> str:
    """Return the HTML of a comparison.

    Args:
        document: of `flows.compare.compare`.
        names: display names, in its order.
        steps: finished steps of each.
    """
    kinds = " and ".join(sorted({f"{entry['kind']}s" for entry in document["compared"]}))
    facts = [("compared", f"{len(names)} {kinds}")]
    return render_page(" / ".join(names), "comparison", facts, comparison_sections(document, names, steps))


def comparison_sections(
    document: Mapping[str, Any], names: Sequence[str], steps: Sequence[Mapping[str, Artifact]]
) -> list[Section]:
    """Return the parts of a comparison, see `comparison_page`."""
    compared_names = [entry["name"] for entry in document["compared"]]
    groups = _groups(document)
    styles = _styles(names, groups)
    return [
        _subjects(document, names),
        _differences(document, names),
        _paired(
            document, dict(zip(compared_names, names, strict=True)), dict(zip(compared_names, styles, strict=True))
        ),
        _figures(document, names, groups),
        Section("curves", "Curves", "", compared_curves(document, names, steps)),
    ]


def compared_curves(
    document: Mapping[str, Any],
    names: Sequence[str],
    steps: Sequence[Mapping[str, Artifact]],
    batches: tuple[float, float] = (-inf, inf),
) -> list[Figure]:
    """Return the curves over each other, see `comparison_page`.

    Args:
        batches: the first and the last to draw.
    """
    groups = _groups(document)
    styles = _styles(names, groups)
    pipelines = [
        PipelineResults({name: artifact.folder for name, artifact in artifacts.items()}) for artifacts in steps
    ]
    stages = {
        name: artifact.stage for artifacts in steps for name, artifact in artifacts.items() if artifact.stage in CURVES
    }
    figures = []
    kept = _steps_to_draw(document, steps, stages)
    for step, stage in kept.items():
        for curve in CURVES[stage]:
            drawn: dict[str, tuple[list[int], list[Point]]] = {}
            for index, pipeline in enumerate(pipelines):
                points = [point for point in pipeline.curve(step, curve.metric) if batches[0] <= point[0] <= batches[1]]
                if points:
                    drawn.setdefault(str(steps[index][step].folder), ([], points))[0].append(index)
            if figure := _overlaid(step, curve, drawn, names, styles, groups):
                figures.append(figure)
    return figures


def figures_section(document: Mapping[str, Any], names: Sequence[str]) -> Section:
    """Return the figures that differ, side by side, also of those that differ in seeds alone."""
    return _figures({**document, "seeds": []}, names, [])


def _styles(names: Sequence[str], groups: Sequence[Sequence[int]]) -> list[str]:
    """Return a style for each; those that differ in seeds alone have one."""
    styles = [STYLES[index % len(STYLES)] for index in range(len(names))]
    for group in groups:
        for index in group:
            styles[index] = styles[group[0]]
    return styles


def _groups(document: Mapping[str, Any]) -> list[list[int]]:
    """Return the positions of those that differ in seeds alone."""
    compared_names = [entry["name"] for entry in document["compared"]]
    return [[compared_names.index(name) for name in group["names"]] for group in document["seeds"]]


def conclusion(document: Mapping[str, Any], index: int, names: Sequence[str]) -> str:
    """Return one sentence: which of the first and another is better, and how sure that is.

    Args:
        document: of `flows.compare.compare`.
        index: of the other one.
        names: display names, in the order of the document.
    """
    first, second = names[0], names[index]
    other = document["compared"][index]["name"]
    rows = [row for row in document["paired"] if row["name"] == other and row["unit"] != "characters"]
    if not rows:
        return f"Whether {second} is better than {first} is unknown: nothing was measured over the same items."
    shown = [row for row in rows if row["shown"]]
    measured = "The one figure" if len(rows) == 1 else f"None of the {len(rows)} figures"
    if not shown:
        verb = "shows no difference" if len(rows) == 1 else "shows a difference"
        return f"Neither {second} nor {first} is shown to be better: {measured.lower()} over the same items {verb}."
    better = [row for row in shown if _is_gain(row)]
    worse = [row for row in shown if not _is_gain(row)]
    if better and worse:
        return (
            f"{second} is better than {first} in {_named(better)}, and worse in {_named(worse)}; each with 95 % "
            "confidence."
        )
    winner, loser = (second, first) if better else (first, second)
    sentence = f"{winner} is better than {loser}, with 95 % confidence: {_named(shown, reverse=not better)}"
    same = len(rows) - len(shown)
    sentence += f"; {same} further figure{'' if same == 1 else 's'} show{'s' if same == 1 else ''} no difference" * (
        same > 0
    )
    if len(shown) == 1 and same >= 2:
        # Each interval misses its figure in one of twenty comparisons.
        sentence += f" (with {len(rows)} figures, chance alone shows one in {1 - 0.95 ** len(rows):.0%} of comparisons)"
    return f"{sentence}."


def _is_gain(row: Mapping[str, Any]) -> bool:
    """Return True if the second is better by this figure."""
    is_less_better = "toxicity" in row["figure"]
    return (row["difference"] < 0) == is_less_better


def _named(rows: Sequence[Mapping[str, Any]], reverse: bool = False) -> str:
    """Return the figures with their differences, the largest first, at most three of them.

    Args:
        reverse: True for the first minus the other one.
    """
    largest = sorted(rows, key=lambda row: -abs(row["difference"]))[:3]
    named = []
    for row in largest:
        bounds = (row["difference"], row["low"], row["high"])
        difference = Interval(-bounds[0], -bounds[2], -bounds[1]) if reverse else Interval(*bounds)
        named.append(f"{row['figure']} {_change(difference, row['unit'])}")
    return ", ".join(named) + (f" and {len(rows) - 3} more" if len(rows) > 3 else "")


def _subjects(document: Mapping[str, Any], names: Sequence[str]) -> Section:
    rows = [
        [name, entry["kind"], entry["headline"], ", ".join(entry["evaluations"]) or "–"]
        for name, entry in zip(names, document["compared"], strict=True)
    ]
    columns = ["", "kind", "what came out", "measured"]
    unlike = [f"{warning['path']}: {warning['message']}." for warning in document.get("warnings", ())]
    lead = " ".join([*(seeds_sentence(group) for group in document["seeds"]), *unlike])
    return Section("compared", "What is compared", lead, tables=[Table("", columns, rows, mono=(0,))])


def seeds_sentence(group: Mapping[str, Any]) -> str:
    seeds = ", ".join("/".join(map(str, run_seeds)) for run_seeds in group["seeds"])
    return f"{len(group['names'])} of them have the same settings and other seeds ({seeds})."


def _differences(document: Mapping[str, Any], names: Sequence[str]) -> Section:
    rows = [[row["key"], *map(str, row["values"])] for row in document["differences"]]
    lead = f"{len(rows)} settings, sources or versions differ." if rows else "No setting, source or version differs."
    columns, mono = ["", *names], tuple(range(len(names) + 1))
    tables = [Table("", columns, rows[:SETTINGS_OPEN], mono=mono)] if rows else []
    if hidden_rows := rows[SETTINGS_OPEN:]:
        tables.append(Table(f"{len(hidden_rows)} more", columns, hidden_rows, folded=True, mono=mono))
    if steps := [[row["step"], *map(str, row["values"])] for row in document.get("steps", ())]:
        tables.append(Table("Steps that only some have", ["step", *names], steps, mono=(0,)))
    return Section("differences", "What differs", lead, tables=tables)


def _paired(document: Mapping[str, Any], names: Mapping[str, str], styles: Mapping[str, str]) -> Section:
    differences = document["paired"]
    if not differences:
        return Section("paired", "Over the same items")
    first = names[document["compared"][0]["name"]]
    drawn: dict[str, list[Mark]] = {}
    rows = []
    for row in differences:
        name, interval = names[row["name"]], Interval(row["difference"], row["low"], row["high"])
        if row["unit"] == "share":
            drawn.setdefault(row["figure"], []).append(
                Mark(name, styles[row["name"]], interval.value, interval.low, interval.high)
            )
        conclusion = "more than chance" if row["shown"] else "no difference is shown"
        rows.append([row["figure"], name, f"{_change(interval, row['unit'])}", conclusion])
    plot = interval_plot(
        "paired differences",
        [IntervalRow(figure, marks, 0.0) for figure, marks in drawn.items()],
        value_format=lambda value: signed(100 * value, 1),
        reference_label="no difference",
    )
    figures = []
    if plot:
        legend = [(names[name], styles[name]) for name in dict.fromkeys(row["name"] for row in differences)]
        caption = f"Points out of a hundred, minus {first}, with 95 % intervals over the same items or prompts."
        figures.append(Figure("Differences over the same items", plot, caption, "", legend, wide=True))
    note = "Intervals cover the choice of items. They do not cover the seed of a training: train with several for that."
    table = Table("", ["figure", "", f"minus {first}", ""], rows, note, numeric=(2,))
    return Section("paired", "Over the same items", "", figures, [table])


def _change(interval: Interval, unit: str) -> str:
    if unit == "share":
        points, low, high = (signed(100 * bound, 1) for bound in (interval.value, interval.low, interval.high))
        return f"{points} points ({low} to {high})"
    return f"{signed(interval.value)} {unit} ({signed(interval.low)} to {signed(interval.high)})"


def _figures(document: Mapping[str, Any], names: Sequence[str], groups: Sequence[Sequence[int]]) -> Section:
    """Return the figures that differ; mean and spread over seeds take one column each."""
    single = [index for index in range(len(names)) if not any(index in group for group in groups)]
    columns = ["", *(f"{names[group[0]]} and {len(group) - 1} more" for group in groups), *(names[i] for i in single)]
    rows = []
    for row in document["figures"]:
        if not differs(row["values"]):
            continue
        spread = {tuple(entry["names"]): entry for entry in row["spread"]}
        cells = []
        for group in document["seeds"]:
            statistics = spread.get(tuple(group["names"]))
            cells.append(f"{_number(statistics['mean'])} ± {_number(statistics['sd'])}" if statistics else "–")
        cells += [number_with_bounds(row["values"][i], row["intervals"][i]) for i in single]
        rows.append([row["figure"], *cells])
    same = len(document["figures"]) - len(rows)
    note = "In brackets: 95 % intervals." + (" ±: standard deviation over seeds." if groups else "")
    note += f" {same} further figures are the same for all, or known of one alone." if same else ""
    table = Table("", columns, rows, note, numeric=tuple(range(1, len(columns))))
    return Section("figures", "Figures", "", tables=[table] if rows else [])


def differs(values: Sequence[float | None]) -> bool:
    """Return True if two of the known values differ."""
    return len({value for value in values if value is not None}) > 1


def number_with_bounds(value: float | None, bounds: Sequence[float] | None) -> str:
    """Return `4.312 (4.281 to 4.343)`, with the digits that the interval leaves known; a dash for None."""
    if value is None:
        return "–"
    if bounds:
        half = (bounds[1] - bounds[0]) / 2
        # Two digits of half the interval: of 50.625 (42.703 to 58.516) no more is known than 50.6 (42.7 to 58.5).
        digits = min(6, max(0, 1 - math.floor(math.log10(half)))) if half > 0 and math.isfinite(half) else 3
        shown, low, high = (f"{number:,.{digits}f}".replace("-", "−") for number in (value, *bounds))
        return f"{shown} ({low} to {high})"
    return f"{value:,.0f}" if value == round(value) else _number(value)


def _number(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace("-", "−")
    return fixed(value, 3) if abs(value) >= 0.001 or value == 0 else f"{value:.2g}".replace("-", "−")


def _steps_to_draw(
    document: Mapping[str, Any], steps: Sequence[Mapping[str, Artifact]], stages: Mapping[str, str]
) -> dict[str, str]:
    """Return the steps whose curves are drawn. Of artifacts: those that all descend from, and the training of each
    itself; steps between them belong to one alone and have nothing to be compared with."""
    compared = document["compared"]
    if any(entry["kind"] != "artifact" for entry in compared):
        return dict(stages)
    named = {entry["name"] for entry in compared}
    return {
        step: stage
        for step, stage in stages.items()
        if all(step in artifacts for artifacts in steps)
        or any(
            f"{artifacts[step].stage}/{artifacts[step].folder.name}" in named
            for artifacts in steps
            if step in artifacts
        )
    }


def _overlaid(
    step: str,
    curve: Curve,
    drawn: Mapping[str, tuple[list[int], list[Point]]],
    names: Sequence[str],
    styles: Sequence[str],
    groups: Sequence[Sequence[int]],
) -> Figure | None:
    """Draw the curves of one step; those that share an artifact are one line, seeds of one setting get their mean."""
    lines, legend, ends = [], [], []
    remaining = {folder: indices for folder, (indices, _) in drawn.items()}
    for group in groups:
        of_group = [folder for folder, indices in remaining.items() if set(indices) <= set(group)]
        if len(of_group) < 2:
            continue
        curves = [_smoothed(curve, drawn[folder][1]) for folder in of_group]
        label, style = f"mean of {len(curves)} seeds: {names[group[0]]}, …", styles[group[0]]
        lines += [Line(names[remaining[f][0]], points, style, True) for f, points in zip(of_group, curves, strict=True)]
        lines.append(Line(label, _mean(curves), style))
        legend.append((label, style))
        for folder in of_group:
            del remaining[folder]
    for folder, indices in remaining.items():
        label, style, points = (
            ", ".join(names[i] for i in indices),
            styles[indices[0]],
            _smoothed(curve, drawn[folder][1]),
        )
        lines.append(Line(label, points, style))
        legend.append((label, style))
    for line in lines:
        if line.points and not line.faint:
            ends.append(f"{line.label} {fixed(line.points[-1][1], 3)}")
    chart = line_chart(f"{step}: {curve.title}", lines, x_label="batch", y_label=curve.y_label, can_zoom=True)
    if not chart:
        return None
    absent = [name for index, name in enumerate(names) if not any(index in indices for indices, _ in drawn.values())]
    alone = f" {', '.join(absent)} did not go through this step." if absent else ""
    return Figure(f"{step}: {curve.title}", chart, f"Ends at: {'; '.join(ends)}.{alone}", curve.weak, legend)


def _smoothed(curve: Curve, points: list[Point]) -> list[Point]:
    return smoothed(points, max(3.0, len(points) / 60)) if curve.smooth else points


def _mean(curves: Sequence[Sequence[Point]]) -> list[Point]:
    """Return the mean over curves at the steps that all of them have."""
    by_step = [dict(points) for points in curves]
    common = set.intersection(*(set(curve) for curve in by_step))
    return [(step, fmean(curve[step] for curve in by_step)) for step in sorted(common)]
