"""stemma gc: remove artifacts that nothing needs, after showing them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.common.options import root_of, root_option
from cli.common.output import as_json, print_problems, print_table

if TYPE_CHECKING:
    from flows.runs.garbage import Garbage
    from flows.runs.journal import RunJournal


@click.command("gc")
@click.option("--yes", is_flag=True, help="Remove the artifacts shown.")
@click.option("--pin", metavar="ARTIFACT", multiple=True, help="Keep this artifact and all of its ancestors.")
@click.option("--unpin", metavar="ARTIFACT", multiple=True, help="Remove a pin.")
@click.option("--adopted", is_flag=True, help="Also remove imported artifacts.")
@click.option("--states", is_flag=True, help="Also remove saved training states of artifacts that are kept.")
@root_option
@as_json
def command(
    yes: bool,
    pin: tuple[str, ...],
    unpin: tuple[str, ...],
    adopted: bool,
    states: bool,
    root: str | None,
    as_json: bool,
) -> tuple[dict[str, Any], int]:
    """List artifacts that no pipeline's newest run, registered model or pin needs; with --yes, remove them.

    Ancestors of a needed artifact are needed too. Nothing that a run is using is removed. Records of old runs are
    removed as at the end of a run, see `stemma up --keep-days`. Exported models stay: remove them by hand.
    """
    from flows.runs.garbage import STALE_S, Pins, refuse_if_unsure, remove, remove_states, survey
    from flows.runs.retention import forget, forgettable
    from infra.store.at_work import nobody_at_work
    from infra.store.layout import EXPORTS
    from infra.store.roots import refuse_url
    from infra.store.store import Store

    folder = root_of(root)
    if states:
        refuse_url(folder, "stemma gc --states", "leave --states out: states are removed with their artifacts")
    # Pins and removals concern existing artifacts: they never create a store.
    store = Store(folder, reading=True)
    _set_pins(store, Pins(store.root), pin, unpin)
    removed: set[str] = set()
    with nobody_at_work(store, STALE_S) if yes else nullcontext():
        surveyed = survey(store, spare_adopted=not adopted, spare_states=not states)
        runs = forgettable(store)
        garbage = [*surveyed.artifacts, *surveyed.work, *surveyed.states, *_of_runs(runs)]
        if yes:
            refuse_if_unsure(surveyed)
            removed_items = [
                *remove(store, [*surveyed.artifacts, *surveyed.work]),
                *remove_states(store, surveyed.states),
            ]
            removed = {item.id for item in removed_items} | {f"runs/{run_id}" for run_id in forget(store, runs)}
    garbage_rows: list[dict[str, Any]] = [
        {
            "artifact": item.id,
            "path": str(item.folder),
            "bytes": item.bytes,
            "reason": item.reason,
            "removed": item.id in removed,
        }
        for item in garbage
    ]
    total = sum(item.bytes for item in garbage if not yes or item.id in removed)
    exports = list(_exports(store.root / EXPORTS))
    if not as_json:
        rows = [{**row, "MB": f"{row['bytes'] / 1e6:.1f}"} for row in garbage_rows]
        if rows:
            print_table(rows, {"artifact": "artifact", "MB": "MB", "reason": "reason"})
            click.echo()
        did = "removed" if yes else "would be removed with --yes"
        count = len(removed) if yes else len(garbage)
        click.echo(f"{count} {did}, {total / 1e6:.1f} MB; {len(surveyed.needed)} artifacts are needed")
        if exports:
            size = sum(row["bytes"] for row in exports)
            models = f"{len(exports)} exported model{'s' * (len(exports) > 1)}"
            click.echo(f"{models} in {store.root / EXPORTS}, {size / 1e6:.1f} MB: not removed, they are yours")
        print_problems(surveyed.problems)
    document = {
        "status": "failed" if surveyed.problems else "done",
        "errors": [problem.as_json() for problem in surveyed.problems],
        "root": store.place,
        "bytes": total,
        "garbage": garbage_rows,
        "needed": [{"artifact": name, "reason": reason} for name, reason in sorted(surveyed.needed.items())],
        "exports": exports,
        "pins": Pins(store.root).read(),
    }
    return document, 1 if surveyed.problems else 0


def _exports(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield path and bytes of each exported model."""
    for export in sorted(folder.iterdir()) if folder.is_dir() else ():
        with suppress(FileNotFoundError):
            yield {"path": str(export), "bytes": sum(path.lstat().st_size for path in export.rglob("*"))}


def _of_runs(journals: Iterable[RunJournal]) -> Iterator[Garbage]:
    """Yield the folders of runs, except those that the end of another run has removed meanwhile."""
    from flows.runs.garbage import Garbage

    for journal in journals:
        with suppress(FileNotFoundError):
            size = sum(path.lstat().st_size for path in journal.folder.rglob("*"))
            pipeline = journal.start_record().get("pipeline", "a pipeline")
            reason = f"a run of {pipeline}; nothing that it built is in the store"
            yield Garbage(f"runs/{journal.run_id}", journal.folder, size, reason)


def _set_pins(store: Any, pins: Any, pin: tuple[str, ...], unpin: tuple[str, ...]) -> None:
    from infra.errors import ConfigError, Problem
    from infra.store.ancestry import artifact_member
    from infra.store.reference import resolve

    for text in pin:
        pins.add(artifact_member(store, *resolve(store, text)).id)
    for text in unpin:
        # Try the pin itself first: its artifact may be gone.
        if not pins.remove(text) and not pins.remove(name := artifact_member(store, *resolve(store, text)).id):
            raise ConfigError(Problem("not_pinned", name, "this artifact is not pinned", "stemma gc --json lists pins"))
