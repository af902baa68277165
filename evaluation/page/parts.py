"""What a section of the page may hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from evaluation.page.plots import Line, smoothed


@dataclass(frozen=True)
class Figure:
    """A drawing with what it means and where it is weak."""

    title: str
    svg: Markup
    means: str
    weak: str
    legend: Sequence[tuple[str, str]] = ()
    wide: bool = False


@dataclass(frozen=True)
class Table:
    """A table; numeric columns are aligned to the right. `folded` hides it behind its title."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    folded: bool = False
    numeric: Sequence[int] = ()
    mono: Sequence[int] = ()


@dataclass(frozen=True)
class Section:
    """A part of the page."""

    id: str
    title: str
    lead: str = ""
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    samples: Sequence[dict[str, Any]] = ()
    folded: Sequence[tuple[str, str]] = field(default_factory=tuple)

    def __bool__(self) -> bool:
        return bool(self.lead or self.figures or self.tables or self.samples or self.folded)


def loss_lines(points: list[tuple[float, float]], label: str = "training") -> list[Line]:
    if not points:
        return []
    half_life = max(3.0, len(points) / 60)
    return [
        Line(f"{label}, each batch", points, "train", faint=True),
        Line(label, smoothed(points, half_life), "train"),
    ]
