"""Results of a sweep: settings by mean over seeds, the best, differences to the base, importance of keys."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from flows.runs.trials import Trial
from flows.sweeps.definition import BASE, Sweep
from flows.sweeps.space import Choices, Range, described

LEAST_FOR_IMPORTANCE = 4
_BESIDE = ("parameters", "tokens_per_s")
"""Figures of a training that an ablation shows next to the measured one: its cost."""


def summary(sweep: Sweep, trials: Sequence[Trial], cancelled: bool) -> dict[str, Any]:
    """The document of `stemma sweep --json`.

    settings: one row an arm, the best first: mean, sd (n - 1) and Student's 95 % interval over its seeds, null for one
    seed. best: the first of those whose seeds all ended. ablations: `paired`. importance: `importance`.
    """
    rows = _settings(sweep, trials)
    whole = [row for row in rows if row["done"] == len(sweep.seeds)]
    failed = [trial for trial in trials if trial.status == "failed"]
    ended = sum(trial.status in ("done", "pruned", "failed") for trial in trials)
    expected = sweep.trials * len(sweep.seeds)
    status = "cancelled" if cancelled else "done" if ended == expected and len(failed) < ended else "failed"
    problems = [
        {"code": "trial_failed", "path": f"trial {trial.number}", "message": trial.error, "fix": "run the sweep again"}
        for trial in failed
    ]
    return {
        "status": status,
        "errors": problems if status == "failed" else [],
        "warnings": problems if status != "failed" else [],
        "sweep": sweep.id,
        "measure": sweep.measure,
        "maximise": sweep.maximise,
        "sampler": sweep.sampler,
        "seeds": list(sweep.seeds),
        "trials": [trial.as_json() for trial in trials],
        "best": whole[0] if whole else None,
        "settings": rows,
        "ablations": paired(sweep, trials),
        "importance": importance(sweep, rows),
    }


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Student's 95 % interval of a mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    from scipy.stats import t

    mean, half = fmean(values), t.ppf(0.975, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return float(mean - half), float(mean + half)


def _settings(sweep: Sweep, trials: Sequence[Trial]) -> list[dict[str, Any]]:
    arms: dict[int, list[Trial]] = {}
    for trial in trials:
        arms.setdefault(trial.arm, []).append(trial)
    rows = []
    for arm, mine in arms.items():
        done = [trial for trial in mine if trial.status == "done" and trial.value is not None]
        values = [trial.value for trial in done if trial.value is not None]
        bounds = interval(values)
        rows.append(
            {
                "arm": arm,
                "name": mine[0].name or described(mine[0].settings),
                "settings": dict(mine[0].settings),
                "status": mine[0].status if len({trial.status for trial in mine}) == 1 else "mixed",
                "done": len(done),
                "mean": fmean(values) if values else None,
                "sd": stdev(values) if len(values) > 1 else None,
                "low": bounds[0] if bounds else None,
                "high": bounds[1] if bounds else None,
                "run_ids": [trial.run_id for trial in done],
            }
        )
    sign = -1.0 if sweep.maximise else 1.0
    return sorted(rows, key=lambda row: (row["mean"] is None, sign * (row["mean"] or 0.0), row["arm"]))


def paired(sweep: Sweep, trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """Each ablation less the base with the same seed: {"name", "figure", "base", "difference", "low", "high", "seeds",
    "shown"}; Student's 95 % interval over seeds, null for fewer than two. shown: whether it leaves zero out."""
    of: dict[str, dict[int, Trial]] = {}
    for trial in trials:
        if trial.name and trial.status == "done":
            of.setdefault(trial.name, {})[trial.seed] = trial
    base = of.pop(BASE, {})
    rows = []
    for figure in (sweep.measure, *(f"{sweep.step}.{name}" for name in _BESIDE)):
        for name, mine in of.items():
            both = [seed for seed in sweep.seeds if _has(base.get(seed), figure) and _has(mine.get(seed), figure)]
            if not both:
                continue
            differences = [mine[seed].figures[figure] - base[seed].figures[figure] for seed in both]
            bounds = interval(differences)
            rows.append(
                {
                    "name": name,
                    "figure": figure,
                    "base": fmean(base[seed].figures[figure] for seed in both),
                    "difference": fmean(differences),
                    "low": bounds[0] if bounds else None,
                    "high": bounds[1] if bounds else None,
                    "seeds": both,
                    "shown": bool(bounds and not bounds[0] <= 0 <= bounds[1]),
                }
            )
    return rows


def _has(trial: Trial | None, figure: str) -> bool:
    return trial is not None and figure in trial.figures


def importance(sweep: Sweep, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The share of the variance that each key explains (fANOVA, Hutter et al. 2014, by Optuna); empty for one key, or
    fewer than four settings that ended."""
    done = [row for row in rows if row["mean"] is not None]
    if len(sweep.space) < 2 or len(done) < LEAST_FOR_IMPORTANCE or len({row["mean"] for row in done}) == 1:
        return {}
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    kinds = optuna.distributions
    of: dict[str, Any] = {}
    for key, one in sweep.space.items():
        match one:
            case Choices(values):
                of[key] = kinds.CategoricalDistribution([str(value) for value in values])
            case Range(low, high, log, True):
                of[key] = kinds.IntDistribution(int(low), int(high), log=log)
            case Range(low, high, log, False):
                of[key] = kinds.FloatDistribution(low, high, log=log)
    study = optuna.create_study()
    for row in done:
        drawn = {
            key: str(row["settings"][key]) if isinstance(one, Choices) else row["settings"][key]
            for key, one in sweep.space.items()
        }
        study.add_trial(optuna.trial.create_trial(params=drawn, distributions=of, value=row["mean"]))
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
    found = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {key: float(found.get(key, 0.0)) for key in sweep.space}
