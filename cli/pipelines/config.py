"""stemma config CONFIG: the complete config, with the files that it extends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cli.common.options import CONFIG, root_of, root_option, set_option, settings_of
from cli.common.output import as_json


@click.command("config")
@CONFIG
@click.option("--defaults", is_flag=True, help="Show the keys that are at their defaults too.")
@set_option
@root_option
@as_json
def command(
    config: Path, defaults: bool, settings: tuple[str, ...], root: str | None, as_json: bool
) -> tuple[dict[str, Any], int]:
    """Print CONFIG as one complete file: merged with the files it extends and --set, with absolute paths.

    \b
    stemma config mine.yaml > whole.yaml    a config that produces the same artifacts
    """
    import yaml

    from flows.config.extends import read_config
    from flows.config.read import dump, load

    pipeline = load(config, settings_of(settings), lambda: root_of(root))
    files = read_config(config).files
    data = dump(pipeline, defaults=defaults)
    if not as_json:
        if len(files) > 1:
            click.echo(f"# {' over '.join(map(str, files))}")
        click.echo(yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=110), nl=False)
    return {"status": "done", "config": data, "files": list(map(str, files))}, 0
