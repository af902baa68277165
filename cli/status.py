"""stemma status [CONFIG]: what runs, where, since when; and what is built of a pipeline."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import click

from cli.options import root_of, root_option, set_option, settings_of
from cli.output import as_json, print_table


@click.command("status")
@click.argument("config", type=click.Path(path_type=Path), required=False)
@set_option
@root_option
@as_json
def command(
    config: Path | None, settings: tuple[str, ...], root: Path | None, as_json: bool
) -> tuple[dict[str, Any], int]:
    """What runs now, where and since when; with CONFIG also each of its stages."""
    from infra.servers.services import services

    folder = root_of(root)
    running = [
        {**service.as_json(), "up_s": round(time.time() - service.started)}
        for service in (services(folder) if folder.exists() else [])
    ]
    free_gb = round(shutil.disk_usage(folder if folder.exists() else folder.parent).free / 1e9, 1)
    document: dict[str, Any] = {
        "status": "done",
        "root": str(folder),
        "free_gb": round(free_gb, 1),
        "services": running,
    }
    if config is not None:
        document |= _pipeline(config, settings_of(settings), folder)
    if not as_json:
        _print(document)
    return document, 0


def _pipeline(config: Path, settings: dict[str, str], root: Path) -> dict[str, Any]:
    from flows.config import load
    from flows.graph import graph
    from flows.journal import latest
    from flows.plan import plan
    from infra.process import started_at
    from infra.store.store import Store

    pipeline = load(config, settings)
    store = Store(root)
    rows = [row.as_json() for row in plan(graph(pipeline), store).values()]
    last = next(latest(store.layout.runs, pipeline.name), None)
    now: dict[str, dict[str, Any]] = {}
    run: dict[str, Any] | None = None
    if last is not None:
        lines = last.read()
        now = {line["stage"]: line for line in lines if line["kind"] == "stage"}
        progress = {line["stage"]: line for line in lines if line["kind"] == "progress"}
        result = last.result()
        alive = result is None and started_at(lines[0]["pid"]) is not None
        run = {
            "run_id": last.run_id,
            "status": result["status"] if result else "running" if alive else "lost",
            "started": lines[0]["time"],
            "flow_run_url": lines[0].get("flow_run_url"),
        }
        for row in rows:
            line = now.get(row["stage"])
            if alive and line and line["status"] in ("running", "waiting"):
                row["status"] = line["status"]
                if moved := progress.get(row["stage"]):
                    row["progress"] = f"{moved['done']:,.0f} of {moved['total'] or 0:,.0f} {moved['unit']}"
    for row in rows:
        line = now.get(row["stage"])
        row["headline"] = (line or {}).get("headline", "")
    return {"config": str(config), "run": run, "stages": rows}


def _print(document: dict[str, Any]) -> None:
    click.echo(f"store: {document['root']} ({document['free_gb']:.0f} GB free)")
    for service in document["services"]:
        up = f"{service['up_s'] // 3600} h {service['up_s'] % 3600 // 60} min"
        click.echo(f"{service['name']:<10} {service['url'] or 'in the background':<36} pid {service['pid']}, up {up}")
    if not document["services"]:
        click.echo("no servers run here; `stemma up` starts them")
    if run := document.get("run"):
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(run["started"]))
        click.echo(f"\nlast run: {run['status']}, started {since}  {run['flow_run_url'] or ''}")
    if document.get("stages"):
        click.echo()
        columns = {
            "stage": "stage",
            "status": "status",
            "progress": "progress",
            "because": "because",
            "path": "artifact",
        }
        print_table(document["stages"], columns)
