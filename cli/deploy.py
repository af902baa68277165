"""stemma deploy CONFIG: the pipeline and each of its stages as forms in the Prefect page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from cli.options import CONFIG, root_of, root_option
from cli.output import as_json


@click.command("deploy")
@CONFIG
@click.option("--cron", help='When the pipeline runs by itself, e.g. "0 2 * * *".')
@click.option("--timezone", help="An IANA name such as Europe/Berlin; UTC by default.")
@root_option
@as_json
def command(
    config: Path, cron: str | None, timezone: str | None, root: Path | None, as_json: bool
) -> tuple[dict[str, Any], int]:
    """Put a pipeline on the Prefect page: `<pipeline>/pipeline`, and `<pipeline>/<stage>` with the stage's config as
    a form. Needs `stemma up`.
    """
    from flows.config import load
    from infra.errors import ConfigError, Problem
    from infra.servers.environment import QUIET
    from infra.servers.state import prefect_api_url

    pipeline = load(config)
    folder = root_of(root)
    url = prefect_api_url(folder)
    if url is None:
        raise ConfigError(Problem("no_server", str(folder), "no Prefect server runs for this store", "stemma up"))
    os.environ.update(QUIET | {"PREFECT_API_URL": url})
    from flows.deploy import deploy_pipeline, deploy_stages

    path = str(config.absolute())
    made = {"pipeline": deploy_pipeline(pipeline, folder, path, cron=cron, timezone=timezone)}
    made |= deploy_stages(pipeline, folder, path)
    page = url.removesuffix("/api")
    deployments = [
        {"name": f"{pipeline.name}/{name}", "url": f"{page}/deployments/deployment/{made_id}"}
        for name, made_id in made.items()
    ]
    if not as_json:
        for deployment in deployments:
            click.echo(f"{deployment['name']:<36} {deployment['url']}")
    return {"status": "done", "config": str(config), "root": str(folder), "deployments": deployments}, 0
