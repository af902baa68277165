"""stemma check CONFIG: each stage as reuse or build, and why, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cli.options import CONFIG, names, root_of, root_option, selection_options, set_option, settings_of
from cli.output import as_json, print_table


@click.command("check")
@CONFIG
@selection_options
@set_option
@root_option
@as_json
def command(
    config: Path,
    only_: tuple[str, ...],
    from_: tuple[str, ...],
    until_: tuple[str, ...],
    force_: tuple[str, ...],
    settings: tuple[str, ...],
    root: Path | None,
    as_json: bool,
) -> tuple[dict[str, Any], int]:
    """Say what a run would build and reuse, and why; start nothing.

    All mistakes in the config are reported at once.
    """
    from flows.config import load
    from flows.graph import graph
    from flows.plan import plan
    from flows.selection import Selection
    from infra.store.store import Store

    pipeline = load(config, settings_of(settings))
    nodes = graph(pipeline)
    selection = Selection(only=names(only_), from_=names(from_), until=names(until_), force=names(force_))
    chosen = selection.choose(nodes)
    store = Store(root_of(root), reading=True)
    rows = plan(nodes, store, selection.force)
    shown = [{**rows[name].as_json(), "needs": list(nodes[name].upstream)} for name in chosen]
    document = {"status": "done", "config": str(config), "root": str(store.root), "stages": shown}
    if not as_json:
        print_table(shown, {"stage": "stage", "status": "would", "needs": "needs", "because": "because"})
        builds = sum(row["status"] == "build" for row in shown)
        click.echo(f"\n{builds} to build, {len(shown) - builds} to reuse in {store.root}")
    return document, 0
