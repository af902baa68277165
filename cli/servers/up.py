"""stemma up and down: the servers and the worker, in the background."""

from __future__ import annotations

import os
from typing import Any

import click

from cli.common.options import host_option, port_option, root_of, root_option
from cli.common.output import as_json, print_warnings
from infra.errors import Problem


@click.command("up")
@root_option
@port_option("--prefect-port", 4200)
@port_option("--mlflow-port", 5000)
@host_option
@click.option(
    "--keep-days",
    type=click.IntRange(0),
    help="Days after which a run is removed from the history, unless an artifact that it built is still in the store. "
    "30 by default; 0: never.",
)
@click.option(
    "--keep-runs",
    type=click.IntRange(0),
    help="Maximum number of such runs to keep per pipeline; 500 by default.",
)
@as_json
def command(
    root: str | None,
    prefect_port: int | None,
    mlflow_port: int | None,
    host: str | None,
    keep_days: int | None,
    keep_runs: int | None,
    as_json: bool,
) -> tuple[dict[str, Any], int]:
    """Start the Prefect server, the MLflow server, a worker and the lineage relay, and wait until they answer.

    Starts only what is not running yet, with the previous settings: after a reboot, run it again.

    \b
    STEMMA_AUTH=user:password            credentials that pages and APIs require
    STEMMA_DATABASE_URL=postgresql://…   database of Prefect, MLflow and the store's leases, instead of SQLite
    """
    from infra.servers.environment import environment
    from infra.servers.services import up
    from infra.servers.settings import settings_of
    from infra.store.roots import shown_root

    folder = root_of(root)
    services = up(
        folder,
        prefect_port=prefect_port,
        mlflow_port=mlflow_port,
        host=host,
        keep_days=keep_days,
        keep_runs=keep_runs,
        say=lambda line: click.echo(line, err=True),
    )
    os.environ.update(environment(folder))
    from flows.prefect.automations import ensure_automations

    unfit = _worker_problems()
    settings = settings_of(folder)
    document = {
        "status": "done",
        "root": shown_root(folder),
        "services": [{**service.as_json(), "page": settings.page_of(service.url)} for service in services],
        "database": settings.database,
        "guarded": settings.guarded,
        "automations": ensure_automations(),
        "this_machine": [problem.as_json() for problem in unfit],
    }
    if not as_json:
        # The page comes first: it is what users open.
        for service in sorted(services, key=lambda service: service.name != "page"):
            link = settings.page_of(service.url) or "in the background"
            click.echo(f"{service.name:<10} {link:<56} pid {service.pid}")
        print_warnings(unfit)
    return document, 0


def _worker_problems() -> list[Problem]:
    """Return why stages of this worker may fail: its packages, and GPUs that its torch cannot use."""
    from infra.installed import lock_problem
    from infra.launch.devices.gpus import ask_driver, ask_torch, gpu_problems, has_gpu

    problem = lock_problem("other_packages", "")
    answer = ask_torch() if has_gpu() else None
    return [*([problem] if problem else []), *(gpu_problems(answer, ask_driver(), requested=False) if answer else [])]


@click.command("down")
@root_option
@as_json
def down(root: str | None, as_json: bool) -> tuple[dict[str, Any], int]:
    """Stop the services that `stemma up` started for this store. Their data stays on disk."""
    from infra.servers import services
    from infra.store.roots import shown_root

    folder = root_of(root)
    stopped = services.down(folder, say=lambda line: click.echo(line, err=True))
    document = {"status": "done", "root": shown_root(folder), "services": [service.as_json() for service in stopped]}
    if not as_json:
        click.echo(f"stopped {', '.join(service.name for service in stopped)}" if stopped else "nothing was running")
    return document, 0
