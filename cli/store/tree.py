"""The lineage of an artifact as a tree in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.tree import Tree

FILES_SHOWN = 3
ORIGINS_SHOWN = 4


def print_tree(document: Mapping[str, Any], *, down: bool) -> None:
    """Print the nodes below the first one. A node that was printed further up is only named."""
    from rich.console import Console
    from rich.tree import Tree

    nodes = {node["id"]: node for node in document["nodes"]}
    near_key, far_key = ("from", "to") if down else ("to", "from")
    edges: dict[str, list[dict[str, Any]]] = {}
    for edge in document["edges"]:
        edges.setdefault(edge[near_key], []).append(edge)
    start = document["nodes"][0]
    tree = Tree(_label(start))
    visited = {start["id"]}

    def grow(branch: Tree, node: Mapping[str, Any]) -> None:
        for line in _details(node):
            branch.add(f"[dim]{line}[/dim]")
        for edge in edges.get(node["id"], []):
            neighbour = nodes[edge[far_key]]
            name = f"[cyan]{_edge(edge, down)}[/cyan] "
            if neighbour["id"] in visited:
                branch.add(f"{name}{_name(neighbour)} [dim](see above)[/dim]")
                continue
            visited.add(neighbour["id"])
            grow(branch.add(f"{name}{_label(neighbour)}"), neighbour)

    grow(tree, start)
    console = Console(highlight=False)
    if not sys.stdout.isatty():
        console = Console(highlight=False, width=160)
    console.print(tree)


def _edge(edge: Mapping[str, Any], down: bool) -> str:
    name = edge["name"]
    if edge["requires"]:
        message = f"required, as {name}:" if down else f"requires {name}:"
    else:
        message = f"as {name}:" if down else f"{name}:"
    return f"{message[:-1]}, from equal bytes at another address:" if edge["same_bytes"] else message


def _name(node: Mapping[str, Any]) -> str:
    if node["kind"] == "source":
        return f"source {node['digest'][:8]}"
    replaced = " (replaced by a later build)" if node["kind"] == "artifact" and "." in node["id"] else ""
    return f"[bold]{node['stage']}/{node['fingerprint'][:8]}[/bold]{replaced}"


def _label(node: Mapping[str, Any]) -> str:
    from rich.markup import escape

    if node["kind"] == "gone":
        return f"{_name(node)} [red]is no longer in the store[/red] (content {node['digest'][:8]})"
    if node["kind"] == "artifact":
        return f"{_name(node)}  {escape(node['headline'])}".rstrip()
    count = len(node["files"])
    message = f"{count:,} file{'s' * (count != 1)}" if count else "text of the installed packages"
    documents = f", {node['documents']:,} documents" if "documents" in node else ""
    return f"{_name(node)}  {message}{documents}"


def _details(node: Mapping[str, Any]) -> list[str]:
    from rich.markup import escape

    from infra.store.branches import Branch

    lines = []
    if adopted := node.get("adopted"):
        note = f": {adopted['note']}" if adopted.get("note") else ""
        lines.append(
            f"imported from {adopted['host']}:{adopted['from']} by {adopted['user']}, {adopted['when'][:10]}{note}"
        )
    if branch := node.get("continues"):
        lines += Branch.from_json(branch).lines()
    if "dropped" in node:
        rules = sorted(((count, rule) for rule, count in node["dropped"].items() if count), reverse=True)
        total = sum(count for count, _ in rules)
        listing = ": " + ", ".join(f"{rule} {count:,}" for count, rule in rules) if rules else ""
        lines.append(f"dropped {total:,} of {node['read']:,} documents{listing}")
    if node.get("quarantined") and node["kind"] == "artifact":
        lines.append(f"put aside {node['quarantined']:,} unreadable records, see aux/quarantine.jsonl")
    if node["kind"] == "source":
        files = node["files"]
        lines += [f"{file['sha256'][:8]} {file['path']}" for file in files[:FILES_SHOWN]]
        if len(files) > FILES_SHOWN:
            lines.append(f"and {len(files) - FILES_SHOWN:,} more; --json lists them all")
        if not files and node.get("origins"):
            largest = sorted(node["origins"].items(), key=lambda item: -item[1])
            listing = ", ".join(f"{name} {count:,}" for name, count in largest[:ORIGINS_SHOWN])
            suffix = f" and {len(largest) - ORIGINS_SHOWN} more" if len(largest) > ORIGINS_SHOWN else ""
            lines.append(f"documents by package: {listing}{suffix}")
    return [escape(line) for line in lines]
