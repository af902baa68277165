"""The picture of a config: its steps as boxes, with an arrow from each input.

python -m flows.planning.picture configs/quickstart.yaml > docs/pictures/quickstart.svg
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from evaluation.pages.lineage import Edge
from evaluation.pages.pipeline import STYLE, Box, Drawing, draw
from flows.config.graph import Graph, graph
from flows.config.read import load
from infra.store.measurements import TRAINED

_WORDS = {"verdict": "validated", "measurement": "measured"}


def drawing_of(nodes: Graph) -> Drawing:
    """Return the drawing of a pipeline. Validations and the scores of a model are named in the box of what they are
    about; an arrow that follows from others is left out."""
    about = {name: _about(nodes, name) for name in nodes}
    pairs = {(about[source], about[name]) for name, node in nodes.items() for source in node.upstream}
    edges = without_shortcuts([Edge(*pair) for pair in sorted(pairs) if pair[0] != pair[1]])
    boxes = []
    for name in (name for name in nodes if about[name] == name):
        stage = nodes[name].stage
        within = tuple(other for other in nodes if other != name and about[other] == name)
        notes = tuple(_WORDS.get(nodes[other].stage.makes, nodes[other].stage.name) for other in within)
        purposes = [f"{name}: {stage.about}", *(f"{other}: {nodes[other].stage.about}" for other in within)]
        boxes.append(Box(name, within, notes, "\n".join(purposes), stage.makes_weights))
    return Drawing(tuple(boxes), tuple((edge.source, edge.target) for edge in edges))


def pipeline_picture(nodes: Graph) -> str:
    """Return the picture of a pipeline as an SVG file."""
    return draw(drawing_of(nodes), style=STYLE)


def _about(nodes: Graph, name: str) -> str:
    """The step in whose box a step is named: its own, but for validations and scores, which are about one input."""
    node = nodes[name]
    inputs = node.inputs
    is_verdict, is_score = node.stage.makes == "verdict", node.stage.makes == "scores"
    if node.measures:
        return inputs[TRAINED]
    return inputs["data"] if is_verdict and "data" in inputs else inputs["model"] if is_score else name


def without_shortcuts(edges: Sequence[Edge]) -> list[Edge]:
    """Without arrows between two boxes that a longer way joins too."""
    targets: dict[str, set[str]] = {}
    for edge in edges:
        targets.setdefault(edge.source, set()).add(edge.target)

    @cache
    def reached_from(source: str) -> frozenset[str]:
        return frozenset().union(*({target} | reached_from(target) for target in targets.get(source, ())))

    return [
        edge
        for edge in edges
        if not any(edge.target in reached_from(other) for other in targets[edge.source] - {edge.target})
    ]


if __name__ == "__main__":
    sys.stdout.write(pipeline_picture(graph(load(Path(sys.argv[1])))))
