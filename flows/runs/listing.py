"""Contents of a store as rows: pipeline runs, models and artifacts, each with its results."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Literal, get_args

from flows.runs.journal import RunJournal
from infra.store.manifest import Manifest
from infra.store.measurements import address, measurements
from infra.store.store import Store
from tasks.stages import STAGES

Kind = Literal["runs", "models", "artifacts"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def runs(store: Store) -> Iterator[dict[str, Any]]:
    """The runs, newest first: {"run_id", "pipeline", "config", "status", "started", "seconds", "built", "reused"}."""
    for journal in journals(store):
        if row := run_row(journal):
            yield row


def journals(store: Store) -> Iterator[RunJournal]:
    """The journals of a store's runs, newest first; some may be without a beginning."""
    runs_folder = store.runs()
    names = sorted(os.listdir(runs_folder), reverse=True) if runs_folder.is_dir() else []
    return (RunJournal(runs_folder, name) for name in names)


def run_row(journal: RunJournal) -> dict[str, Any] | None:
    """Return one of the rows of `runs`; None for a run whose beginning cannot be read."""
    start, result = journal.start_record(), journal.result()
    if not start:
        return None
    alive = result is None and journal.works()
    so_far = {line["stage"]: line for line in journal.read() if line["kind"] == "stage"} if not result else {}
    rows = result["stages"] if result else list(so_far.values())
    return {
        "run_id": journal.run_id,
        "pipeline": start.get("pipeline", ""),
        "config": start.get("config", ""),
        "status": result["status"] if result else "running" if alive else "lost",
        "started": datetime.fromtimestamp(start["time"], UTC).isoformat(timespec="seconds"),
        "seconds": result.get("seconds") if result else round(time.time() - start["time"], 3) if alive else None,
        "built": sum(row["status"] == "built" for row in rows),
        "reused": sum(row["status"] == "reused" for row in rows),
    }


def artifacts(store: Store, *, models_only: bool = False) -> list[dict[str, Any]]:
    """The finished artifacts, newest first: {"artifact", "step", "pipeline", "finished", "bytes", "headline",
    "figures", "path"}. Those that a later build of the same address replaced are left out."""
    listed = list(store.manifests())
    measured = measurements(manifest for _, manifest in listed)

    def result(manifest: Manifest) -> dict[str, Any]:
        """The figures and headline of an artifact, of a model those of its newest measurement."""
        of = measured.get(address(manifest))
        figures = {**manifest.result.get("figures", {}), **(of.result.get("figures", {}) if of else {})}
        return {"headline": str((of or manifest).result.get("headline", "")), "figures": figures}

    rows = [
        {
            "artifact": f"{manifest.stage}/{manifest.fingerprint}",
            "step": manifest.step or manifest.stage,
            "pipeline": manifest.pipeline,
            "finished": manifest.finished,
            "bytes": sum(file.size for file in manifest.files),
            **result(manifest),
            "path": str(folder),
        }
        for folder, manifest in listed
        if folder.name == manifest.fingerprint
        and not (models_only and (manifest.stage not in STAGES or not STAGES[manifest.stage].makes_weights))
    ]
    return sorted(rows, key=lambda row: (row["finished"], row["artifact"]), reverse=True)
