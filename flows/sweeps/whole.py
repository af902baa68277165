"""A whole sweep, from its first trial to its page and document: for the command, and for the Prefect page."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from evaluation.pages.charts import Point
from evaluation.pages.comparison import CURVES
from evaluation.pages.sweep_page import sweep_page
from evaluation.results.pipeline import PipelineResults
from flows.config.carried import FILE
from flows.runs.journal import RunJournal
from flows.runs.trials import Trial, Trials
from flows.sweeps.definition import Sweep
from flows.sweeps.law import law_of
from flows.sweeps.results import summary
from flows.sweeps.sweep import run_sweep
from infra.lineage.ledger import mlflow_run_id
from infra.store.layout import AUX
from infra.store.store import Store


def whole_sweep(
    sweep: Sweep, store: Store, at_once: int, law: bool, page: Path | None, tell: Callable[[str], None]
) -> dict[str, Any]:
    """The document of `stemma sweep --json`, once all trials have ended or a stop was requested.

    law: fit a scaling law to what ended. page: where the page goes; None for the sweep's folder. tell: one line for a
        person. Raises ConfigError as `run_sweep` and `law_of` do.
    """
    trials = Trials(store.root, sweep.id)
    tell(f"sweep {sweep.id}: {sweep.trials * len(sweep.seeds)} trials, {at_once} at once, by {sweep.measure}")
    ended, cancelled = run_sweep(sweep, store, at_once, tell)
    document = summary(sweep, ended, cancelled)
    document["law"] = law_of(sweep, ended, trials.folder) if law and document["status"] == "done" else None
    leave_for_configs(sweep, ended, trials.folder)
    place = page or trials.folder / "sweep.html"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(sweep_page(sweep.base.name, document, _curves(sweep, ended, store)), encoding="utf8")
    return document | {
        "config": str(sweep.config),
        "root": store.place,
        "page": str(place.absolute()),
        "mlflow_run_id": mlflow_run_id(store.root, trials.about()["build_id"]),
    }


def _curves(sweep: Sweep, trials: Sequence[Trial], store: Store) -> dict[str, dict[int, list[Point]]]:
    """Title → place of a trial in the list → points, of the measured step where it is a training."""
    found: dict[str, dict[int, list[Point]]] = {}
    for place, trial in enumerate(trials):
        result = RunJournal(store.layout.runs, trial.run_id).result() if trial.status == "done" else None
        row = next((row for row in result["stages"] if row["stage"] == sweep.step), None) if result else None
        if row is None or not row["path"]:
            continue
        stage = Path(row["path"]).parent.name
        manifest = store.find(stage, row["fingerprint"])
        if manifest is None or stage not in CURVES:
            continue
        step = PipelineResults({sweep.step: store.peek(manifest, f"{AUX}/metrics.jsonl")})
        for curve in CURVES[stage]:
            if points := step.curve(sweep.step, curve.metric):
                found.setdefault(curve.title, {})[place] = points
    return found


def leave_for_configs(sweep: Sweep, trials: Sequence[Trial], folder: Path) -> None:
    """Writes what the trials found, for configs to take over."""
    runs = [
        {
            "settings": dict(trial.settings),
            "value": trial.value,
            "parameters": trial.figures.get(f"{sweep.step}.parameters"),
            "tokens": trial.figures.get(f"{sweep.step}.tokens"),
        }
        for trial in trials
        if trial.status == "done" and trial.value is not None
    ]
    found = {"sweep": sweep.id, "measure": sweep.measure, "maximise": sweep.maximise, "runs": runs}
    hidden = folder / f".{FILE}"
    hidden.write_text(json.dumps(found, indent=1) + "\n", encoding="utf8")
    os.replace(hidden, folder / FILE)
