"""stemma ls [runs|models|artifacts]: what the store holds, newest first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cli.common.options import root_of, root_option
from cli.common.output import as_json, print_table, with_short_artifacts

SHOWN = 10


@click.command("ls")
@click.argument("kind", type=click.Choice(["runs", "models", "artifacts"]), required=False)
@click.option("--all", "all_rows", is_flag=True, help=f"List all; otherwise the {SHOWN} newest of each.")
@root_option
@as_json
def command(kind: str | None, all_rows: bool, root: str | None, as_json: bool) -> tuple[dict[str, Any], int]:
    """List runs and models in the store, or KIND, newest first, with their results.

    With --json, all rows with all figures are listed.
    """
    from flows.runs import listing
    from infra.store.store import Store

    store = Store(root_of(root), reading=True)
    kinds = [kind] if kind else ["runs", "models"]
    tables: dict[str, list[dict[str, Any]]] = {}
    if "runs" in kinds:
        tables["runs"] = list(listing.runs(store))
    for name in ("models", "artifacts"):
        if name in kinds:
            tables[name] = listing.artifacts(store, models_only=name == "models")
    if not as_json:
        for name, rows in tables.items():
            _print(name, rows, len(rows) if all_rows else SHOWN, store.root)
    return {"status": "done", "root": store.place, **tables}, 0


def _print(name: str, rows: list[dict[str, Any]], count: int, root: Path) -> None:
    if not rows:
        click.echo(f"no {name} in {root}")
        return
    times = [row.get("finished", row.get("started", "")) for row in rows[:count]]
    table = [{**row, "when": time[:16].replace("T", " ")} for row, time in zip(rows, times, strict=False)]
    if name == "runs":
        columns = {"run_id": "run", "pipeline": "pipeline", "status": "status", "when": "started (UTC)"}
        print_table(table, {**columns, "seconds": "seconds", "built": "built", "reused": "reused"})
    else:
        columns = {"artifact": "artifact", "pipeline": "pipeline", "step": "step", "when": "finished (UTC)"}
        print_table(with_short_artifacts(table), {**columns, "headline": "result"})
    suffix = f"; {len(rows) - count} older: --all" if len(rows) > count else ""
    click.echo(f"{len(rows)} {name if len(rows) > 1 else name.removesuffix('s')}{suffix}\n")
