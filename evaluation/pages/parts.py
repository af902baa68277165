"""The parts of a page, and the single renderer that turns them into HTML: reports, and the lineage of an artifact."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup

from evaluation.pages.charts import Line, smoothed
from infra.pages import style

TEMPLATES = Path(__file__).parent.parent / "templates"


@dataclass(frozen=True)
class Figure:
    """A drawing with its meaning and its weaknesses."""

    title: str
    svg: Markup
    means: str
    weak: str
    legend: Sequence[tuple[str, str]] = ()
    wide: bool = False


@dataclass(frozen=True)
class Table:
    """A table; numeric columns are right-aligned. `folded` hides it behind its title."""

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
    folded_figures: Sequence[Figure] = ()
    """Charts behind their titles."""
    closed: bool = False
    """The section shows its title only, until it is opened."""

    def __bool__(self) -> bool:
        return bool(self.lead or self.figures or self.folded_figures or self.tables or self.samples or self.folded)


@dataclass(frozen=True)
class KeyFigure:
    """A number in large print.

    value: as text, e.g. `36.6 → 56.8 %`. label: its meaning. note: what it compares with.
    """

    value: str
    label: str
    note: str = ""


@dataclass(frozen=True)
class Opening:
    """Content above the claims: the outcome, key figures, one chart, samples, then a plain description of the models
    and their figures side by side.

    outcome: (state of a claim, sentence). links: (label, address relative to the page). commands: (purpose, command
    line).
    """

    sentences: Sequence[str]
    verdict: str = ""
    table: Table | None = None
    links: Sequence[tuple[str, str]] = ()
    commands: Sequence[tuple[str, str]] = ()
    outcome: tuple[str, str] | None = None
    key_figures: Sequence[KeyFigure] = ()
    chart: Figure | None = None
    samples: Sequence[dict[str, Any]] = ()


def loss_lines(points: list[tuple[float, float]], label: str = "training") -> list[Line]:
    if not points:
        return []
    half_life = max(3.0, len(points) / 60)
    return [
        Line(f"{label}, each batch", points, "train", faint=True),
        Line(label, smoothed(points, half_life), "train"),
    ]


def render_page(
    title: str,
    kind: str,
    facts: Sequence[tuple[str, str]],
    sections: Sequence[Section],
    claims: Sequence[Any] = (),
    opening: Opening | None = None,
    script: str = "",
    footer: str = "Made by Stemma. Intervals are at 95 % unless a stage's config sets another level.",
) -> str:
    """Return a self-contained HTML page; everything in it that is not Markup is escaped.

    Args:
        facts: names and values below the title. opening and claims (`evaluation.pages.verdicts.Claim`) head the
            page. Empty sections are left out.
        script: the page's own JavaScript, the only script that may run in it.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined)
    page = environment.get_template("report.html.j2").render(
        title=title,
        kind=kind,
        facts=facts,
        claims=claims,
        opening=opening,
        sections=[section for section in sections if section],
        script=Markup(script),
        footer=footer,
        script_hash=Markup(base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()),
        css=Markup(style()),
    )
    return page + "\n"
