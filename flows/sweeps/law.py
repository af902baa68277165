"""The scaling law of a sweep over sizes and lengths, see `training.planner.laws.law_fit`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flows.runs.trials import Trial
from flows.sweeps.definition import Sweep
from infra.errors import ConfigError, Problem

FILE = "law.json"


def check(sweep: Sweep) -> None:
    """Raises ConfigError for a sweep that cannot give a law, before anything is spent."""
    from training.planner.laws.law_fit import LEAST

    if sweep.figure != "validation_loss":
        message = f"a law is fitted to a pretraining's validation_loss, not to {sweep.measure}"
        raise ConfigError(Problem("bad_law", "--law", message, "leave --measure out"))
    if sweep.trials * len(sweep.seeds) <= LEAST:
        message = f"{sweep.trials * len(sweep.seeds)} runs are too few: {LEAST} and the one that is held out are needed"
        raise ConfigError(Problem("too_few_runs", "--law", message, "sweep more sizes and durations"))


def law_of(sweep: Sweep, trials: Sequence[Trial], folder: Path) -> dict[str, Any]:
    """The result of `law_fit.fit_and_predict` for the trials that ended, with their `points` and the result of
    `isoflop.isoflop` for them; also written as law.json, for `stemma plan --law`. Raises ConfigError where too few
    ended, or all are of one size or length."""
    from training.planner.laws.isoflop import isoflop
    from training.planner.laws.law_fit import RunPoint, fit_and_predict, write

    points = [
        RunPoint(trial.figures[f"{sweep.step}.parameters"], trial.figures[f"{sweep.step}.tokens"], trial.value)
        for trial in trials
        if trial.status == "done" and trial.value is not None
    ]
    found = {
        **fit_and_predict(points),
        "points": [{"parameters": one.parameters, "tokens": one.tokens, "loss": one.loss} for one in points],
        "isoflop": isoflop(points),
    }
    write(folder / FILE, found)
    return {**found, "file": str((folder / FILE).absolute())}
