"""stemma compare A B …: what differs between models, and their figures side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cli.completion import artifacts
from cli.options import root_of, root_option
from cli.output import as_json, print_table, short_artifact

SETTINGS_SHOWN = 30


@click.command("compare")
@click.argument("models", nargs=-1, required=True, metavar="A B …", shell_complete=artifacts)
@click.option("--all", "whole", is_flag=True, help=f"All differing settings; otherwise the first {SETTINGS_SHOWN}.")
@root_option
@as_json
def command(models: tuple[str, ...], whole: bool, root: Path | None, as_json: bool) -> tuple[dict[str, Any], int]:
    """Compare models with the first: settings, data and code that differ, figures side by side, and differences over
    the same items with their intervals.

    Each is an artifact such as sft/1f2e, or a stage id for its newest.
    """
    if len(models) < 2:
        raise click.UsageError("expected two models or more, e.g. stemma compare sft rlhf")
    from flows.compare import compare
    from infra.store.reference import resolve
    from infra.store.store import Store
    from tasks.stages import STAGES

    store = Store(root_of(root), reading=True)
    makers = [name for name, stage in STAGES.items() if stage.makes_weights]
    document = compare(store, [resolve(store, model, makers) for model in models])
    if not as_json:
        _print(document, len(document["differences"]) if whole else SETTINGS_SHOWN)
    return {"status": "done", "root": str(store.root), **document}, 0


def _print(document: dict[str, Any], settings: int) -> None:
    names = [short_artifact(one["model"]) for one in document["models"]]
    for name, one in zip(names, document["models"], strict=True):
        measured = ", ".join(one["evaluations"]) or "not measured"
        click.echo(f"{name}: {one['headline'] or 'no headline'} ({measured})")
    differences = [{**row, "model": short_artifact(row["model"])} for row in document["differences"]]
    click.echo(f"\n{len(differences)} settings, sources or versions differ from {names[0]}")
    if differences:
        print_table(differences[:settings], {"model": "model", "key": "key", "first": names[0], "other": "there"})
    if len(differences) > settings:
        click.echo(f"{len(differences) - settings} more: --all")
    click.echo()
    rows = [
        {"figure": row["figure"], **dict(zip(names, map(_number, row["values"]), strict=True))}
        for row in document["figures"]
    ]
    print_table(rows, {"figure": "figure", **{name: name for name in names}})
    if document["paired"]:
        click.echo(f"\nover the same items, less {names[0]}")
        print_table(
            [
                {
                    "model": short_artifact(row["model"]),
                    "figure": row["figure"],
                    "difference": _number(row["difference"]),
                    "interval": f"{_number(row['low'])} to {_number(row['high'])}",
                    "so": "more than chance" if row["shown"] else "no difference is shown",
                }
                for row in document["paired"]
            ],
            {"model": "model", "figure": "figure", "difference": "difference", "interval": "95 % interval", "so": "so"},
        )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
