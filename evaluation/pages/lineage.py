"""A family of artifacts as a picture, layers from left to right with an arrow for each input, and as a page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from markupsafe import Markup

from evaluation.pages.parts import Figure, Section, Table, render_page
from evaluation.results.artifacts import Artifact
from evaluation.results.stage_order import WEIGHTS
from infra.store.branches import Branch

FILES_SHOWN = 200
DRAWN = 300
"""Most nodes of a picture; one with more is unreadable."""
NODE_WIDTH, NODE_HEIGHT, LAYER_GAP, ROW_GAP = 114, 40, 20, 14
SWEEPS = 12
LAYERS_PER_ROW, MARGIN = 9, 12


@dataclass(frozen=True)
class LineageBox:
    """One node: a name above a line of small print, and the tooltip. address: of the page that a click opens."""

    id: str
    name: str
    small: str
    tooltip: str
    is_model: bool = False
    address: str = ""


@dataclass(frozen=True)
class Edge:
    """From an input to an artifact that was made from it.

    requires: the input had to exist, but its bytes do not affect the result. state: the state of the source's training
    from which the target continues, in words; empty if the artifact itself was read.
    """

    source: str
    target: str
    requires: bool = False
    state: str = ""


def edges_of(artifacts: Mapping[str, Artifact]) -> list[Edge]:
    """Return the edges between the artifacts, found by address in their manifests."""
    by_address: dict[tuple[str, str], str] = {}
    for id, artifact in artifacts.items():
        if artifact.manifest is not None:
            # The first of several steps that share an artifact represents it.
            by_address.setdefault((artifact.manifest.stage, artifact.manifest.fingerprint), id)
    edges = []
    for id, artifact in artifacts.items():
        if artifact.manifest is None:
            continue
        for inputs, requires in ((artifact.manifest.inputs, False), (artifact.manifest.requires, True)):
            for reference in inputs.values():
                source = by_address.get((reference.stage, reference.fingerprint))
                if source is not None and source != id:
                    edges.append(Edge(source, id, requires, str(artifact.branch) if reference.state else ""))
    return sorted(set(edges), key=lambda edge: (edge.source, edge.target, edge.requires, edge.state))


def layers_of(ids: Sequence[str], edges: Sequence[Edge]) -> dict[str, int]:
    """Return the layer of each node: after all of its inputs, and as late as its targets allow."""
    inputs: dict[str, list[str]] = {id: [] for id in ids}
    for edge in edges:
        inputs[edge.target].append(edge.source)
    depth: dict[str, int] = {}

    def layer_of(id: str) -> int:
        if id not in depth:
            depth[id] = 1 + max((layer_of(source) for source in inputs[id]), default=-1)
        return depth[id]

    for id in ids:
        layer_of(id)
    # Each node moves next to its first user, so that a side branch starts where it joins.
    for id in sorted(ids, key=lambda id: -depth[id]):
        targets = [depth[edge.target] for edge in edges if edge.source == id]
        if targets:
            depth[id] = min(targets) - 1
    return depth


def ordered_layers(ids: Sequence[str], edges: Sequence[Edge], depth: Mapping[str, int]) -> tuple[list[list[str]], list]:
    """Return the nodes of each layer from top to bottom, with few crossings, and the edges in steps of one layer.

    Edges over several layers pass through unnamed places (`source>target@layer`), so that they run between the nodes.
    """
    layers: list[list[str]] = [[] for _ in range(max(depth.values(), default=0) + 1)]
    for id in ids:
        layers[depth[id]].append(id)
    steps: list[tuple[str, str]] = []
    for edge in edges:
        last = edge.source
        for layer in range(depth[edge.source] + 1, depth[edge.target]):
            stop = f"{edge.source}>{edge.target}@{layer}"
            layers[layer].append(stop)
            steps.append((last, stop))
            last = stop
        steps.append((last, edge.target))
    for sweep in range(SWEEPS):
        forward = sweep % 2 == 0
        for number in range(len(layers)) if forward else range(len(layers) - 1, -1, -1):
            neighbour = number - 1 if forward else number + 1
            if not 0 <= neighbour < len(layers):
                continue
            row = {id: index for index, id in enumerate(layers[neighbour])}

            def centre(id: str, index: int, row: Mapping[str, int] = row, forward: bool = forward) -> float:
                near = [row[a] for a, b in steps if b == id and a in row] if forward else []
                near = near or [row[b] for a, b in steps if a == id and b in row]
                return sum(near) / len(near) if near else index

            positions = {id: centre(id, index) for index, id in enumerate(layers[number])}
            layers[number].sort(key=lambda id: positions[id])
    return layers, steps


def lineage_picture(artifacts: Mapping[str, Artifact]) -> Markup:
    """Return the picture of a pipeline's artifacts; empty without any."""
    return picture([_box(artifact) for artifact in artifacts.values()], edges_of(artifacts))


def picture(boxes: Sequence[LineageBox], edges: Sequence[Edge]) -> Markup:
    """Return the picture of any family whose edges connect its boxes; empty without boxes."""
    if not boxes:
        return Markup("")
    ids = [box.id for box in boxes]
    layers, _ = ordered_layers(ids, edges, layers_of(ids, edges))
    positions, height = _positions(layers)
    width = min(len(layers), LAYERS_PER_ROW) * (NODE_WIDTH + LAYER_GAP) - LAYER_GAP + 2 * MARGIN
    parts = [
        f'<svg viewBox="0 0 {width} {height:.0f}" style="min-width:{0.7 * width:.0f}px" role="img" '
        'aria-label="lineage of the artifacts" class="chart lineage">'
    ]
    parts += [_arrow(edge, positions, width) for edge in edges]
    parts += [_node(box, *positions[box.id]) for box in boxes]
    return Markup("".join([*parts, "</svg>"]))


def _positions(layers: Sequence[Sequence[str]]) -> tuple[dict[str, tuple[float, float]], float]:
    """Return the upper left corner of each node and of each place that an edge passes, and the height of all rows."""
    positions: dict[str, tuple[float, float]] = {}
    top = 4.0
    for first in range(0, len(layers), LAYERS_PER_ROW):
        row = layers[first : first + LAYERS_PER_ROW]
        tallest = max(sum(_height(id) + ROW_GAP for id in layer) for layer in row)
        for column, layer in enumerate(row):
            y = top + (tallest - sum(_height(id) + ROW_GAP for id in layer)) / 2
            for id in layer:
                positions[id] = (MARGIN + column * (NODE_WIDTH + LAYER_GAP), y)
                y += _height(id) + ROW_GAP
        top += tallest + 2 * ROW_GAP
    return positions, top - 2 * ROW_GAP


def _height(id: str) -> int:
    return 4 if "@" in id else NODE_HEIGHT


def _arrow(edge: Edge, positions: Mapping[str, tuple[float, float]], width: float) -> str:
    x, y = positions[edge.source]
    x, y = x + NODE_WIDTH, y + NODE_HEIGHT / 2
    path = f"M{x:.0f},{y:.0f}"
    passed = [id for id in positions if id.startswith(f"{edge.source}>{edge.target}@")]
    for id in sorted(passed, key=lambda id: int(id.rpartition("@")[2])):
        left, top = positions[id]
        path += _step(x, y, left, top + 2, positions, width) + f"L{left + NODE_WIDTH:.0f},{top + 2:.0f}"
        x, y = left + NODE_WIDTH, top + 2
    left, top = positions[edge.target]
    path += _step(x, y, left, top + NODE_HEIGHT / 2, positions, width)
    note = " (must exist first)" if edge.requires else f" (continues from {edge.state})" if edge.state else ""
    kind = " requires" if edge.requires else " state" if edge.state else ""
    label = escape(f"{edge.source} → {edge.target}{note}")
    return f'<path class="edge{kind}" d="{path}"><title>{label}</title></path>'


def _step(
    x: float, y: float, to_x: float, to_y: float, positions: Mapping[str, tuple[float, float]], width: float
) -> str:
    """Return the path into the next layer; if that begins a new row, along the margins and above its nodes."""
    if to_x > x:
        return _bend(x, y, to_x, to_y)
    between = min(top for _, top in positions.values() if top > y) - ROW_GAP
    return f"H{width - 4:.0f}V{between:.0f}H4V{to_y:.0f}H{to_x:.0f}"


def _bend(x: float, y: float, to_x: float, to_y: float) -> str:
    middle = (x + to_x) / 2
    return f"C{middle:.0f},{y:.0f} {middle:.0f},{to_y:.0f} {to_x:.0f},{to_y:.0f}"


def _box(artifact: Artifact) -> LineageBox:
    is_model = artifact.stage in WEIGHTS
    if artifact.manifest is None:
        return LineageBox(artifact.id, artifact.id, "no manifest", artifact.id, is_model)
    tooltip = (
        f"{artifact.id}\nfingerprint {artifact.manifest.fingerprint}\n"
        f"digest {artifact.manifest.digest}\n{artifact.headline}"
    )
    return LineageBox(artifact.id, artifact.id, artifact.manifest.digest[:10], tooltip, is_model)


def _node(box: LineageBox, x: float, y: float) -> str:
    name = box.name if len(box.name) <= 17 else box.name[:16] + "…"
    node = (
        f'<g class="node {"model" if box.is_model else "other"}"><title>{escape(box.tooltip)}</title>'
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{NODE_WIDTH}" height="{NODE_HEIGHT}" rx="7"/>'
        f'<text class="name" x="{x + 9:.0f}" y="{y + 17:.0f}">{escape(name)}</text>'
        f'<text class="digest" x="{x + 9:.0f}" y="{y + 32:.0f}">{escape(box.small)}</text></g>'
    )
    return f'<a href="{escape(box.address)}">{node}</a>' if box.address else node


def lineage_page(document: Mapping[str, Any]) -> str:
    """Return the HTML page for the document of `stemma lineage --json`: the picture, then every node with facts."""
    nodes = document["nodes"]
    name = nodes[0]["id"]
    title = f"Descendants of {name}" if document["direction"] == "down" else f"Ancestors of {name}"
    boxes = [
        LineageBox(node["id"], _name(node), _small(node), _tooltip(node), node.get("stage") in WEIGHTS)
        for node in nodes
    ]
    branches = {node["id"]: node["continues"] for node in nodes if node.get("continues")}
    edges = {
        (edge["from"], edge["to"]): Edge(
            edge["from"], edge["to"], edge["requires"], "a state of it" if _is_state(edge, branches) else ""
        )
        for edge in document["edges"]
    }
    drawn = picture(boxes, list(edges.values())) if len(boxes) <= DRAWN else Markup("")
    lead = "" if drawn else f"{len(boxes):,} nodes: too many to draw."
    caption = (
        "An arrow goes from an input to what was built from it. A dotted arrow means that it only had to exist, a bold "
        "one that training continues from a state of it."
    )
    figures = [Figure("Lineage", drawn, caption, "", wide=True)] if drawn else []
    table = Table("", ["node", "what came out", "what is known"], list(map(_node_row, nodes)), mono=(0,))
    return render_page(
        title, "lineage", [("store", document["root"])], [Section("family", "Family", lead, figures, [table])]
    )


def _is_state(edge: Mapping[str, Any], branches: Mapping[str, Mapping[str, Any]]) -> bool:
    branch = branches.get(edge["to"])
    return bool(branch and edge["from"].startswith(f"{branch['stage']}/{branch['fingerprint']}"))


def _name(node: Mapping[str, Any]) -> str:
    return str(node["stage"]) if "stage" in node else node["key"] or "source"


def _small(node: Mapping[str, Any]) -> str:
    return "gone" if node["kind"] == "gone" else node.get("fingerprint", node["digest"])[:10]


def _tooltip(node: Mapping[str, Any]) -> str:
    files = [file["path"] for file in node.get("files", [])[:5]]
    return "\n".join([node["id"], f"digest {node['digest']}", node.get("headline", ""), *files])


def _node_row(node: Mapping[str, Any]) -> list[str | Markup]:
    facts: list[str] = []
    if node["kind"] == "gone":
        facts.append("is not in the store any more")
    if "dropped" in node:
        facts += [f"dropped by {rule}: {count:,}" for rule, count in node["dropped"].items() if count]
    if node.get("quarantined"):
        facts.append(f"unreadable records put aside: {node['quarantined']:,}")
    if node.get("adopted"):
        facts.append(f"imported: {json.dumps(node['adopted'])}")
    if branch := node.get("continues"):
        facts += Branch.from_json(branch).lines()
    if node.get("settings"):
        facts.append(f"settings: {json.dumps(node['settings'])}")
    if code := node.get("code"):
        facts.append(f"code {code.get('commit', '')[:12]}{', with changes' * bool(code.get('dirty'))}")
    if "origins" in node:
        facts += [f"documents from {name}: {count:,}" for name, count in node["origins"].items()]
    files = node.get("files", [])
    facts += [f"{file['sha256'][:16]} {file['path']}" for file in files[:FILES_SHOWN]]
    if len(files) > FILES_SHOWN:
        facts.append(f"and {len(files) - FILES_SHOWN:,} more; --json lists them all")
    return [node["id"], node.get("headline", ""), Markup("<br>").join(facts)]
