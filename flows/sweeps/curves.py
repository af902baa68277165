"""The training curves of a sweep's trials, for its page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from evaluation.page.charts import Point
from evaluation.page.comparison import CURVES
from evaluation.pipeline_results import PipelineResults
from flows.journal import RunJournal
from flows.sweeps.definition import Sweep
from flows.sweeps.trials import Trial
from infra.store.store import Store


def curves(sweep: Sweep, trials: Sequence[Trial], store: Store) -> dict[str, dict[int, list[Point]]]:
    """Title → place of a trial in the list → points, of the measured step where it is a training."""
    found: dict[str, dict[int, list[Point]]] = {}
    for place, trial in enumerate(trials):
        result = RunJournal(store.layout.runs, trial.run_id).result() if trial.status == "done" else None
        row = next((row for row in result["stages"] if row["stage"] == sweep.step), None) if result else None
        if row is None or not row["path"]:
            continue
        path = Path(row["path"])
        step = PipelineResults({sweep.step: path})
        for curve in CURVES.get(path.parent.name, ()):
            if points := step.curve(sweep.step, curve.metric):
                found.setdefault(curve.title, {})[place] = points
    return found
