"""stemma logs [STAGE]: what a stage printed, the newest build first."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from cli.options import root_of, root_option
from cli.output import as_json


@click.command("logs")
@click.argument("stage", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on printing what is added, until Ctrl-C.")
@root_option
@as_json
def command(stage: str | None, follow: bool, root: Path | None, as_json: bool) -> tuple[dict[str, Any], int]:
    """What a stage printed in its newest build, finished or not; without STAGE the stages that have a log."""
    from infra.errors import ConfigError, Problem

    folder = root_of(root)
    logs = sorted(
        [*folder.glob(f"{stage or '*'}/*/aux/stage.log"), *folder.glob(f".work/{stage or '*'}/*/scratch/stage.log")],
        key=lambda path: path.stat().st_mtime,
        reverse=True,
    )
    if not logs:
        told = f"{stage} has no log in {folder}" if stage else f"no stage has a log in {folder}"
        raise ConfigError(Problem("no_log", stage or "", told, "stemma logs lists the stages that have one"))
    if stage is None:
        found = [{"stage": path.parts[-4], "path": str(path)} for path in logs]
        if not as_json:
            for item in found:
                click.echo(f"{item['stage']:<24} {item['path']}")
        return {"status": "done", "logs": found}, 0
    text = logs[0].read_text(encoding="utf8", errors="replace")
    if not as_json:
        click.echo(f"{logs[0]}:", err=True)
        click.echo(text, nl=False)
        if follow:
            _follow(logs[0], len(text.encode()))
    return {"status": "done", "stage": stage, "path": str(logs[0]), "text": text}, 0


def _follow(path: Path, position: int) -> None:
    with open(path, encoding="utf8", errors="replace") as file:
        file.seek(position)
        while True:
            if text := file.read():
                click.echo(text, nl=False)
            time.sleep(0.2)
