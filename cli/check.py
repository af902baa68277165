"""stemma check CONFIG and why CONFIG STAGE: what a run would build and reuse, or did, and why."""

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
    from flows.branches import rate_notes
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
    notes = rate_notes(nodes, rows)
    shown = [
        {**rows[name].as_json(), "needs": list(nodes[name].upstream), "note": notes.get(name, "")} for name in chosen
    ]
    document = {"status": "done", "config": str(config), "root": str(store.root), "stages": shown}
    if not as_json:
        print_table(shown, {"stage": "stage", "status": "would", "needs": "needs", "because": "because"})
        builds = sum(row["status"] == "build" for row in shown)
        click.echo(f"\n{builds} to build, {len(shown) - builds} to reuse in {store.root}")
        for row in filter(lambda row: row["note"], shown):
            click.echo(row["note"])
    return document, 0


@click.command("why")
@CONFIG
@click.argument("stage")
@root_option
@as_json
def why(config: Path, stage: str, root: Path | None, as_json: bool) -> tuple[dict[str, Any], int]:
    """Why a stage was built, reused or skipped in the last run of this pipeline that was about it."""
    from flows.config import load
    from flows.graph import graph, known
    from flows.journal import latest
    from infra.errors import ConfigError, Problem
    from infra.store.layout import Layout

    pipeline = load(config)
    known(graph(pipeline), [stage], "STAGE")
    for journal in latest(Layout(root_of(root)).runs, pipeline.name):
        rows = [line for line in journal.read() if line["kind"] == "stage" and line["stage"] == stage]
        if rows and rows[-1]["status"] not in ("waiting", "running"):
            document = {"status": "done", "run_id": journal.run_id, "stage": stage, **_account(rows[-1])}
            if not as_json:
                click.echo(f"{stage} was {document['did']} in run {journal.run_id}: {document['why']}")
            return document, 0
    raise ConfigError(
        Problem("never_run", stage, f"no run of {pipeline.name} has come to this stage", f"stemma run {config}")
    )


def _account(row: dict[str, Any]) -> dict[str, Any]:
    match row["status"]:
        case "reused":
            reason = f"nothing that bears on it changed; its artifact {row['fingerprint']} was there and whole"
        case "built":
            reason = "; ".join(row["because"])
        case _:
            reason = row["headline"]
    return {"did": row["status"], "why": reason, "because": row["because"], "fingerprint": row["fingerprint"]}
