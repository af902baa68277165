"""The drawing of a pipeline as SVG: layers from left to right, in rows; for a run, with the state of each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from evaluation.pages.lineage import Edge, layers_of, ordered_layers

LAYERS_PER_ROW = 6
WIDTH, HEIGHT, COLUMN_GAP, LINE_GAP, ROW_GAP, MARGIN, PADDING = 132, 50, 22, 12, 36, 18, 9
PASSING = 16
"""Height of an arrow that passes a layer between its boxes."""
NAME_SIZE, NOTE_SIZE, NOTE_LINE = 13, 10, 12
# Mean width of a character, in em, in the widest fonts that a browser may take for system-ui (Verdana, DejaVu Sans).
WIDE_CHARACTER = 0.6
STYLE = """
text{font-family:system-ui,sans-serif;font-size:13px;fill:#1b1f24}text.small{font-size:10px;fill:#57606a}
rect{fill:#f6f8fa;stroke:#8c959f}rect.model{fill:#ddf4ff;stroke:#0969da}path{fill:none;stroke:#8c959f;stroke-width:1.4}
marker path{fill:#8c959f;stroke:none}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}text.small{fill:#9198a1}rect{fill:#161b22;stroke:#6e7681}
rect.model{fill:#0c2d4d;stroke:#4493f8}path{stroke:#6e7681}marker path{fill:#6e7681;stroke:none}}
"""
HEAD = (
    '<marker id="arrow-head" markerWidth="6" markerHeight="6" refX="6" refY="3" orient="auto"><path d="M0,0L6,3L0,6z"/>'
    "</marker>"
)


@dataclass(frozen=True)
class Box:
    """One box: a step, with the validations and measurements that are named in it.

    notes: a word for each of `within`. about: what each of them does, a line each. label: shown instead of
    the name, which identifies the box. address: of the page that a click opens.
    """

    name: str
    within: tuple[str, ...]
    notes: tuple[str, ...]
    about: str
    is_model: bool
    label: str = ""
    address: str = ""


@dataclass(frozen=True)
class BoxState:
    """Progress of a box in a run. kind: a status of `flows.runs.journal.Status`; "shown" for the box that a page
    is about. text: the status in words.

    ratio: the part that is done, from 0 to 1; None if it is unknown.
    """

    kind: str
    text: str
    ratio: float | None = None


@dataclass(frozen=True)
class Drawing:
    """The boxes of a pipeline and the arrows between them, as a run keeps them in its folder."""

    boxes: tuple[Box, ...]
    arrows: tuple[tuple[str, str], ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Drawing:
        lists = ("within", "notes")
        boxes = (Box(**box | {name: tuple(box[name]) for name in lists}) for box in document["boxes"])
        return cls(tuple(boxes), tuple((source, target) for source, target in document["arrows"]))


def draw(
    drawing: Drawing,
    states: Mapping[str, BoxState] | None = None,
    style: str = "",
    about: str = "the steps of the pipeline",
) -> str:
    """Return a drawing as SVG.

    states: by box, how far a run is; its words then take the place of a box's notes. style: a style sheet for the file;
    without one the page that holds the picture has its own. about: the picture in words.
    """
    names = [box.name for box in drawing.boxes]
    edges = [Edge(*arrow) for arrow in drawing.arrows]
    layers, steps = ordered_layers(names, edges, layers_of(names, edges))
    positions, tops, width, height = _positions(layers, frozenset(names))
    sheet = f"<style>{style}</style>" if style else ""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(about)}">{sheet}<defs>{HEAD}</defs>'
    ]
    for source, target in steps:
        head = ' marker-end="url(#arrow-head)"' if target in names else ""
        parts.append(f'<path d="{_arrow(positions[source], positions[target], tops[target], width)}"{head}/>')
    passing = [corner for name, corner in positions.items() if name not in names]
    parts += [f'<path d="M{x},{y + HEIGHT // 2}h{WIDTH}"/>' for x, y in passing]
    parts += [_box(box, (states or {}).get(box.name), *positions[box.name]) for box in drawing.boxes]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _positions(
    layers: Sequence[Sequence[str]], boxes: frozenset[str]
) -> tuple[Mapping[str, tuple[int, int]], Mapping[str, int], int, int]:
    """Return the upper left corner of each box and of each arrow that passes a layer, as if that were a box too; the
    upper edge of the row of each; the width and height of all."""
    positions: dict[str, tuple[int, int]] = {}
    tops: dict[str, int] = {}
    top = 4
    for first in range(0, len(layers), LAYERS_PER_ROW):
        row = layers[first : first + LAYERS_PER_ROW]
        bottom = top
        for column, layer in enumerate(row):
            at = top
            for name in layer:
                height = HEIGHT if name in boxes else PASSING
                positions[name] = (MARGIN + column * (WIDTH + COLUMN_GAP), at + (height - HEIGHT) // 2)
                tops[name] = top
                at += height + (LINE_GAP if name in boxes else 0)
                bottom = max(bottom, at - (LINE_GAP if name in boxes else 0))
        top = bottom + ROW_GAP
    columns = min(LAYERS_PER_ROW, len(layers))
    return positions, tops, columns * (WIDTH + COLUMN_GAP) - COLUMN_GAP + 2 * MARGIN, top - ROW_GAP + 4


def _arrow(source: tuple[int, int], target: tuple[int, int], top: int, width: int) -> str:
    """An arrow from the right side of one box to the left side of the other; into another row along the margins and
    above all boxes of that row, whose upper edge is `top`."""
    x, start, to_x, end = source[0] + WIDTH, source[1] + HEIGHT // 2, target[0], target[1] + HEIGHT // 2
    if to_x > x:
        middle = (x + to_x) // 2
        return f"M{x},{start}C{middle},{start} {middle},{end} {to_x},{end}"
    above = top - ROW_GAP // 2
    return f"M{x},{start}H{width - 6}V{above}H6V{end}H{to_x}"


def _box(box: Box, state: BoxState | None, x: int, y: int) -> str:
    notes = _note_lines([state.text] if state else box.notes)[:2]
    kind = ' class="model"' if box.is_model else ""
    # The name and the notes below it are centred together.
    baseline = y + (HEIGHT - NOTE_LINE * len(notes)) // 2 + 5
    small = [
        f'<text class="small" x="{x + PADDING}" y="{baseline + NOTE_LINE * line + 2}"{_fit(note, NOTE_SIZE)}>'
        f"{escape(note)}</text>"
        for line, note in enumerate(notes, 1)
    ]
    group, bar = "<g>", ""
    if state is not None:
        group = f'<g class="step {escape(state.kind)}" data-step="{escape(box.name)}">'
        if state.ratio is not None:
            done = round((WIDTH - 2) * min(1.0, max(0.0, state.ratio)), 1)
            bar = f'<rect class="bar" x="{x + 1}" y="{y + HEIGHT - 5}" width="{done}" height="4" rx="2"/>'
    label = box.label or box.name
    drawn = (
        f"{group}<title>{escape(box.about)}</title>"
        f'<rect{kind} x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="7"/>{bar}'
        f'<text x="{x + PADDING}" y="{baseline}"{_fit(label, NAME_SIZE)}>{escape(label)}</text>'
        f"{''.join(small)}</g>"
    )
    return f'<a href="{escape(box.address)}">{drawn}</a>' if box.address else drawn


def _is_wide(text: str, size: float) -> bool:
    """True if a line of text may be wider than a box in a wide font; `size` is in pixels."""
    return len(text) * size * WIDE_CHARACTER > WIDTH - 2 * PADDING


def _fit(text: str, size: float) -> str:
    """Return attributes that squeeze a line of text into its box; none if it fits in every font."""
    return f' textLength="{WIDTH - 2 * PADDING}" lengthAdjust="spacingAndGlyphs"' if _is_wide(text, size) else ""


def _note_lines(notes: Sequence[str]) -> list[str]:
    """Return the notes of a box, as many on a line as fit."""
    lines: list[str] = []
    for note in notes:
        joined = f"{lines[-1]} · {note}" if lines else note
        if lines and not _is_wide(joined, NOTE_SIZE):
            lines[-1] = joined
        else:
            lines.append(note)
    return lines
