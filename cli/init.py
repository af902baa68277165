"""stemma init DATA…: a first config for files that someone has."""

from __future__ import annotations

import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from cli.output import as_json, print_table


@click.command("init")
@click.argument("data", nargs=-1, required=True)
@click.option(
    "--to", "out", type=click.Path(path_type=Path, dir_okay=False), default=Path("pipeline.yaml"), show_default=True
)
@click.option("--name", default=None, help="The pipeline's name; by default that of the file.")
@as_json
def command(data: tuple[str, ...], out: Path, name: str | None, as_json: bool) -> tuple[dict[str, Any], int]:
    """Look at DATA, files, folders or globs of text, JSON Lines or Parquet, and write a config for them.

    Documents, instructions and preferences are told apart by the fields of their records. The sizes that it chooses fit
    the text; tokens, disk and time are estimates. An existing file is left alone.
    """
    from evaluation.page.words import compact, seconds
    from flows.config import load
    from flows.first_config import first_config, fit, looked_at
    from infra.errors import ConfigError, Problem
    from infra.files import write_whole

    if out.exists():
        raise ConfigError(Problem("file_exists", str(out), "there is such a file already", "name another by --to"))
    folder = out.absolute().parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ConfigError(
            Problem("unwritable", str(out), f"{folder} is no folder that can be written", "name another by --to")
        )
    # Paths in a config are relative to its folder.
    found = looked_at(data if folder == Path.cwd() else [str(Path(path).absolute()) for path in data])
    fitted = fit(sum(one.text_bytes for one in found))
    called = name or re.sub(r"[^a-z0-9._-]", "-", out.stem.lower()).lstrip("._-") or "pipeline"
    write_whole(out, first_config(called, found, fitted))
    try:
        load(out)
    except ConfigError:
        out.unlink()  # e.g. a name that cannot be one
        raise
    if not as_json:
        rows = [
            {**asdict(one), "documents": f"{one.documents:,}", "MB": f"{one.text_bytes / 1e6:,.1f}"} for one in found
        ]
        columns = {"path": "data", "kind": "is", "files": "files", "documents": "records, about"}
        print_table(rows, {**columns, "MB": "MB of text"})
        took = seconds(fitted.seconds) if fitted.seconds else "an unknown time"
        click.echo(
            f"\nabout {compact(fitted.tokens)} tokens: {fitted.preset} ({compact(fitted.parameters)} parameters) for "
            f"{compact(fitted.trained_tokens)} tokens\nabout {fitted.disk_bytes / 1e9:,.1f} GB of disk; "
            f"pretraining on this machine: about {took}\n\nwritten to {out}; next: stemma check {out}"
        )
    document = {"status": "done", "config": str(out), "sources": [asdict(one) for one in found], "fit": asdict(fitted)}
    return document, 0
