"""Numbers in a readable format, and intervals in words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from evaluation.statistics.intervals import Interval


def compact(value: float) -> str:
    """Return a number for an axis: 1.5k, 20M, 0.001."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}" if value else "0"


def percent(value: float, digits: int = 1) -> str:
    """Return a share as percent: 0.5 is `50.0 %`."""
    return "–" if math.isnan(value) else f"{100 * value:.{digits}f} %"


def whole_percent(value: float) -> str:
    return percent(value, 0)


def fixed(value: float, digits: int = 2) -> str:
    """Return a number with fixed digits and a real minus sign."""
    return "–" if math.isnan(value) else f"{value:.{digits}f}".replace("-", "−")


def signed(value: float, digits: int = 2) -> str:
    return ("+" if value > 0 else "") + fixed(value, digits)


def seconds(value: float) -> str:
    """Return a duration: 8.2 s, 3 min 20 s, 2 h 5 min."""
    if value < 60:
        return f"{value:.1f} s"
    minutes, remainder = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {remainder} s"
    return f"{minutes // 60} h {minutes % 60} min"


def p_value(value: float) -> str:
    """Return a p-value for a sentence: `p = 0.03`, `p < 0.0001`."""
    return "p < 0.0001" if value < 1e-4 else f"p = {value:.2g}"


def size(value: float) -> str:
    """Return a number of bytes: 12.0 MB."""
    for unit, letter in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= unit:
            return f"{value / unit:.1f} {letter}"
    return f"{value:.0f} B"


def interval_of(figures: dict[str, float], name: str) -> Interval | None:
    """Return the figure with its bounds; None if it was not measured. Missing bounds are nan."""
    if name not in figures:
        return None
    return Interval(figures[name], figures.get(f"{name}_low", math.nan), figures.get(f"{name}_high", math.nan))


def between(interval: Interval, digits: int = 2) -> str:
    """Return `(1.20 to 1.30)`; empty without bounds."""
    if math.isnan(interval.low):
        return ""
    return f"({fixed(interval.low, digits)} to {fixed(interval.high, digits)})"


def between_percent(interval: Interval, digits: int = 1) -> str:
    if math.isnan(interval.low):
        return ""
    return f"({fixed(100 * interval.low, digits)} to {fixed(100 * interval.high, digits)} %)"


def on_the_way(points: Sequence[tuple[float, float]]) -> str:
    """Return a sentence on the loss of a held-out sample during training; empty below two points."""
    if len(points) < 2:
        return ""
    (first_step, first), (last_step, last) = points[0], points[-1]
    step, least = min(points, key=lambda point: point[1])
    turn = "lowest at the end" if step == last_step else f"lowest at batch {compact(step)} ({fixed(least, 3)})"
    began, ended = (
        f"{fixed(first, 3)} at batch {compact(first_step)}",
        f"{fixed(last, 3)} at batch {compact(last_step)}",
    )
    return f" On a sample of held-out pairs the loss went from {began} to {ended}, {turn}."


def language(code: str) -> str:
    """Return a language's name: `English` for `en`; a text that is not a language code stays unchanged."""
    from babel import Locale

    return str(Locale("en").languages.get(code, code))


def count(number: int, noun: str) -> str:
    """Return `1 source`, `3 sources`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
