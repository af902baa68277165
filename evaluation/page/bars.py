"""Horizontal bars as inline SVG, in the colours of the page's style sheet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from markupsafe import Markup


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
    """Rows of bars below one another, each with its value at its end. Empty without a row."""
    if not rows:
        return Markup("")
    thick, gap, right = 13, 9, 74
    most = max((bar.value for _, bars in rows for bar in bars), default=0) or 1
    height = sum(thick * len(bars) + gap for _, bars in rows) + gap
    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}" class="chart">']
    y = float(gap)
    for label, bars in rows:
        middle = y + thick * len(bars) / 2 + 4
        room = label_width // 7
        shown = label if len(label) <= room else f"{label[: room - 1]}…"
        name = f'<text class="row-label" x="{label_width - 8}" y="{middle:.1f}" text-anchor="end">{escape(shown)}'
        parts.append(f"{name}<title>{escape(label)}</title></text>")
        for bar in bars:
            long = max(1.0, (width - label_width - right) * bar.value / most) if bar.value else 0
            message = escape(f"{label}{f', {bar.label}' if bar.label else ''}: {value_format(bar.value)}")
            parts.append(
                f'<rect class="bar {bar.style}" x="{label_width}" y="{y:.1f}" width="{long:.1f}" height="{thick - 2}" '
                f'rx="2"><title>{message}</title></rect><text class="tick" x="{label_width + long + 5:.1f}" '
                f'y="{y + thick - 4:.1f}">{escape(value_format(bar.value))}</text>'
            )
            y += thick
        y += gap
    return Markup("".join([*parts, "</svg>"]))
