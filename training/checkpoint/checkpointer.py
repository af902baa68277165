"""Write checkpoints during a fit, and continue a fit from one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from torch import nn

from evaluation.generation.random_state import seed_all
from infra.config import derived_seed
from infra.errors import Cancelled, Problem, StageError, stage_error
from infra.run import Run
from training.checkpoint.folder import batch_of, retain, whole_checkpoints, write
from training.checkpoint.snapshot import STATE, WEIGHTS, Snapshot, holders_of, tensors_of, write_rank
from training.checkpoint.upload import Uploader
from training.core import ranks
from training.core.callbacks import Callback
from training.core.train_state import Clock, TrainState

_FORMAT = 1
_PACKAGES = ("torch", "transformers", "numpy")
"""Packages whose versions affect the bits of a step."""


@dataclass(frozen=True)
class CheckpointPlan:
    """Schedule and retention of checkpoints.

    every: batches between checkpoints.
    last: the training's last batch. Work after it can fail and be repeated without the training.
    keep: number of newest checkpoints to keep; older ones are kept too while they are younger than `keep_hours`.
    data: fingerprint of the training data; a checkpoint of other data is refused.
    resumes: True if a stopped training continues from these checkpoints; one is written when the training is cancelled,
        and one after its last batch.
    from_start: True to write a checkpoint before the first batch too, and to keep it.
    """

    folder: Path
    every: int
    keep: int
    keep_hours: float
    data: str
    last: int
    resumes: bool = True
    from_start: bool = False


class Checkpointer(Callback):
    """Write checkpoints, including one when the run is cancelled, and upload those from which a training on another
    machine would continue. A plan that only serves rollbacks uploads just the one before the first batch."""

    def __init__(self, plan: CheckpointPlan, run: Run, uploader: Uploader | None = None) -> None:
        self._plan = plan
        self._run = run
        self._uploader = uploader
        plan.folder.mkdir(parents=True, exist_ok=True)

    def fit_start(self, state: TrainState) -> None:
        if self._plan.from_start and state.clock.batch == 0:
            path = self.write(state)
            if self._uploader:
                self._uploader.offer(path, must=True)

    def batch_checkpoint(self, state: TrainState) -> None:
        stop = self._plan.resumes and ranks.any_rank(self._run.cancelled)
        due = stop or state.clock.batch % self._plan.every == 0
        # Also if an epoch is not known to be at its end: nothing is left of it to continue.
        over = self._plan.resumes and state.clock.batch == self._plan.last
        if due or over:
            path = self.write(state)
            if self._uploader and not self._plan.from_start:
                # Checkpoints of plans that do not resume stay with the model, and none of them may be missing.
                self._uploader.offer(path, must=stop or over or not self._plan.resumes)
        if stop:
            raise Cancelled

    def write(self, state: TrainState) -> Path:
        """Write a checkpoint of the current state and remove outdated ones; every rank must call."""
        tensors = tensors_of(state.model, state.optimizer)
        holders = holders_of(tensors)

        def files(folder: Path) -> list[Path]:
            written = write_rank(folder, tensors, holders)
            if ranks.is_first():
                (folder / STATE).write_text(json.dumps(self._state(state)), encoding="utf8")
                written += [folder / STATE, *state.loader.write(folder)]
            return written

        path = write(self._plan.folder, state.clock.batch, files)
        if ranks.is_first():
            retain(self._plan.folder, self._plan.keep, self._plan.keep_hours, first=self._plan.from_start)
        return path

    def _state(self, state: TrainState) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "batch": state.clock.batch,
            "ranks": ranks.world_size(),
            "versions": _versions(),
            "data": self._plan.data,
            "clock": state.clock.as_json(),
            "dataset": state.loader.state_dict(state.clock.sample_in_epoch),
            "callbacks": state.callbacks.state_dict(),
            # Metrics up to here are kept on a resume; later ones are written again.
            "journal": self._run.place(),
        }


class Resumption(Callback):
    """Continue a fit from the newest complete checkpoint, including its random state, and discard metrics that were
    written since.

    others: folders of checkpoints in addition to the plan's folder.
    begin: state of another training, from which this one starts; its data may differ.
    fetch: yields checkpoints from remote storage, newest first, for a machine that has none locally.
    """

    def __init__(
        self,
        plan: CheckpointPlan,
        run: Run,
        others: Sequence[Path] = (),
        begin: Path | None = None,
        fetch: Callable[[], Iterator[Path]] = lambda: iter(()),
    ) -> None:
        self._plan = plan
        self._fetch = fetch
        self._run = run
        self._folders = [plan.folder, *others]
        self._begin = begin
        self._from: Snapshot | None = None
        self._mid_epoch = False

    def load(self, state: TrainState) -> int | None:
        """Load the newest complete checkpoint; return its batch, or None if there is none. Every rank must call.

        Raises StageError for a checkpoint of other data or of another architecture.
        """
        for path in whole_checkpoints(self._folders, lambda said: self._run.event("passed_over", said)):
            self.load_from(path, state)
            return batch_of(path)
        for path in self._fetch():
            self.load_from(path, state)
            return batch_of(path)
        if self._begin is not None:
            self.load_from(self._begin, state)
            return batch_of(self._begin)
        self._run.rewind(0, 0)
        return None

    def load_from(self, path: Path, state: TrainState) -> None:
        """Load one checkpoint; its random state is restored at the next batch."""
        snapshot = Snapshot.open(path)
        begins = path == self._begin
        _check(snapshot, state.model, state.optimizer, None if begins else self._plan.data)
        state.optimizer.state.clear()  # a checkpoint from before the first step has no state to replace it
        snapshot.load(state.model, state.optimizer)
        saved = snapshot.state
        state.clock = Clock.from_json(saved["clock"])
        if saved["data"] == self._plan.data:
            state.loader.load_state_dict(saved["dataset"], path)
        else:  # other data are read from their beginning
            state.clock = replace(state.clock, batch_in_epoch=0, sample_in_epoch=0, token_in_epoch=0)
        state.callbacks.load_state_dict(saved["callbacks"])
        if other := _others(saved.get("versions", {})):
            self._run.event(
                "other_versions",
                f"the state after batch {saved['batch']:,} was written by {other}: the training goes on, and ends with "
                "other bits than one by the same versions throughout",
            )
        # Checkpoints of earlier versions have no place; the place of another training refers to another journal.
        self._run.rewind(0 if begins else saved.get("journal"), saved["batch"])
        self._from = snapshot
        self._mid_epoch = state.clock.batch_in_epoch > 0

    def fit_start(self, state: TrainState) -> None:
        self._restore_random_state(state, done=not self._mid_epoch)

    def after_dataloader(self, state: TrainState) -> None:
        # Within an epoch the loader is set up again, which may draw random numbers.
        self._restore_random_state(state, done=True)

    def _restore_random_state(self, state: TrainState, *, done: bool) -> None:
        if self._from is None:
            return
        if not self._from.load_random_state():
            # The number of ranks changed: no state fits, but dropout must not repeat its first draws.
            seed_all(derived_seed(state.seed, state.clock.batch))
        if done:
            self._from = None


def _versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in _PACKAGES}


def _others(versions: Mapping[str, str]) -> str:
    """Versions that differ from the installed ones, such as `torch 2.7.0 (here: 2.15.0)`."""
    here = _versions()
    return ", ".join(
        f"{name} {versions[name]} (here: {here[name]})" for name in here if versions.get(name, here[name]) != here[name]
    )


def _check(snapshot: Snapshot, model: nn.Module, optimizer: Any, data: str | None) -> None:
    """Raise StageError if a checkpoint does not fit. data: the fingerprint that is required; None for any."""
    where = str(snapshot.folder)
    if snapshot.state["format"] != _FORMAT:
        raise stage_error("other_format", where, "the checkpoint is of another version of this program", "remove it")
    if data is not None and snapshot.state["data"] != data:
        raise stage_error(
            "other_data",
            where,
            "the checkpoint was written while training on another data set",
            "give back that data set, or train in an empty work folder",
        )
    saved = {name: shape for name, shape in snapshot.shapes.items() if name.startswith(WEIGHTS)}
    ours = {
        name: tuple(value.shape) for name, value in tensors_of(model, optimizer).items() if name.startswith(WEIGHTS)
    }
    if ranks.hold_parts():
        ours = {name: shape for part in ranks.gather(ours) for name, shape in part.items()}
    if saved == ours:
        return
    name = min(name for name in saved.keys() | ours.keys() if saved.get(name) != ours.get(name))
    in_checkpoint, in_model = (str(list(found[name])) if name in found else "absent" for found in (saved, ours))
    raise StageError(
        Problem(
            "other_architecture",
            where,
            f"the checkpoint is of another architecture: {name.removeprefix(WEIGHTS)} is {in_checkpoint} there, "
            f"{in_model} in this model",
            "give the config that it was written with, or train in an empty work folder"
            if data is not None
            else "give the step the model of the training that it goes on from",
        )
    )
