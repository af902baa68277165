"""stemma why CONFIG STAGE: what the last run did with a stage, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cli.options import CONFIG, root_of, root_option
from cli.output import as_json


@click.command("why")
@CONFIG
@click.argument("stage")
@root_option
@as_json
def command(config: Path, stage: str, root: Path | None, as_json: bool) -> tuple[dict[str, Any], int]:
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
            document = {"status": "done", "run_id": journal.run_id, "stage": stage, **_told(rows[-1])}
            if not as_json:
                click.echo(f"{stage} was {document['did']} in run {journal.run_id}: {document['why']}")
            return document, 0
    raise ConfigError(
        Problem("never_run", stage, f"no run of {pipeline.name} has come to this stage", f"stemma run {config}")
    )


def _told(row: dict[str, Any]) -> dict[str, Any]:
    match row["status"]:
        case "reused":
            why = f"nothing that bears on it changed; its artifact {row['fingerprint']} was there and whole"
        case "built":
            why = "; ".join(row["because"])
        case _:
            why = row["headline"]
    return {"did": row["status"], "why": why, "because": row["because"], "fingerprint": row["fingerprint"]}
