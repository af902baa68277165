"""Runs that a store forgets: after some days, or after many newer ones, where nothing is left of what they built.

Forgotten are a run's journal, its run in MLflow with those of its stages, and its flow run in Prefect. A run stays
while an artifact that it built is in the store, while `stemma gc` reads the needs of its pipeline from it, and while
it is a trial of a sweep: so the whole descent of every model stays.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from flows.runs.journal import RunJournal
from flows.runs.journal_forms import is_whole
from infra.errors import StemmaError
from infra.io.files import shorten
from infra.lineage.messages import RunForgotten
from infra.lineage.outbox import Outbox
from infra.lineage.relay_lock import lineage_folder
from infra.servers.http import delete
from infra.servers.settings import settings_of
from infra.servers.state import prefect_api_url, servers_folder
from infra.store.store import Store

TIDIED_EVERY_S = 3600.0
LOG_BYTES = 20_000_000
"""Size from which the log of a server is emptied, after a copy of it."""
DAY_S = 86400.0


def tidy(store: Store) -> None:
    """Forget runs and shorten logs, at most once an hour; a store on a bucket is left alone, whose runs others share.

    For the end of a run: it never fails.
    """
    stamp = store.layout.state / "tidied"
    with suppress(OSError, StemmaError, ValueError, LookupError, TypeError):
        if store.remote is not None or (stamp.exists() and abs(time.time() - stamp.stat().st_mtime) < TIDIED_EVERY_S):
            return
        stamp.touch()
        forget(store, forgettable(store))
        for log in [*servers_folder(store.root).glob("*.log"), *lineage_folder(store.root).glob("*.log")]:
            shorten(log, LOG_BYTES)


def forgettable(store: Store) -> list[RunJournal]:
    """Return the runs that nothing needs, and that are too old or too many by the settings of `stemma up`."""
    settings = settings_of(store.root)
    folder = store.layout.runs
    if store.remote is not None or not settings.keep_days or not folder.is_dir():
        return []
    builders = {manifest.run_id for _, manifest in store.manifests()}
    by_pipeline: dict[str, list[tuple[RunJournal, dict[str, Any]]]] = defaultdict(list)
    for path in sorted(folder.iterdir(), reverse=True):
        journal = RunJournal(folder, path.name)
        if pipeline := (start := journal.start_record()).get("pipeline"):
            by_pipeline[pipeline].append((journal, start))
    oldest = time.time() - settings.keep_days * DAY_S
    return [
        journal
        for runs in by_pipeline.values()
        for number, (journal, start) in enumerate(_unneeded(runs))
        if journal.run_id not in builders and (number >= settings.keep_runs or start["time"] < oldest)
    ]


def _unneeded(runs: Iterable[tuple[RunJournal, dict[str, Any]]]) -> Iterator[tuple[RunJournal, dict[str, Any]]]:
    """The runs of a pipeline that ended before its newest whole run: `stemma gc` looks no further back than that."""
    is_before = False
    for journal, start in runs:
        if is_before:
            if journal.trial() is None and (journal.result() is not None or journal.has_died()):
                yield journal, start
        elif (result := journal.result()) is not None:
            is_before = result["status"] == "done" and is_whole(start)


def forget(store: Store, journals: Iterable[RunJournal]) -> list[str]:
    """Remove runs from the disk, and have MLflow and Prefect forget them; return their ids."""
    outbox = Outbox(store.root)
    forgotten, flow_runs = [], []
    for journal in journals:
        outbox.send(RunForgotten(journal.run_id))
        flow_runs.append(str(journal.start_record().get("flow_run_id", "")))
        # Renamed first, so that no reader takes a half-removed folder for a run.
        hidden = store.layout.state / f"forgotten-{journal.run_id}"
        with suppress(FileNotFoundError):
            os.rename(journal.folder, hidden)
            shutil.rmtree(hidden, ignore_errors=True)
            forgotten.append(journal.run_id)
    # A server that does not answer removes them later by itself.
    if api := prefect_api_url(store.root):
        with suppress(OSError):
            for flow_run in filter(None, flow_runs):
                delete(f"{api}/flow_runs/{quote(flow_run, safe='')}")
    return forgotten
