"""stemma down: stop what `up` started, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cli.options import root_of, root_option
from cli.output import as_json


@click.command("down")
@root_option
@as_json
def command(root: Path | None, as_json: bool) -> tuple[dict[str, Any], int]:
    """Stop what `stemma up` started for this store. What it knows stays on disk."""
    from infra.servers.services import down

    folder = root_of(root)
    stopped = down(folder, say=lambda line: click.echo(line, err=True))
    document = {"status": "done", "root": str(folder), "services": [service.as_json() for service in stopped]}
    if not as_json:
        click.echo(f"stopped {', '.join(service.name for service in stopped)}" if stopped else "nothing was running")
    return document, 0
