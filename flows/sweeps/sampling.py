"""Choice of the next trial: every arm with every seed, or what Optuna draws from the trials so far."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from flows.runs.trials import ENDED, Trial, Trials
from flows.sweeps.definition import Sweep
from flows.sweeps.space import Choices, Range


class Chooser(Protocol):
    """Source of a sweep's trials."""

    def next(self) -> Trial | None:
        """A trial that has not begun, or did not come to its end; None while there is none."""
        ...

    def ended(self, trial: Trial) -> None:
        """Called when a trial ended."""
        ...

    def prunes(self, trial: Trial, curve: Sequence[tuple[int, float]]) -> bool:
        """Return True if a running trial should be ended. curve: (step, value) of the validation so far."""
        ...


def chooser(sweep: Sweep, trials: Trials) -> Chooser:
    """The one that the sweep's sampler names."""
    return Listed(sweep, trials) if sweep.arms else Drawn(sweep, trials)


class Listed:
    """Every arm with every seed, arms first, so that a sweep that is stopped early has covered each of them."""

    def __init__(self, sweep: Sweep, trials: Trials) -> None:
        known = {trial.number: trial for trial in trials.all()}
        self._left = []
        for place, seed in enumerate(sweep.seeds):
            for number, arm in enumerate(sweep.arms):
                fresh = Trial(place * len(sweep.arms) + number, number, arm.settings, seed, arm.name)
                trial = known.get(fresh.number, fresh)
                if trial.status not in ("done", "pruned"):
                    self._left.append(trial)

    def next(self) -> Trial | None:
        return self._left.pop(0) if self._left else None

    def ended(self, trial: Trial) -> None:
        return None

    def prunes(self, trial: Trial, curve: Sequence[tuple[int, float]]) -> bool:
        return False


class Drawn:
    """Settings from an Optuna sampler, each run with every seed; Optuna gets the mean.

    Optuna's own storage records which settings were drawn, and `Trials` records their outcome. After a kill the two are
    reconciled: settings that were drawn and not run are run, and results that Optuna did not get are passed to it.
    """

    def __init__(self, sweep: Sweep, trials: Trials) -> None:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna = optuna
        self._sweep = sweep
        self._known = {trial.number: trial for trial in trials.all()}
        # A later call draws with another seed: it would propose the same settings once more.
        seed = int(sweep.id[:6], 16) + len(self._known)
        sampler = (
            optuna.samplers.RandomSampler(seed=seed)
            if sweep.sampler == "random"
            else optuna.samplers.TPESampler(seed=seed, constant_liar=True, n_startup_trials=_startup(sweep.trials))
        )
        pruner = {
            "none": optuna.pruners.NopPruner,
            "median": lambda: optuna.pruners.MedianPruner(n_startup_trials=_startup(sweep.trials)),
            "hyperband": optuna.pruners.HyperbandPruner,
        }[sweep.pruner]()
        log = trials.folder / "optuna.log"
        _end_with_whole_line(log)
        self.study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(log))),
            sampler=sampler,
            pruner=pruner,
            study_name=sweep.id,
            direction="maximize" if sweep.maximise else "minimize",
            load_if_exists=True,
        )
        self._open: dict[int, Any] = {}
        self._reported: dict[int, int] = {}
        self._left: list[Trial] = []
        for frozen in self.study.get_trials(deepcopy=False):
            ended = frozen.state.is_finished()
            # A failed one is tried again, and stays failed for Optuna: what it was told is final.
            if not ended:
                self._open[frozen.number] = optuna.trial.Trial(self.study, frozen._trial_id)
            self._expect(frozen.number, frozen.params if ended else None)
        for number in list(self._open):
            self._tell(number)

    def _expect(self, number: int, settings: Mapping[str, Any] | None = None) -> None:
        """Puts the trials of drawn settings that are still to run in the queue."""
        settings = self._drawn(self._open[number]) if settings is None else settings
        seeds = self._sweep.seeds
        for place, seed in enumerate(seeds):
            fresh = Trial(number * len(seeds) + place, number, dict(settings), seed)
            trial = self._known.setdefault(fresh.number, fresh)
            if trial.status not in ("done", "pruned"):
                self._left.append(trial)

    def _drawn(self, trial: Any) -> dict[str, Any]:
        """The values of one trial: those that it has already, else new ones."""
        found = {}
        for key, one in self._sweep.space.items():
            match one:
                case Choices(values):
                    simple = all(isinstance(value, int | float | str | bool) or value is None for value in values)
                    # Optuna keeps plain values only; any other it gets as its place in the list.
                    names = list(values) if simple else list(range(len(values)))
                    picked = trial.suggest_categorical(key, names)
                    found[key] = picked if simple else values[picked]
                case Range(low, high, log, True):
                    found[key] = trial.suggest_int(key, int(low), int(high), log=log)
                case Range(low, high, log, False):
                    found[key] = trial.suggest_float(key, low, high, log=log)
        return found

    def next(self) -> Trial | None:
        if not self._left and len(self.study.get_trials(deepcopy=False)) < self._sweep.trials:
            trial = self.study.ask()
            self._open[trial.number] = trial
            self._expect(trial.number)
        return self._left.pop(0) if self._left else None

    def ended(self, trial: Trial) -> None:
        self._known[trial.number] = trial
        self._tell(trial.arm)

    def _tell(self, number: int) -> None:
        """Report settings to Optuna once all their seeds have ended."""
        seeds = len(self._sweep.seeds)
        mine = [self._known[number * seeds + place] for place in range(seeds)]
        if number not in self._open or any(trial.status not in ENDED for trial in mine):
            return
        states = self._optuna.trial.TrialState
        values = [trial.value for trial in mine if trial.status == "done" and trial.value is not None]
        if any(trial.status == "pruned" for trial in mine):
            self.study.tell(number, state=states.PRUNED)
        elif len(values) < seeds or not all(map(math.isfinite, values)):
            self.study.tell(number, state=states.FAIL)
        else:
            self.study.tell(number, fmean(values))
        del self._open[number]

    def prunes(self, trial: Trial, curve: Sequence[tuple[int, float]]) -> bool:
        if self._sweep.pruner == "none" or trial.arm not in self._open:
            return False
        running = self._open[trial.arm]
        seen = self._reported.get(trial.arm, -1)
        for step, value in curve:
            if step > seen:
                running.report(value, step)
                self._reported[trial.arm] = step
        return bool(curve) and self._reported[trial.arm] > seen and bool(running.should_prune())


def _end_with_whole_line(log: Path) -> None:
    """Cuts off what a disk that was full left of the last line: Optuna would add the next one to it, and could read
    none of what comes then."""
    if log.exists():
        with open(log, "r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


def _startup(trials: int) -> int:
    """Settings that are drawn at random before a sampler or pruner judges by them: 10 in Optuna, a quarter of few."""
    return min(10, max(2, trials // 4))
