"""The page of a sweep: leaderboard, differences to the base, parallel coordinates, importance, and curves overlaid."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from markupsafe import Markup

from evaluation.pages.charts import Bar, Line, Point, bar_chart, line_chart
from evaluation.pages.comparison import STYLES
from evaluation.pages.parts import Figure, Section, Table, render_page

Curves = Mapping[str, Mapping[int, Sequence[Point]]]
"""Title of a drawing → number of a trial → its points."""

COLOURED = len(STYLES)


def sweep_page(name: str, document: Mapping[str, Any], curves: Curves) -> str:
    """Return a self-contained page.

    Args:
        document: of `flows.sweeps.results.summary`.
    """
    better = "more" if document["maximise"] else "less"
    counts = [f"{sum(t['status'] == s for t in document['trials'])} {s}" for s in ("done", "pruned", "failed")]
    facts = [
        ("measured", f"{document['measure']}, {better} is better"),
        ("trials", ", ".join(count for count in counts if not count.startswith("0 "))),
        ("seeds", ", ".join(map(str, document["seeds"]))),
        ("settings", {"grid": "every combination"}.get(document["sampler"], f"drawn by {document['sampler']}")),
    ]
    styles = {row["arm"]: STYLES[index % COLOURED] for index, row in enumerate(document["settings"][:COLOURED])}
    sections = [
        _leaderboard(document),
        _ablations(document),
        _law(document.get("law")),
        _keys(document, styles),
        Section("curves", "Curves", _curves_lead(document), _curves(document, curves, styles)),
        _trials(document),
    ]
    return render_page(f"Sweep of {name}", "sweep", facts, sections)


def number(value: float | None) -> str:
    """Return a number with four digits; a dash for None."""
    if value is None:
        return "–"
    if abs(value) >= 1e9 or 0 < abs(value) < 1e-9:
        return f"{value:.1e}".replace("-", "−")
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}".replace("-", "−")


def bounds(row: Mapping[str, Any]) -> str:
    return "–" if row["low"] is None else f"{number(row['low'])} to {number(row['high'])}"


def _leaderboard(document: Mapping[str, Any]) -> Section:
    rows = [
        [str(rank), row["name"], number(row["mean"]), number(row["sd"]), bounds(row), str(row["done"]), row["status"]]
        for rank, row in enumerate(document["settings"], 1)
    ]
    columns = ["", "settings", document["measure"], "sd", "95 % interval", "seeds", ""]
    best = document["best"]
    lead = f"Best: {best['name']}, {document['measure']} {number(best['mean'])}." if best else "Nothing has ended yet."
    note = (
        "Mean over seeds, standard deviation with n − 1, Student's interval of the mean. Of many settings the best "
        "looks better than it is: measure it again with other seeds before you rely on its figure."
    )
    return Section("leaderboard", "Leaderboard", lead, tables=[Table("", columns, rows, note, numeric=(2, 3, 4, 5))])


def _ablations(document: Mapping[str, Any]) -> Section:
    rows = [
        [
            row["name"],
            row["figure"],
            number(row["base"]),
            ("+" if row["difference"] > 0 else "") + number(row["difference"]),
            bounds(row),
            "more than chance" if row["shown"] else "no difference is shown",
        ]
        for row in document["ablations"]
    ]
    columns = ["ablation", "figure", "base", "minus the base", "95 % interval", ""]
    note = "Differences of runs with the same seed; Student's interval over seeds. More ablations, more chances."
    table = Table("", columns, rows, note, numeric=(2, 3, 4))
    return Section("ablations", "Differences to the base", "", tables=[table] if rows else [])


def law_sentences(law: Mapping[str, Any]) -> list[str]:
    """Return the law, and its prediction for the held-out run, in sentences."""
    coefficients, spans, held_out = law["law"], law["intervals"], law["held_out"]
    ends = {
        name: f"{number(coefficients[name])} ({number(spans[name][0])} to {number(spans[name][1])})"
        for name in coefficients
    }
    relation = "within" if held_out["low"] <= held_out["loss"] <= held_out["high"] else "outside"
    return [
        f"L(N, D) = {number(coefficients['E'])} + {number(coefficients['A'])} / N^{coefficients['alpha']:.3f} + "
        f"{number(coefficients['B'])} / D^{coefficients['beta']:.3f}"
        f", fitted to {law['runs']} runs, off by {100 * law['rmse_log']:.2f} % (root mean square)",
        f"95 % by bootstrap: {', '.join(f'{name} {text}' for name, text in ends.items())}",
        f"held out: {number(held_out['parameters'])} parameters, {number(held_out['tokens'])} tokens; predicted "
        f"{held_out['predicted']:.4f} ({held_out['low']:.4f} to {held_out['high']:.4f}), "
        f"measured {held_out['loss']:.4f}, "
        f"a miss of {100 * held_out['miss']:+.2f} %, {relation} the interval of the law",
    ]


def isoflop_sentences(isoflop: Mapping[str, Any] | None) -> list[str]:
    """Return the best size at each budget, and its growth, in sentences."""
    if not isoflop:
        return ["no three sizes were trained with the same compute, so that there is no IsoFLOP profile"]
    sentences = [
        f"at {number(budget['flops'])} FLOPs a parabola through {len(budget['points'])} sizes is lowest at "
        f"{number(budget['best']['parameters'])} parameters and {number(budget['best']['tokens'])} tokens, "
        f"loss {budget['best']['loss']:.4f}"
        if budget["best"]
        else f"at {number(budget['flops'])} FLOPs the lowest point is outside of the sizes that were tried"
        for budget in isoflop["budgets"]
    ]
    if isoflop["exponent"] is not None:
        sentences.append(
            f"the best size grows with compute to the power of {isoflop['exponent']:.2f}, tokens to that of "
            f"{1 - isoflop['exponent']:.2f} (0.49 and 0.51 in approach 2 of Hoffmann et al. 2022)"
        )
    return sentences


def _isoflop(result: Mapping[str, Any] | None) -> Figure | None:
    """Draw loss against parameters, one colour per budget: runs as dots, parabolas, and a line through their minima."""
    if not result:
        return None
    lines, legend = [], []
    for index, budget in enumerate(result["budgets"]):
        style, label = STYLES[index % COLOURED], f"{number(budget['flops'])} FLOPs"
        dots = [(math.log10(point["parameters"]), point["loss"]) for point in budget["points"]]
        low, high = dots[0][0], dots[-1][0]
        xs = [low + (high - low) * step / 60 for step in range(61)]
        c0, c1, c2 = budget["parabola"]
        logs = [(x, x * math.log(10)) for x in xs]
        lines.append(Line(label, [(x, c0 + c1 * log + c2 * log * log) for x, log in logs], style))
        lines.append(Line(label, dots, style, joined=False))
        legend.append((label, style))
    best = [budget["best"] for budget in result["budgets"] if budget["best"]]
    minima = [(math.log10(minimum["parameters"]), minimum["loss"]) for minimum in best]
    lines.append(Line("lowest points", minima, STYLES[-1]))
    chart = line_chart(
        "IsoFLOP profiles", lines, x_label="log10 of parameters", y_label="loss (nats per token)", width=900
    )
    weak = "Where a size was not trained with exactly that compute, its loss is on a curve through its own runs."
    caption = ". ".join(sentence[:1].upper() + sentence[1:] for sentence in isoflop_sentences(result)) + "."
    legend += [("lowest points", STYLES[-1])] if minima else []
    return Figure("IsoFLOP: loss against parameters, one line per budget", chart, caption, weak, legend, wide=True)


def _law(law: Mapping[str, Any] | None) -> Section:
    if not law:
        return Section("law", "Scaling law")
    sizes: dict[float, list[Point]] = {}
    for point in law["points"]:
        log_flops = math.log10(6 * point["parameters"] * point["tokens"])
        sizes.setdefault(point["parameters"], []).append((log_flops, point["loss"]))
    styles = [STYLES[index % COLOURED] for index in range(len(sizes))]
    drawn = sorted(sizes.items())
    labels = [f"{number(size)} parameters" for size, _ in drawn]
    lines = [
        Line(label, sorted(points), style) for label, (_, points), style in zip(labels, drawn, styles, strict=True)
    ]
    chart = line_chart(
        "loss against compute",
        lines,
        x_label="log10 of FLOPs (6 N D)",
        y_label="loss (nats per token)",
        width=900,
    )
    weak = "Parameters with embeddings. A law of small runs is weak evidence for runs a hundred times as large."
    legend = list(zip(labels, styles, strict=True))
    figure = Figure(
        "Loss against compute, one line per size", chart, ". ".join(law_sentences(law)) + ".", weak, legend, wide=True
    )
    profiles = _isoflop(law.get("isoflop"))
    return Section("law", "Scaling law", "", [figure, profiles] if profiles else [figure])


def _keys(document: Mapping[str, Any], styles: Mapping[int, str]) -> Section:
    figures = []
    if plot := parallel_coordinates(document, styles):
        caption = (
            "One line per choice of settings, from its values to its result; the best are coloured as in the curves."
        )
        figures.append(Figure("Parallel coordinates", plot, caption, "", wide=True))
    if shares := document["importance"]:
        drawn = sorted(shares.items(), key=lambda item: -item[1])
        rows = [(key.rpartition(".")[2], [Bar(share)]) for key, share in drawn]
        chart = bar_chart("importance", rows, value_format=lambda value: f"{100 * value:.0f} %")
        caption = "The share of the differences that each key explains by itself or with others (fANOVA)."
        weak = "Estimated by a forest of trees on these trials alone: with few trials it is weak evidence."
        figures.append(Figure("Importance of the keys", chart, caption, weak))
    return Section("keys", "Keys", "", figures)


def parallel_coordinates(document: Mapping[str, Any], styles: Mapping[int, str], width: int = 900) -> Markup:
    """Draw one axis per key and one for the measured figure; empty if fewer than two settings ended."""
    rows = [row for row in document["settings"] if row["mean"] is not None]
    keys = list(dict.fromkeys(key for row in rows for key in row["settings"]))
    if len(rows) < 2 or not keys:
        return Markup("")
    height, top, bottom, left, right = 300, 34, 18, 70, 90
    axes = [_axis(key.rpartition(".")[2], [row["settings"].get(key) for row in rows]) for key in keys]
    axes.append(_axis(document["measure"], [row["mean"] for row in rows]))
    xs = [left + (width - left - right) * index / (len(axes) - 1) for index in range(len(axes))]
    deep = height - top - bottom
    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="parallel coordinates" class="chart">']
    for x, (title, _, _) in zip(xs, axes, strict=True):
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{height - bottom}"/>')
        parts.append(f'<text class="axis" x="{x:.1f}" y="14" text-anchor="middle">{escape(title)}</text>')
    for number_of, row in reversed(list(enumerate(rows))):  # the best is drawn last, on top
        ys = [top + deep * (1 - positions[number_of]) for _, _, positions in axes]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
        style = styles.get(row["arm"], "base faint")
        message = escape(f"{row['name']}: {number(row['mean'])}")
        parts.append(f'<polyline class="line {style}" points="{points}"><title>{message}</title></polyline>')
    for x, (_, labels, _) in zip(xs, axes, strict=True):  # after the lines, which would run through them
        # Left of the first axis there are no lines at all.
        label_x, anchor = (x - 6, "end") if x == left else (x + 6, "start")
        for position, label in _without_overlap(labels, 13 / deep):
            y = top + deep * (1 - position) + 3.5
            parts.append(
                f'<text class="level-label" x="{label_x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(label)}</text>'
            )
    return Markup("".join([*parts, "</svg>"]))


def _without_overlap(labels: Sequence[tuple[float, str]], least: float) -> list[tuple[float, str]]:
    """Return the labels that do not overlap; of two overlapping labels, the one nearer to an end. Both ends stay."""
    kept: list[tuple[float, str]] = []
    for position, label in sorted(labels, key=lambda entry: min(entry[0], 1 - entry[0])):
        if all(abs(position - other_position) >= least for other_position, _ in kept):
            kept.append((position, label))
    return kept


def _axis(title: str, values: Sequence[Any]) -> tuple[str, list[tuple[float, str]], list[float]]:
    """Return (title, labels with their places from 0 to 1, the place of each value): numbers by size, on a log scale if
    they span more than a factor of ten; other values evenly spaced."""
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        log = min(values) > 0 and max(values) / min(values) > 10
        scale = [math.log(value) if log else float(value) for value in values]
        low, high = min(scale), max(scale)
        positions = [(value - low) / (high - low) if high > low else 0.5 for value in scale]
        labels = dict(zip(positions, map(number, values), strict=True))
        if len(labels) > 6:
            labels = {position: label for position, label in labels.items() if position in (0.0, 1.0)}
        return title, list(labels.items()), positions
    texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
    distinct = list(dict.fromkeys(texts))
    position_of = {
        text: (index / (len(distinct) - 1) if len(distinct) > 1 else 0.5) for index, text in enumerate(distinct)
    }
    return (
        title,
        [(position, text[:18]) for text, position in position_of.items()],
        [position_of[text] for text in texts],
    )


def _curves_lead(document: Mapping[str, Any]) -> str:
    several = len(document["settings"]) > COLOURED
    return f"The {COLOURED} best settings are coloured, the others grey." if several else ""


def _curves(document: Mapping[str, Any], curves: Curves, styles: Mapping[int, str]) -> list[Figure]:
    names = {row["arm"]: row["name"] for row in document["settings"]}
    figures = []
    for title, by_trial in curves.items():
        lines = []
        for number, points in by_trial.items():
            arm = document["trials"][number]["arm"]
            lines.append(Line(names[arm], points, styles.get(arm, "base"), faint=arm not in styles))
        lines.sort(key=lambda line: not line.faint)
        chart = line_chart(title, lines, x_label="batch", y_label="loss (nats per token)", width=900)
        if chart:
            arms = {document["trials"][number]["arm"] for number in by_trial}
            legend = [(names[arm], style) for arm, style in styles.items() if arm in arms]
            figures.append(Figure(title, chart, "", "", legend, wide=True))
    return figures


def _trials(document: Mapping[str, Any]) -> Section:
    rows = [
        [
            str(index),
            trial["name"] or " ".join(f"{key}={json.dumps(value)}" for key, value in trial["settings"].items()),
            str(trial["seed"]),
            trial["status"],
            number(trial["value"]),
            f"{trial['seconds']:.0f} s",
            trial["error"] or trial["run_id"],
        ]
        for index, trial in enumerate(document["trials"])
    ]
    columns = ["", "settings", "seed", "", document["measure"], "", "run"]
    return Section("trials", "Trials", "", tables=[Table("All trials", columns, rows, folded=True, numeric=(4, 5))])
