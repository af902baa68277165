"""stemma mirror TASK FROM: copy a benchmark's data into a mirror for offline evaluation."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from cli.common.options import root_of, root_option
from cli.common.output import as_json
from cli.models.eval import MIRROR
from infra.servers.environment import OFFLINE, QUIET


@click.command("mirror")
@click.argument("task")
@click.argument("source", metavar="[FROM]", required=False, type=click.Path(path_type=Path))
@MIRROR
@click.option("--split", "splits", multiple=True, metavar="SPLIT=FILE", help="File of one split, e.g. train=a.jsonl.")
@click.option("--shots", type=click.IntRange(0), help="Rows of the scored split to reserve for few-shot examples.")
@root_option
@as_json
def command(
    task: str,
    source: Path | None,
    mirror: Path | None,
    splits: tuple[str, ...],
    shots: int | None,
    root: str | None,
    as_json: bool,
) -> tuple[dict[str, Any], int]:
    """Copy the data of lm-eval's TASK from FROM into a mirror, so that `stemma eval` and the benchmarks of a pipeline
    can run the identical task offline.

    FROM is a file, or a folder with files named train, validation or test, or named after the task: JSON lines,
    JSON, CSV, TSV or Parquet, with the fields of the dataset on the Hub or in the layout of MosaicML's evaluation
    gauntlet. Every row is checked before anything is written.
    """
    files = {}
    for text in splits:
        name, equals, path = text.partition("=")
        if not equals or not name or not path:
            raise click.UsageError(f"--split expects SPLIT=FILE, e.g. --split train=train.jsonl, not {text!r}")
        files[name] = Path(path)
    if source is None and not files:
        raise click.UsageError("expected FROM, a file or folder with the task's data, or --split SPLIT=FILE")
    mirror_folder = (mirror or root_of(root) / "tasks_mirror").absolute()
    os.environ.update(QUIET | OFFLINE)
    from evaluation.mirror_writer import mirror_task

    done = mirror_task(task, source, mirror_folder, files, shots)
    definition = done.definition
    dataset = definition.dataset + (f" ({definition.config})" if definition.config else "")
    if not as_json:
        counts = ", ".join(f"{split} {count:,}" for split, count in done.splits.items())
        click.echo(f"{task}: {dataset}, {counts} rows, {done.layout}")
        if done.put_aside:
            click.echo(
                f"{done.put_aside} of them are reserved for few-shot examples and not scored (--shots 0 scores all)"
            )
        click.echo(f"in {done.folder}\n\nthe first question, as the task formats it:\n")
        click.echo(done.prompt[:600])
    document = {
        "status": "done",
        "task": task,
        "dataset": definition.dataset,
        "config": definition.config,
        "mirror": str(mirror_folder),
        "path": str(done.folder),
        "splits": dict(done.splits),
        "scored_split": definition.scored,
        "put_aside": done.put_aside,
        "layout": done.layout,
        "prompt": done.prompt,
    }
    return document, 0
