"""stemma run CONFIG: build what is missing, reuse the rest, and show progress."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from cli.common.options import CONFIG, root_of, root_option, selection_of, selection_options, set_option, settings_of
from cli.common.output import as_json, print_problems, print_table
from cli.pipelines.follow import following


@click.command("run")
@CONFIG
@selection_options
@set_option
@root_option
@click.option("--verify", is_flag=True, help="Hash every byte of reused artifacts, even if file times are unchanged.")
@as_json
def command(
    config: Path,
    only_: tuple[str, ...],
    from_: tuple[str, ...],
    until_: tuple[str, ...],
    force_: tuple[str, ...],
    strict_versions: bool,
    settings: tuple[str, ...],
    root: str | None,
    verify: bool,
    as_json: bool,
) -> tuple[dict[str, Any], int]:
    """Run a pipeline: build what is missing, reuse the rest.

    If `stemma up` is running, the pipeline runs on its worker, where it can be watched, cancelled and retried in the
    page; otherwise it runs in this process. Ctrl-C cancels either.
    """
    from flows.config.graph import graph
    from flows.config.read import load
    from flows.deployment.start import RunRequest, exit_code, runs_on_worker, start
    from flows.runs.journal import RunJournal, new_run_id
    from infra.lineage.ledger import mlflow_run_id, run_url
    from infra.servers.settings import run_page
    from infra.store.store import Store

    pipeline = load(config, settings_of(settings), lambda: root_of(root))
    selection = selection_of(only_, from_, until_, force_, strict_versions)
    selection.choose(graph(pipeline))
    layout = Store(root_of(root)).layout
    journal = RunJournal(layout.runs, new_run_id())
    location = "on the worker of `stemma up`" if runs_on_worker(layout.root) else "in this process, on a private server"
    left = _unfinished(layout.runs, pipeline.name)
    click.echo(f"{f'continues {left}' if left else f'running {pipeline.name}'} {location}", err=True)
    debug = bool(click.get_current_context().params["debug"])
    with following(journal, quiet=as_json, debug=debug):
        document = start(
            RunRequest(pipeline, selection, layout.root, verify, str(config)), journal, partial(click.echo, err=True)
        )
    document = {
        **document,
        "mlflow_run_id": mlflow_run_id(layout.root, journal.run_id),
        "mlflow_run_url": run_url(layout.root, journal.run_id),
        "page_url": run_page(layout.root, journal.run_id),
        "stages": [
            {**row, "mlflow_run_id": mlflow_run_id(layout.root, row["build_id"]) if row["build_id"] else None}
            for row in document["stages"]
        ],
    }
    if not as_json:
        _print_summary(document)
    return document, exit_code(document)


def _unfinished(runs: Path, pipeline: str) -> str:
    """The last run of a pipeline if it left work to continue; empty if it succeeded, still runs, or there is none."""
    from flows.runs.journal import latest

    journal = next(latest(runs, pipeline), None)
    if journal is None:
        return ""
    result = journal.result()
    if result["status"] == "done" if result else journal.works():
        return ""
    ended = result["status"] if result else "lost"
    return f"{pipeline} after run {journal.run_id}, which {_ENDED.get(ended, ended)}: what it built is reused,"


_ENDED = {
    "cancelled": "was cancelled",
    "lost": "was interrupted",
    "failed": "failed",
    "refused": "was rejected by a gate",
}


def _print_summary(document: dict[str, Any]) -> None:
    from infra.errors import Problem

    if document.get("stages"):
        click.echo()
        columns = {"stage": "stage", "status": "status", "seconds": "seconds", "headline": "key figure"}
        print_table(document["stages"], columns)
    click.echo(f"\n{document['status']} in {document.get('seconds', 0):.0f} s; artifacts in {document.get('root')}")
    for stage, label, page, kind in (
        ("report", "report:       ", "report.html", "report"),
        ("corpus_report", "corpus report:", "aux/corpus_report.html", "corpus"),
    ):
        row = next((row for row in document.get("stages", []) if row["stage"] == stage and row["path"]), None)
        if row:
            path = Path(row["path"]) / page
            # An artifact that another machine uploaded to an object store may not be on this machine.
            command = f"stemma open {kind} --root {document.get('root')}"
            click.echo(f"{label} {path if path.exists() else command}")
    for label, key in (
        ("page of run", "page_url"),
        ("Prefect page", "flow_run_url"),
        ("MLflow page", "mlflow_run_url"),
    ):
        if document.get(key):
            click.echo(f"{label}: {document[key]}")
    for warning in document.get("warnings", []):
        click.echo(f"warning: {Problem(**warning)}", err=True)
    print_problems(document["errors"])
