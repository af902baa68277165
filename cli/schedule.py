"""stemma schedule, pause and resume CONFIG: when a pipeline runs by itself, and whether."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cli.deploy import print_schedules
from cli.options import CONFIG, reach_server, root_of, root_option
from cli.output import as_json


@click.command("schedule")
@CONFIG
@root_option
@as_json
def command(config: Path, root: Path | None, as_json: bool) -> tuple[dict[str, Any], int]:
    """When the pipeline runs by itself next, by what rules. `stemma deploy --cron` makes a schedule."""
    return _tell(config, root, None, as_json)


@click.command("pause")
@CONFIG
@root_option
@as_json
def pause(config: Path, root: Path | None, as_json: bool) -> tuple[dict[str, Any], int]:
    """Keep the pipeline from running by itself. A run that goes on goes on; `stemma run` still works."""
    return _tell(config, root, False, as_json)


@click.command("resume")
@CONFIG
@root_option
@as_json
def resume(config: Path, root: Path | None, as_json: bool) -> tuple[dict[str, Any], int]:
    """Let the pipeline run by itself again, from its next date on."""
    return _tell(config, root, True, as_json)


def _tell(config: Path, root: Path | None, active: bool | None, as_json: bool) -> tuple[dict[str, Any], int]:
    from flows.config import load

    pipeline = load(config)
    reach_server(root_of(root))
    from flows.schedules import schedule_rows, switch

    rows = schedule_rows(pipeline.name) if active is None else switch(pipeline.name, active=active)
    if not as_json:
        print_schedules(rows)
        if not rows:
            click.echo(f"{pipeline.name} has no schedule")
    return {"status": "done", "pipeline": pipeline.name, "schedules": rows}, 0
