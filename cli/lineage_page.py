"""A family of artifacts as one HTML page that needs no other file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from importlib import resources
from typing import Any

MODELS = ("pretrain", "base_model", "sft", "rlhf", "reward_model")
FILES_SHOWN = 200
DRAWN = 300


def lineage_page(document: Mapping[str, Any]) -> str:
    """The page of what `stemma lineage --json` says: the picture, then every node with what is known of it."""
    from evaluation.page.lineage import Box, Edge, picture

    nodes = document["nodes"]
    boxes = [Box(node["id"], _name(node), _small(node), _told(node), node.get("stage") in MODELS) for node in nodes]
    edges = {(edge["from"], edge["to"]): Edge(edge["from"], edge["to"], edge["requires"]) for edge in document["edges"]}
    name = nodes[0]["id"]
    title = escape(f"What descends from {name}" if document["direction"] == "down" else f"What {name} descends from")
    drawn = picture(boxes, list(edges.values())) if len(boxes) <= DRAWN else f"{len(boxes):,} nodes: too many to draw"
    style = resources.files("evaluation").joinpath("templates/report.css").read_text(encoding="utf8")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n<style>\n{style}\n'
        "td { vertical-align: top; } figure { overflow-x: auto; margin: 0 0 24px; }\n</style></head>\n"
        f'<body><header class="top"><h1>{title}</h1><p class="facts">store <b>{escape(document["root"])}</b></p>'
        f"</header>\n<main><figure>{drawn}</figure>\n"
        f"<table><thead><tr><th>node</th><th>what came out</th><th>what is known</th></tr></thead>\n<tbody>"
        f"{''.join(map(_row, nodes))}</tbody></table></main></body></html>\n"
    )


def _name(node: Mapping[str, Any]) -> str:
    return str(node["stage"]) if "stage" in node else node["key"] or "source"


def _small(node: Mapping[str, Any]) -> str:
    return "gone" if node["kind"] == "gone" else node.get("fingerprint", node["digest"])[:10]


def _told(node: Mapping[str, Any]) -> str:
    files = [file["path"] for file in node.get("files", [])[:5]]
    return "\n".join([node["id"], f"digest {node['digest']}", node.get("headline", ""), *files])


def _row(node: Mapping[str, Any]) -> str:
    facts: list[str] = []
    if node["kind"] == "gone":
        facts.append("is not in the store any more")
    if "dropped" in node:
        facts += [f"dropped by {rule}: {count:,}" for rule, count in node["dropped"].items() if count]
    if node.get("quarantined"):
        facts.append(f"unreadable records put aside: {node['quarantined']:,}")
    if node.get("adopted"):
        facts.append(f"adopted: {json.dumps(node['adopted'])}")
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
    listed = "<br>".join(map(escape, facts))
    name, headline = escape(node["id"]), escape(node.get("headline", ""))
    return f"<tr><td><code>{name}</code></td><td>{headline}</td><td>{listed}</td></tr>\n"
