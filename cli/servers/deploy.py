"""stemma deploy, schedule, pause and resume CONFIG: a pipeline on the Prefect page, and its schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cli.common.options import CONFIG, reach_server, root_of, root_option
from cli.common.output import as_json
from cli.common.progress import working


@click.command("deploy")
@CONFIG
@click.option("--cron", help='Schedule of the pipeline, e.g. "0 2 * * *".')
@click.option("--timezone", help="IANA time zone such as Europe/Berlin; UTC by default.")
@click.option(
    "--overlap",
    type=click.Choice(["queue", "skip"]),
    help="If a run is due while another run of this pipeline is active: queue it (the default) or skip it.",
)
@click.option(
    "--catch-up",
    type=click.Choice(["latest", "all", "none"]),
    help="Runs missed while the servers were down: run the latest (the default), all, or none.",
)
@root_option
@as_json
def command(
    config: Path,
    cron: str | None,
    timezone: str | None,
    overlap: Any,
    catch_up: Any,
    root: str | None,
    as_json: bool,
) -> tuple[dict[str, Any], int]:
    """Deploy a pipeline to the Prefect page: `<pipeline>/pipeline`, `<pipeline>/<stage>` with the stage's config as a
    form, and `<pipeline>/sweep`. Needs `stemma up`. Without --cron, the schedule is left unchanged.
    """
    from flows.config.read import load
    from infra.servers.settings import prefect_page
    from infra.store.roots import shown_root

    if cron is None and (timezone or overlap or catch_up):
        raise click.UsageError('--timezone, --overlap and --catch-up need --cron, e.g. --cron "0 2 * * *"')
    pipeline = load(config, root=lambda: root_of(root))
    folder = root_of(root)
    # Prefect reads its settings when it is first imported.
    reach_server(folder)
    from flows.deployment.deploy import deploy_pipeline, deploy_stages
    from flows.prefect.automations import ensure_automations
    from flows.prefect.schedules import Schedule, schedule_rows
    from flows.sweeps.from_page import SWEEP, deploy_sweep

    ensure_automations()
    path = str(config.absolute())
    schedule = Schedule(cron, timezone or "UTC", overlap or "queue", catch_up or "latest") if cron is not None else None
    with working(f"putting {pipeline.name} and its stages on the page", quiet=as_json):
        deployed = {"pipeline": deploy_pipeline(pipeline, folder, path, schedule)}
        deployed |= deploy_stages(pipeline, folder, path)
        deployed[SWEEP] = deploy_sweep(pipeline, folder, path)
    page = prefect_page(folder)
    deployments = [
        {"name": f"{pipeline.name}/{name}", "url": f"{page}/deployments/deployment/{made_id}"}
        for name, made_id in deployed.items()
    ]
    schedules = schedule_rows(pipeline.name)
    if not as_json:
        click.echo(f"{pipeline.name}: {deployments[0]['url']}")
        click.echo(f"its {len(deployed) - 2} stages and its sweeps: {page}/deployments")
        _print_schedules(schedules)
    document = {
        "status": "done",
        "config": str(config),
        "root": shown_root(folder),
        "deployments": deployments,
        "schedules": schedules,
    }
    return document, 0


@click.command("schedule")
@CONFIG
@root_option
@as_json
def schedule(config: Path, root: str | None, as_json: bool) -> tuple[dict[str, Any], int]:
    """Show the schedule of the pipeline and its next runs. `stemma deploy --cron` creates a schedule."""
    return _set_active(config, root, None, as_json)


@click.command("pause-schedule")
@CONFIG
@root_option
@as_json
def pause(config: Path, root: str | None, as_json: bool) -> tuple[dict[str, Any], int]:
    """Pause the pipeline's schedule. A run in progress is not stopped; `stemma run` still works."""
    return _set_active(config, root, False, as_json)


@click.command("resume-schedule")
@CONFIG
@root_option
@as_json
def resume(config: Path, root: str | None, as_json: bool) -> tuple[dict[str, Any], int]:
    """Resume the pipeline's schedule, from its next date on."""
    return _set_active(config, root, True, as_json)


def _set_active(config: Path, root: str | None, active: bool | None, as_json: bool) -> tuple[dict[str, Any], int]:
    from flows.config.read import load

    pipeline = load(config, root=lambda: root_of(root))
    reach_server(root_of(root))
    from flows.prefect.schedules import schedule_rows, switch

    rows = schedule_rows(pipeline.name) if active is None else switch(pipeline.name, active=active)
    if not as_json:
        _print_schedules(rows)
        if not rows:
            click.echo(f"{pipeline.name} has no schedule")
    return {"status": "done", "pipeline": pipeline.name, "schedules": rows}, 0


def _print_schedules(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        state = f"next at {', '.join(row['next'])}" if row["active"] else "paused"
        click.echo(f"{row['cron']} {row['timezone']}: {state}; overlap {row['overlap']}, catch up {row['catch_up']}")
