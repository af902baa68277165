"""The trials of a sweep on the disk, <root>/sweeps/<id>/: whatever is killed when, none is lost and none counts twice.

sweep.json      what the sweep is, the command that goes on with it, and its run in MLflow
trials/NNNN.json   one trial, written whole before it begins and when it ends
optuna.log      what a sampler knows, where there is one
sweep.html      the page
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from infra.errors import ConfigError, Problem
from infra.io.files import sync
from infra.io.tables import damaged, read_state
from infra.store.store import Store

Status = Literal["waiting", "running", "done", "failed", "pruned"]
ENDED = frozenset({"done", "failed", "pruned"})
_LOST = "delete the sweep's folder: the command then starts again, and reuses every artifact"


@dataclass(frozen=True)
class Trial:
    """One pipeline run of a sweep.

    arm: number of its settings, which several seeds share. value: the measured figure. run_id: of the run that counts;
    tried: those before it that were cut off. steps: figures by `step.figure`. error: why it failed, in one line.
    """

    number: int
    arm: int
    settings: Mapping[str, Any]
    seed: int
    name: str = ""
    status: Status = "waiting"
    run_id: str = ""
    tried: tuple[str, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)
    value: float | None = None
    seconds: float = 0.0
    error: str = ""

    def begun(self, run_id: str) -> Trial:
        tried = (*self.tried, self.run_id) if self.run_id not in ("", run_id) else self.tried
        return replace(self, status="running", run_id=run_id, tried=tried, error="")

    def as_json(self) -> dict[str, Any]:
        keys = ("number", "arm", "settings", "seed", "status", "figures", "run_id", "name", "value", "seconds", "error")
        return {key: getattr(self, key) for key in keys}


class Trials:
    """The folder of one sweep."""

    def __init__(self, root: Path, id: str) -> None:
        self.folder = root / "sweeps" / id
        self._trials = self.folder / "trials"

    def create(self) -> None:
        self._trials.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep a second command from running the same trials. Raises ConfigError if one does already."""
        with open(self.folder / "lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                message = "another command runs this sweep already"
                raise ConfigError(Problem("sweep_runs", str(self.folder), message, "wait for it")) from None
            yield

    def about(self) -> dict[str, Any]:
        """The record that `describe` wrote; empty for a sweep that never began. Raises StageError `damaged_state`."""
        record: dict[str, Any] = read_state(self.folder / "sweep.json", _LOST, {})
        return record

    def describe(self, about: Mapping[str, Any]) -> None:
        _write(self.folder / "sweep.json", about)

    def all(self) -> list[Trial]:
        """Those that began, by number. Raises StageError `damaged_state`."""
        trials = []
        for path in sorted(self._trials.glob("[0-9]*.json")):
            try:
                data = read_state(path, _LOST, {})
                trials.append(Trial(**{**data, "tried": tuple(data["tried"])}))
            except (TypeError, KeyError):
                raise damaged(path, "not as expected", _LOST) from None
        return trials

    def save(self, trial: Trial) -> None:
        """Write it whole, and on the disk: a trial that is begun is known before its run is."""
        _write(self._trials / f"{trial.number:04}.json", asdict(trial))


def best_runs(store: Store) -> Iterator[tuple[str, str]]:
    """(sweep, run id) of the best trial of each sweep of a store, on an object store those of other machines too.
    Raises StageError `damaged_state`."""
    for folder in sorted((store.root / "sweeps").glob("*")):
        if best := _best(Trials(store.root, folder.name)):
            yield folder.name, best
    if store.remote is not None:
        yield from store.remote.runs.best()


def keep_best(store: Store, trials: Trials) -> None:
    """Publish to other machines of a root on an object store the trial that `stemma gc` keeps. Raises StageError."""
    if store.remote is not None and (best := _best(trials)):
        store.remote.runs.put_best(trials.folder.name, _who(store), best)


def _best(trials: Trials) -> str:
    """The run of the best trial that ended, "" for none."""
    done = [(trial.value, trial.run_id) for trial in trials.all() if trial.value is not None]
    return (max if trials.about().get("maximise") else min)(done)[1] if done else ""


def _who(store: Store) -> str:
    """A name for this cache of a root: several machines may run the same sweep."""
    return hashlib.sha256(f"{socket.gethostname()} {store.root}".encode()).hexdigest()[:12]


def _write(path: Path, data: Mapping[str, Any]) -> None:
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    hidden.write_text(json.dumps(data, indent=1), encoding="utf8")
    sync(hidden)
    hidden.replace(path)
