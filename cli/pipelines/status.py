"""stemma status [CONFIG]: current runs, servers and disk, and the built stages of a pipeline."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import click

from cli.common.options import root_of, root_option, set_option, settings_of
from cli.common.output import as_json, print_table, with_short_artifacts
from infra.errors import Problem


@click.command("status")
@click.argument("config", type=click.Path(path_type=Path), required=False)
@set_option
@root_option
@as_json
def command(
    config: Path | None, settings: tuple[str, ...], root: str | None, as_json: bool
) -> tuple[dict[str, Any], int]:
    """Show the current runs, with machine and start time; with CONFIG also each of its stages."""
    from infra.lineage.also.copies import copy_problems
    from infra.lineage.outbox import Outbox
    from infra.lineage.relay_lock import lineage_problem
    from infra.servers.services import states
    from infra.servers.settings import settings_of as servers_of
    from infra.store.layout import disk
    from infra.store.roots import shown_root

    folder = root_of(root)
    servers = servers_of(folder)
    running = [
        {
            **service.as_json(),
            "page": servers.page_of(service.url),
            "state": state,
            "since": _clock(service.started),
            "up_s": round(time.time() - service.started) if state != "gone" else 0,
        }
        for service, state in (states(folder) if folder.exists() else [])
    ]
    space = disk(folder)
    document: dict[str, Any] = {
        "status": "done",
        "root": shown_root(folder),
        "host": os.uname().nodename,
        "free_gb": space["free_gb"],
        "disk": space,
        "database": servers.database,
        "guarded": servers.guarded,
        "services": running,
        "lineage": {**Outbox(folder).counts(), "problem": lineage_problem(folder), "also": copy_problems(folder)},
    }
    if config is not None:
        document |= _pipeline(config, settings_of(settings), folder)
    if not as_json:
        _print(document)
    return document, 0


def _pipeline(config: Path, settings: dict[str, str], root: Path) -> dict[str, Any]:
    from flows.config.graph import graph
    from flows.config.read import load
    from flows.planning.plan import plan
    from flows.runs.journal import latest
    from infra.store.store import Store

    pipeline = load(config, settings, lambda: root)
    store = Store(root, reading=True)
    rows = [row.as_json() for row in plan(graph(pipeline), store).values()]
    last = next(latest(store.runs(), pipeline.name), None)
    now: dict[str, dict[str, Any]] = {}
    run: dict[str, Any] | None = None
    if last is not None:
        lines = last.read()
        now = {line["stage"]: line for line in lines if line["kind"] == "stage"}
        progress = {line["stage"]: line for line in lines if line["kind"] == "progress"}
        result = last.result()
        alive = result is None and last.works()
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
    space = document["disk"]
    used = ", ".join(
        f"{key.removesuffix('_gb')} {space[key]:.2f}" for key in space if key not in ("free_gb", "total_gb")
    )
    click.echo(f"store: {document['root']} on {document['host']}")
    click.echo(f"disk:  {space['free_gb']:.0f} of {space['total_gb']:.0f} GB free; in GB: {used}")
    for service in document["services"]:
        up = f"up {service['up_s'] // 3600} h {service['up_s'] % 3600 // 60} min, since {service['since']}"
        message = {"answers": up, "silent": f"does not answer; {up}", "gone": "ended; `stemma up` starts it again"}
        link = service["page"] or "in the background"
        click.echo(f"{service['name']:<10} {link:<56} pid {service['pid']}, {message[service['state']]}")
    if document["services"]:
        access = "credentials required" if document["guarded"] else "open to this machine"
        click.echo(f"database:  {document['database']}; {access}")
    else:
        click.echo("no servers are running; `stemma up` starts them")
    lineage = document["lineage"]
    if problem := lineage["problem"]:
        click.echo(f"MLflow:    {lineage['waiting']} messages are waiting for it: {Problem(**problem)}")
    if lineage["failed"]:
        click.echo(f"MLflow:    {lineage['failed']} messages could not be delivered; they are in lineage/failed")
    for problem in lineage["also"]:
        click.echo(f"trackers:  {Problem(**problem)}")
    if run := document.get("run"):
        is_served = any(service["state"] == "answers" for service in document["services"])
        link = (run["flow_run_url"] or "") if is_served else ""
        click.echo(f"\nlast run: {run['status']}, started {_clock(run['started'])}  {link}".rstrip())
    if document.get("stages"):
        click.echo()
        columns = {
            "stage": "stage",
            "status": "status",
            "progress": "progress",
            "because": "because",
            "artifact": "artifact",
        }
        words = {"reuse": "built", "build": "to build"}
        rows = [{**row, "status": words.get(row["status"], row["status"])} for row in document["stages"]]
        print_table(with_short_artifacts(rows), columns)


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
