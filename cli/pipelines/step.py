"""stemma step list and step show NAME: the stages that a pipeline can use."""

from __future__ import annotations

import json
from typing import Any

import click

from cli.common.output import as_json, print_table


@click.group("step")
def command() -> None:
    """Show the stages that pipeline steps can use, including those of installed packages."""


@command.command("list", short_help="List all stages with what each reads and makes.")
@as_json
def list_stages(as_json: bool) -> tuple[dict[str, Any], int]:
    """List all stages with what each reads and makes."""
    from flows.config.described import stage_list

    rows = stage_list()
    if not as_json:
        shown = [{**row, "reads": ", ".join(row["reads"]), "package": _package(row)} for row in rows]
        columns = {"stage": "stage", "reads": "reads", "makes": "makes", "about": "about"}
        has_packages = any(row["package"] for row in rows)
        print_table(shown, {**columns, **({"package": "package"} if has_packages else {})})
        click.echo("\nstemma step show STAGE prints the keys of a stage and a minimal config")
    return {"status": "done", "stages": rows}, 0


@command.command("show", short_help="Show the inputs and keys of one stage, and a minimal config.")
@click.argument("name")
@as_json
def show(name: str, as_json: bool) -> tuple[dict[str, Any], int]:
    """Show what a stage reads and makes, its keys with their defaults, and a minimal config."""
    from flows.config.described import described

    stage = described(name)
    if not as_json:
        _print(stage)
    return {"status": "done", **stage}, 0


def _print(stage: dict[str, Any]) -> None:
    origin = f", of the installed package {_package(stage)}" if stage["package"] else ""
    click.echo(f"{stage['stage']}, version {stage['version']}{origin}\n{stage['about']}\n")
    for source in stage["inputs"]:
        optional = " (optional)" if source["optional"] else ""
        kinds = " or ".join(kind.replace("_", " ") for kind in source["kinds"])
        click.echo(f"reads {source['input']}: {kinds}, made by {', '.join(source['made_by']) or 'no stage'}{optional}")
    if stage["more_inputs"]:
        kinds = ", ".join(kind.replace("_", " ") for kind in stage["more_inputs"])
        click.echo(f"reads further inputs by any name: {kinds}")
    click.echo(f"makes {stage['makes'].replace('_', ' ')}\n")
    rows = [{**row, "default": "required" if row["required"] else json.dumps(row["default"])} for row in stage["keys"]]
    print_table(rows, {"key": "key", "type": "type", "default": "default", "description": "description"})
    click.echo(f"\na minimal config:\n\n{stage['example']}", nl=False)


def _package(stage: dict[str, Any]) -> str:
    return f"{stage['package']['name']} {stage['package']['version']}" if stage["package"] else ""
