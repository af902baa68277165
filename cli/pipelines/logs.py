"""stemma logs [STAGE]: events and output of a stage's newest build."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from cli.common.options import root_of, root_option
from cli.common.output import as_json
from infra.io.json import read_own_json
from infra.process.tail import Tail

JOURNAL = "journal.jsonl"
LOG = "stage.log"


@click.command("logs")
@click.argument("stage", required=False)
@click.option("-f", "--follow", is_flag=True, help="Keep printing new lines until Ctrl-C.")
@root_option
@as_json
def command(stage: str | None, follow: bool, root: str | None, as_json: bool) -> tuple[dict[str, Any], int]:
    """Print the log of a stage's newest build, finished or not: its events, progress and output. Without STAGE, list
    the stages that have a log."""
    from infra.errors import ConfigError, Problem
    from infra.store.roots import shown_root

    folder = root_of(root)
    built = [*folder.glob(f"*/*/aux/{JOURNAL}"), *_remote_journals(folder, stage)]
    journals = sorted(
        [*built, *folder.glob(f".work/*/*/scratch/{JOURNAL}")],
        key=lambda path: path.stat().st_mtime,
        reverse=True,
    )
    if stage is not None:
        # Artifacts of a named step are in the folder of the stage that it uses.
        of_stage = [path for path in journals if path.parts[-4] == stage]
        journals = [path for path in journals if _step_of(path) == stage] or of_stage
    if not journals:
        message = f"it has no log in {shown_root(folder)}" if stage else f"no stage has a log in {shown_root(folder)}"
        raise ConfigError(Problem("no_log", stage or "", message, "stemma logs lists the stages that have a log"))
    if stage is None:
        log_rows = [{"stage": _step_of(path), "path": str(path.parent)} for path in journals]
        if not as_json:
            for item in log_rows:
                click.echo(f"{item['stage']:<24} {item['path']}")
        return {"status": "done", "logs": log_rows}, 0
    work_folder = journals[0].parent
    journal_tail, printed = Tail(work_folder / JOURNAL), Tail(work_folder / LOG)
    said_lines, text = journal_tail.lines(), "".join(f"{line}\n" for line in printed.lines())
    if not as_json:
        click.echo(f"{work_folder}:", err=True)
        _print_messages(said_lines)
        click.echo(text, nl=False)
        while follow:
            time.sleep(0.2)
            _print_messages(journal_tail.lines())
            for line in printed.lines():
                click.echo(line)
    return {
        "status": "done",
        "stage": stage,
        "path": str(work_folder),
        "said": _shown_messages(said_lines),
        "text": text,
    }, 0


def _remote_journals(root: Path, stage: str | None) -> list[Path]:
    """The journal of a stage's newest artifact on an object store, downloaded; without STAGE, all journals."""
    from infra.errors import ConfigError
    from infra.store.layout import AUX
    from infra.store.reference import resolve
    from infra.store.roots import url_of
    from infra.store.store import Store

    if not url_of(root):
        return []
    store = Store(root, reading=True)
    try:
        artifacts = [resolve(store, stage)] if stage else [resolve(store, name) for name in store.stages()]
    except ConfigError:  # an unfinished build may still have a log
        return []
    files = (f"{AUX}/{JOURNAL}", f"{AUX}/{LOG}")
    return [store.peek(manifest, *files, folder=folder) / files[0] for folder, manifest in artifacts]


def _step_of(journal: Path) -> str:
    """The step whose build wrote a journal, from the build's job, or its manifest once it is done."""
    build = journal.parent.parent
    for path, key in ((journal.parent / "job.json", "node"), (build / "manifest.json", "step")):
        with suppress(FileNotFoundError, ValueError):
            return str(read_own_json(path).get(key) or journal.parts[-4])
    return journal.parts[-4]


def _shown_messages(lines: list[str]) -> list[dict[str, Any]]:
    """Print events and progress; metrics, including retracted ones, are shown on pages only."""
    from infra.run import messages_in

    return [line for line in messages_in(lines) if line["kind"] in ("event", "progress")]


def _print_messages(lines: list[str]) -> None:
    for line in _shown_messages(lines):
        clock = time.strftime("%H:%M:%S", time.localtime(line["time"]))
        if line["kind"] == "event":
            click.echo(f"{clock} {line['message']}")
        else:
            total = f" of {line['total']:,.0f}" if line["total"] else ""
            click.echo(f"{clock} {line['done']:,.0f}{total} {line['unit']} {line['note']}".rstrip())
