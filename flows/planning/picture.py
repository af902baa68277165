"""Draws the steps of a config as an SVG: layers from left to right, in rows, with an arrow for what reads what.

python -m flows.planning.picture configs/quickstart.yaml > docs/pictures/quickstart.svg
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from evaluation.pages.lineage import Edge, layers_of, ordered_layers
from flows.config.graph import Graph, graph
from flows.config.read import load
from infra.store.measurements import TRAINED

LAYERS_PER_ROW = 6
WIDTH, HEIGHT, COLUMN_GAP, LINE_GAP, ROW_GAP, MARGIN, PADDING = 132, 50, 22, 12, 36, 18, 9
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
    '<marker id="head" markerWidth="6" markerHeight="6" refX="6" refY="3" orient="auto"><path d="M0,0L6,3L0,6z"/>'
    "</marker>"
)

_WORDS = {"verdict": "validated", "measurement": "measured"}


def pipeline_picture(nodes: Graph) -> str:
    """The picture. Validations and the scores of a model are named in the box of what they are about; an arrow that
    follows from others is left out."""
    about = {name: _about(nodes, name) for name in nodes}
    boxes = [name for name in nodes if about[name] == name]
    pairs = {(about[source], about[name]) for name, node in nodes.items() for source in node.upstream}
    edges = _without_shortcuts([Edge(*pair) for pair in sorted(pairs) if pair[0] != pair[1]])
    layers, steps = ordered_layers(boxes, edges, layers_of(boxes, edges))
    places, width, height = _places(layers)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="the steps of the pipeline"><style>{STYLE}</style><defs>{HEAD}</defs>'
    ]
    for source, target in steps:
        head = ' marker-end="url(#head)"' if target in nodes else ""
        parts.append(f'<path d="{_arrow(places[source], places[target], width)}"{head}/>')
    passing = [place for name, place in places.items() if name not in nodes]
    parts += [f'<path d="M{x},{y + HEIGHT // 2}h{WIDTH}"/>' for x, y in passing]
    for name in boxes:
        small = [other for other in nodes if other != name and about[other] == name]
        parts.append(_box(nodes, name, small, *places[name]))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _about(nodes: Graph, name: str) -> str:
    """The step in whose box a step is named: its own, but for validations and scores, which are about one input."""
    node = nodes[name]
    inputs = node.inputs
    is_verdict, is_score = node.stage.makes == "verdict", node.stage.makes == "scores"
    if node.measures:
        return inputs[TRAINED]
    return inputs["data"] if is_verdict and "data" in inputs else inputs["model"] if is_score else name


def _without_shortcuts(edges: Sequence[Edge]) -> list[Edge]:
    """Without arrows between two steps that a longer way joins too."""
    targets: dict[str, set[str]] = {}
    for edge in edges:
        targets.setdefault(edge.source, set()).add(edge.target)

    def reaches(source: str, target: str) -> bool:
        return any(next_ == target or reaches(next_, target) for next_ in targets.get(source, ()))

    return [
        edge for edge in edges if not any(reaches(other, edge.target) for other in targets[edge.source] - {edge.target})
    ]


def _places(layers: Sequence[Sequence[str]]) -> tuple[Mapping[str, tuple[int, int]], int, int]:
    """The upper left corner of each box, and of where an arrow passes a layer; width and height of it all."""
    places: dict[str, tuple[int, int]] = {}
    top = 4
    for first in range(0, len(layers), LAYERS_PER_ROW):
        row = layers[first : first + LAYERS_PER_ROW]
        for column, layer in enumerate(row):
            for line, name in enumerate(layer):
                places[name] = (MARGIN + column * (WIDTH + COLUMN_GAP), top + line * (HEIGHT + LINE_GAP))
        top += max(len(layer) for layer in row) * (HEIGHT + LINE_GAP) - LINE_GAP + ROW_GAP
    columns = min(LAYERS_PER_ROW, len(layers))
    return places, columns * (WIDTH + COLUMN_GAP) - COLUMN_GAP + 2 * MARGIN, top - ROW_GAP + 4


def _arrow(source: tuple[int, int], target: tuple[int, int], width: int) -> str:
    """An arrow from the right side of one box to the left side of the other; into another row along the margins and
    above its boxes."""
    x, start, to_x, end = source[0] + WIDTH, source[1] + HEIGHT // 2, target[0], target[1] + HEIGHT // 2
    if to_x > x:
        middle = (x + to_x) // 2
        return f"M{x},{start}C{middle},{start} {middle},{end} {to_x},{end}"
    above = target[1] - ROW_GAP // 2
    return f"M{x},{start}H{width - 6}V{above}H6V{end}H{to_x}"


def _box(nodes: Graph, name: str, within: Sequence[str], x: int, y: int) -> str:
    stage = nodes[name].stage
    notes = _note_lines([_WORDS.get(nodes[other].stage.makes, nodes[other].stage.name) for other in within])
    kind = ' class="model"' if stage.makes_weights else ""
    title = "\n".join([f"{name}: {stage.about}", *(f"{other}: {nodes[other].stage.about}" for other in within)])
    # The name and the notes below it are centred together.
    baseline = y + (HEIGHT - NOTE_LINE * len(notes)) // 2 + 5
    small = [
        f'<text class="small" x="{x + PADDING}" y="{baseline + NOTE_LINE * line + 2}"{_fit(note, NOTE_SIZE)}>'
        f"{escape(note)}</text>"
        for line, note in enumerate(notes, 1)
    ]
    return (
        f"<g><title>{escape(title)}</title>"
        f'<rect{kind} x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="7"/>'
        f'<text x="{x + PADDING}" y="{baseline}"{_fit(name, NAME_SIZE)}>{escape(name)}</text>{"".join(small)}</g>'
    )


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


if __name__ == "__main__":
    sys.stdout.write(pipeline_picture(graph(load(Path(sys.argv[1])))))
