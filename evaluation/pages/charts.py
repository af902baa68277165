"""Drawings as inline SVG; their colours come from the page's style sheet, so that they follow light and dark."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

from markupsafe import Markup

from evaluation.pages.words import compact

Point = tuple[float, float]
MAX_POINTS = 400
PHONE_WIDTH = 340
ROW_CHARACTER, MARK_CHARACTER = 7.2, 6.6
"""Width per character of the labels next to a drawing, unless a phone's style enlarges them."""


@dataclass(frozen=True)
class Line:
    """A series (x, y) with its label; `style` is a class of the style sheet: train, validation, base, sft, rlhf.

    joined: draw a line through the points; if False, each is a separate dot.
    """

    label: str
    points: Sequence[Point]
    style: str
    faint: bool = False
    joined: bool = True


@dataclass(frozen=True)
class Level:
    """A horizontal line for a baseline."""

    label: str
    value: float


@dataclass(frozen=True)
class Mark:
    """An estimate with its interval; bounds may be missing."""

    label: str
    style: str
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class IntervalRow:
    """One line of an interval plot: marks of several models, and the value of guessing or indifference."""

    label: str
    marks: Sequence[Mark] = field(default_factory=tuple)
    reference: float | None = None


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers that span [low, high]: steps of 1, 2 or 5 times a power of ten."""
    if high <= low:
        high = low + 1
    raw = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(step * i, 12) for i in range(first, last + 1)]


def thinned(points: Sequence[Point]) -> list[Point]:
    """Return at most MAX_POINTS points, each the mean of an equal number of neighbours, so that the drawing of a long
    run is no larger than that of a short one."""
    if len(points) <= MAX_POINTS:
        return list(points)
    width = math.ceil(len(points) / MAX_POINTS)
    groups = [points[i : i + width] for i in range(0, len(points), width)]
    return [(group[-1][0], math.fsum(y for _, y in group) / len(group)) for group in groups]


def smoothed(points: Sequence[Point], half_life: float) -> list[Point]:
    """Return the exponential moving mean over steps, corrected for its start."""
    keep = 0.5 ** (1 / max(half_life, 1e-9))
    mean, weight, out = 0.0, 0.0, []
    for x, y in points:
        mean, weight = keep * mean + (1 - keep) * y, keep * weight + (1 - keep)
        out.append((x, mean / weight))
    return out


def _within_sight(noise: Sequence[float], low: float, high: float) -> list[float]:
    """Return the values of single batches that widen the scale: all of them, but for outliers by more than the height
    of the other lines, which would make these flat."""
    reach = (high - low) or 1.0
    return [value for value in noise if low - reach <= value <= high + reach]


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    levels: Sequence[Level] = (),
    marks: Sequence[tuple[float, str]] = (),
    width: int = 520,
    height: int = 270,
    x_format: Callable[[float], str] = compact,
    y_format: Callable[[float], str] = compact,
    from_zero: bool = False,
    can_zoom: bool = False,
) -> Markup:
    """Draw lines over steps; `marks` (step, message of the event) are vertical. Empty without a single point.

    Args:
        can_zoom: add `data-plot`, the left and right end of the plot with the steps there, and `data-scale`, the same
            of top and bottom, for a script that zooms and shows values.
    """
    drawn = [(line, thinned(line.points)) for line in lines if line.points]
    if not drawn:
        return Markup("")
    xs = [x for _, points in drawn for x, _ in points]
    ys = [y for line, points in drawn for _, y in points if not line.faint]
    ys = ys or [y for _, points in drawn for _, y in points]
    ys += [level.value for level in levels]
    ys += _within_sight([y for line, points in drawn for _, y in points if line.faint], min(ys), max(ys))
    y_ticks = ticks(min(0.0, *ys) if from_zero else min(ys), max(ys), 5)
    x_ticks = [tick for tick in ticks(min(xs), max(xs), 5) if min(xs) <= tick <= max(xs)]
    # Digits are up to 8 wide if a phone's style enlarges them.
    left = max(52, 12 + 8 * max(len(y_format(tick)) for tick in y_ticks))
    right, top, bottom = 12, 26, 34
    y_low, y_high = y_ticks[0], y_ticks[-1]
    x_low, x_high = min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1

    def across(x: float) -> str:
        return f"{left + (x - x_low) / (x_high - x_low) * (width - left - right):.1f}"

    def down(y: float) -> float:
        return top + (y_high - min(max(y, y_low), y_high)) / (y_high - y_low) * (height - top - bottom)

    plot = f' data-plot="{left},{width - right},{x_low:g},{x_high:g}"' if can_zoom else ""
    plot += f' data-scale="{top},{height - bottom},{y_high:g},{y_low:g}"' if can_zoom else ""
    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}" class="chart"{plot}>']
    for tick in y_ticks:
        y = f"{down(tick):.1f}"
        parts.append(f'<line class="grid" x1="{left}" x2="{width - right}" y1="{y}" y2="{y}"/>')
        parts.append(
            f'<text class="tick" x="{left - 7}" y="{down(tick) + 3.5:.1f}" text-anchor="end">{y_format(tick)}</text>'
        )
    for tick in x_ticks:
        x = across(tick)
        # Centred, the first label would touch that of the y axis, and the last would be cut where letters are large.
        anchor = "start" if tick == x_low else "end" if tick == x_high else "middle"
        parts.append(
            f'<text class="tick" x="{x}" y="{height - bottom + 15}" text-anchor="{anchor}">{x_format(tick)}</text>'
        )
    parts.append(f'<text class="axis" x="{width - right}" y="{height - 6}" text-anchor="end">{escape(x_label)}</text>')
    parts.append(f'<text class="axis" x="8" y="11">{escape(y_label)}</text>')
    for level in levels:
        y = f"{down(level.value):.1f}"
        parts.append(f'<line class="level" x1="{left}" x2="{width - right}" y1="{y}" y2="{y}"/>')
    for step, message in marks:
        x = across(min(max(step, x_low), x_high))
        parts.append(
            f'<line class="happened" x1="{x}" x2="{x}" y1="{top}" y2="{height - bottom}">'
            f"<title>{escape(message)}</title></line>"
        )
    for line, points in drawn:
        path = " ".join(f"{across(x)},{down(y):.1f}" for x, y in points)
        faint = " faint" if line.faint else ""
        if line.joined:
            drawn_line = f'<polyline class="line {line.style}{faint}" points="{path}">'
            parts.append(f"{drawn_line}<title>{escape(line.label)}</title></polyline>")
        if len(points) <= 40 and not line.faint:
            parts += [
                f'<circle class="dot {line.style}" cx="{across(step)}" cy="{down(value):.1f}" r="2.6">'
                f"<title>{escape(f'{line.label}: {y_format(value)} at {x_format(step)}')}</title></circle>"
                for step, value in points
            ]
    for level in levels:  # last, so that no line crosses its label
        text = f"{level.label} {y_format(level.value)}"
        attributes = f'x="{width - right - 4}" y="{down(level.value) - 5:.1f}" text-anchor="end"'
        parts.append(f'<text class="level-label" {attributes}>{escape(text)}</text>')
    return Markup("".join([*parts, "</svg>"]))


def interval_plot(
    title: str,
    rows: Sequence[IntervalRow],
    *,
    value_format: Callable[[float], str],
    span: tuple[float, float] | None = None,
    width: int = 900,
    reference_label: str = "",
) -> Markup:
    """Draw estimates with whiskers, one row per task or category, one colour per model, and guessing as a dashed
    line: twice, for wide pages and for phones, of which the style sheet shows one."""
    rows = [row for row in rows if row.marks]
    if not rows:
        return Markup("")
    wide = _intervals(title, rows, value_format, span, width, reference_label, is_narrow=False)
    return wide + _intervals(title, rows, value_format, span, PHONE_WIDTH, reference_label, is_narrow=True)


def _intervals(
    title: str,
    rows: Sequence[IntervalRow],
    value_format: Callable[[float], str],
    span: tuple[float, float] | None,
    width: int,
    reference_label: str,
    *,
    is_narrow: bool,
) -> Markup:
    """Return one of the two drawings; on the narrow one the name of a row is above its marks."""
    ends = [v for row in rows for m in row.marks for v in (m.value, m.low, m.high) if v is not None]
    ends += [row.reference for row in rows if row.reference is not None]
    low, high = span or (min(ends), max(ends))
    scale = ticks(low, high, 3 if is_narrow else 6)
    top, bottom, step, gap = 6, 26, 18 if is_narrow else 16, 12
    above = 20 if is_narrow else 0
    bottom += 18 if is_narrow and reference_label else 0
    names = [row.label for row in rows]
    left = min(max(150, 24 + math.ceil(ROW_CHARACTER * max(map(len, names)))), width // 3)
    left = 24 if is_narrow else left
    # A mark's name precedes its value, so the name has to leave room for the value.
    values = max(len(value_format(mark.value)) for row in rows for mark in row.marks)
    longest = max(len(mark.label) for row in rows for mark in row.marks)
    right = min(max(90, 16 + math.ceil(MARK_CHARACTER * (longest + 1 + values))), width * (2 if is_narrow else 1) // 4)
    max_label_characters = max(3, int((right - 16) / MARK_CHARACTER) - 1 - values)
    heights = [above + step * len(row.marks) + gap for row in rows]
    height = top + sum(heights) + bottom

    def across(value: float) -> float:
        return left + (value - scale[0]) / (scale[-1] - scale[0]) * (width - left - right)

    kind = "chart intervals narrow" if is_narrow else "chart intervals"
    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}" class="{kind}">']
    for tick in scale:
        x = f"{across(tick):.1f}"
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{top}" y2="{height - bottom}"/>')
        parts.append(
            f'<text class="tick" x="{x}" y="{height - bottom + 17}" text-anchor="middle">{value_format(tick)}</text>'
        )
    y = float(top)
    for row, tall in zip(rows, heights, strict=True):
        room = width - 16 if is_narrow else left - 24
        label_at = (
            f'x="8" y="{y + 17:.1f}"' if is_narrow else f'x="{left - 12}" y="{y + tall / 2 + 4:.1f}" text-anchor="end"'
        )
        parts.append(
            f'<text class="row-label" {label_at}>{escape(_shortened(row.label, int(room / ROW_CHARACTER)))}'
            f"<title>{escape(row.label)}</title></text>"
        )
        if row.reference is not None:
            x = f"{across(row.reference):.1f}"
            parts.append(f'<line class="level" x1="{x}" x2="{x}" y1="{y + above + 3:.1f}" y2="{y + tall - 3:.1f}"/>')
        for number, mark in enumerate(row.marks):
            position = (width - right + 8, y + above + gap / 2 + step * (number + 0.5))
            parts.append(_whisker(mark, position, across, value_format, max_label_characters))
        y += tall
    if reference_label and is_narrow:
        parts.append(
            f'<text class="axis" x="{width - 8}" y="{height - 6}" text-anchor="end">┆ {escape(reference_label)}</text>'
        )
    elif reference_label:
        parts.append(
            f'<text class="axis" x="{left - 24}" y="{height - 9}" text-anchor="end">┆ {escape(reference_label)}</text>'
        )
    return Markup("".join([*parts, "</svg>"]))


def _shortened(text: str, max_characters: int) -> str:
    return text if len(text) <= max_characters else f"{text[: max_characters - 1]}…"


def _whisker(
    mark: Mark,
    position: tuple[float, float],
    across: Callable[[float], float],
    value_format: Callable[[float], str],
    max_label_characters: int,
) -> str:
    """Return a mark with its interval. at: the place of its label. of_name: number of characters shown of its name."""
    label_x, y = position
    message = f"{mark.label}: {value_format(mark.value)}"
    parts = []
    if mark.low is not None and mark.high is not None:
        message += f" ({value_format(mark.low)} to {value_format(mark.high)})"
        x1, x2 = across(mark.low), across(mark.high)
        parts.append(f'<line class="whisker {mark.style}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
    parts.append(f'<circle class="dot {mark.style}" cx="{across(mark.value):.1f}" cy="{y:.1f}" r="4.5"/>')
    parts.append(
        f'<text class="mark-label {mark.style}" x="{label_x:.1f}" y="{y + 4:.1f}">'
        f"{escape(_shortened(mark.label, max_label_characters))} "
        f"{escape(value_format(mark.value))}</text>"
    )
    return f"<g><title>{escape(message)}</title>{''.join(parts)}</g>"


@dataclass(frozen=True)
class Bar:
    """One bar of a row; `style` is a class of the style sheet: train, validation, base, sft, rlhf."""

    value: float
    style: str = "train"
    label: str = ""


def bar_chart(
    title: str,
    rows: Sequence[tuple[str, Sequence[Bar]]],
    *,
    value_format: Callable[[float], str],
    width: int = 520,
    label_width: int = 150,
) -> Markup:
    """Draw rows of bars below one another, each with its value at its end. Empty without a row."""
    if not rows:
        return Markup("")
    thick, gap, right = 13, 9, 74
    largest = max((bar.value for _, bars in rows for bar in bars), default=0) or 1
    height = sum(thick * len(bars) + gap for _, bars in rows) + gap
    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}" class="chart">']
    y = float(gap)
    for label, bars in rows:
        middle = y + thick * len(bars) / 2 + 4
        max_characters = label_width // 7
        label_text = label if len(label) <= max_characters else f"{label[: max_characters - 1]}…"
        name = f'<text class="row-label" x="{label_width - 8}" y="{middle:.1f}" text-anchor="end">{escape(label_text)}'
        parts.append(f"{name}<title>{escape(label)}</title></text>")
        for bar in bars:
            long = max(1.0, (width - label_width - right) * bar.value / largest) if bar.value else 0
            message = escape(f"{label}{f', {bar.label}' if bar.label else ''}: {value_format(bar.value)}")
            parts.append(
                f'<rect class="bar {bar.style}" x="{label_width}" y="{y:.1f}" width="{long:.1f}" height="{thick - 2}" '
                f'rx="2"><title>{message}</title></rect><text class="tick" x="{label_width + long + 5:.1f}" '
                f'y="{y + thick - 4:.1f}">{escape(value_format(bar.value))}</text>'
            )
            y += thick
        y += gap
    return Markup("".join([*parts, "</svg>"]))


# An embedded picture follows the light or dark scheme of the surrounding page (`color-scheme`).
STYLE = """
svg{--plate:#fff;--ink:#5b6470;--grid:#eceef0;--level:#8a94a0;--train:#3b5bdb;--validation:#0f9d7a}
@media (prefers-color-scheme:dark){svg{--plate:#1a1d21;--ink:#a3acb6;--grid:#2a2f35;--level:#78828d;--train:#8ba3ff;
--validation:#3ecfa6}}
svg{background:var(--plate);font:11px system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif}
text{fill:var(--ink)}.grid{stroke:var(--grid)}.level{stroke:var(--level);stroke-dasharray:4 3}
.level-label{paint-order:stroke;stroke:var(--plate);stroke-width:3px}
.line{fill:none;stroke-width:1.6;stroke-linejoin:round}.faint{stroke-width:1;opacity:.35}
.line.train{stroke:var(--train)}.line.validation{stroke:var(--validation)}
.dot.train,rect.train{fill:var(--train)}.dot.validation,rect.validation{fill:var(--validation)}
"""
LEGEND_HEIGHT = 20


def data_uri(svg: str, legend: Sequence[tuple[str, str]] = ()) -> str:
    """Return `data:image/svg+xml;base64,…` of a drawing of this module, with its legend (label, style) below it."""
    frame = re.search(r'viewBox="0 0 (\d+) (\d+)"', svg)
    assert frame, "a drawing of this file"
    width, height = map(int, frame.groups())
    entries, x = [], 8
    for label, style in legend:
        entries.append(f'<rect class="{style}" x="{x}" y="{height + 6}" width="8" height="8" rx="2"/>')
        entries.append(f'<text x="{x + 12}" y="{height + 13}">{escape(label)}</text>')
        x += 28 + 6 * len(label)
    tall = height + (LEGEND_HEIGHT if legend else 0)
    size = f'viewBox="0 0 {width} {tall}" width="{width}" height="{tall}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" {size}>'
    inner = svg.partition(">")[2].removesuffix("</svg>")
    standalone = f"{head}<style>{STYLE}</style>{inner}{''.join(entries)}</svg>"
    return "data:image/svg+xml;base64," + base64.b64encode(standalone.encode()).decode()
