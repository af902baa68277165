"""stemma up: the servers and the worker, in the background."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cli.options import root_of, root_option
from cli.output import as_json


@click.command("up")
@root_option
@click.option("--prefect-port", type=int, help="By default 4200, or the next free one.")
@click.option("--mlflow-port", type=int, help="By default 5000, or the next free one.")
@as_json
def command(
    root: Path | None, prefect_port: int | None, mlflow_port: int | None, as_json: bool
) -> tuple[dict[str, Any], int]:
    """Start the Prefect server, the MLflow server, a worker and the lineage courier, and wait until they answer.

    Starts only what does not run yet. Everything listens on this machine's loopback address only.
    """
    from infra.servers.services import up

    folder = root_of(root)
    services = up(
        folder, prefect_port=prefect_port, mlflow_port=mlflow_port, say=lambda line: click.echo(line, err=True)
    )
    document = {
        "status": "done",
        "root": str(folder),
        "services": [service.as_json() for service in services],
    }
    if not as_json:
        for service in services:
            click.echo(f"{service.name:<10} {service.url or 'in the background':<36} pid {service.pid}")
    return document, 0
