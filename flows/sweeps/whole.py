"""A whole sweep, from its first trial to its page and document: for the command, and for the Prefect page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from evaluation.page.sweep_page import sweep_page
from flows.sweeps.carried import leave
from flows.sweeps.curves import curves
from flows.sweeps.definition import Sweep
from flows.sweeps.law import law_of
from flows.sweeps.results import summary
from flows.sweeps.sweep import run_sweep
from flows.sweeps.trials import Trials
from infra.lineage.ledger import mlflow_run_id
from infra.store.store import Store


def whole_sweep(
    sweep: Sweep, store: Store, at_once: int, law: bool, page: Path | None, tell: Callable[[str], None]
) -> dict[str, Any]:
    """The document of `stemma sweep --json`, once all trials have ended or somebody said stop.

    law: fit a scaling law to what ended. page: where the page goes; None for the sweep's folder. tell: one line for a
    person. Raises ConfigError as `run_sweep` and `law_of` do.
    """
    trials = Trials(store.root, sweep.id)
    tell(f"sweep {sweep.id}: {sweep.trials * len(sweep.seeds)} trials, {at_once} at once, by {sweep.measure}")
    ended, cancelled = run_sweep(sweep, store, at_once, tell)
    document = summary(sweep, ended, cancelled)
    document["law"] = law_of(sweep, ended, trials.folder) if law and document["status"] == "done" else None
    leave(sweep, ended, trials.folder)
    place = page or trials.folder / "sweep.html"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(sweep_page(sweep.base.name, document, curves(sweep, ended, store)), encoding="utf8")
    return document | {
        "config": str(sweep.config),
        "root": str(store.root),
        "page": str(place.absolute()),
        "mlflow_run_id": mlflow_run_id(store.root, trials.about()["build_id"]),
    }
