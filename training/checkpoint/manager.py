"""Checkpoints of one training: when they are written, where they are kept, and from which one a training continues.

<work folder>/checkpoints/    from these a training continues that was stopped, on another machine from their uploads
<work folder>/rollback/       to these the guard goes back; one is from before the first batch
<work folder>/states/         these stay with the finished model, by `keep_state`
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from torch import nn

from evaluation.generation.random_state import seed_all
from infra.config import derived_seed
from infra.errors import Cancelled, Problem, StageError, stage_error
from infra.run import Run
from infra.store.states import KeptState, state_name
from training.checkpoint.folder import batch_of, checkpoints, drop_after, retain, whole_checkpoints, write
from training.checkpoint.remote import CHECKPOINTS, ROLLBACK, STATES, fetch_checkpoints
from training.checkpoint.snapshot import STATE, WEIGHTS, Snapshot, holders_of, tensors_of, write_rank
from training.checkpoint.upload import Uploader, check_remote
from training.config import KeepEvery, TrainerConfig
from training.core import ranks
from training.core.callbacks import Callback
from training.core.train_state import Clock, TrainState
from training.guard.corrections import FILE as CORRECTIONS
from training.guard.corrections import Corrections

_FORMAT = 1
_PACKAGES = ("torch", "transformers", "numpy")
"""Packages whose versions affect the bits of a step."""
_ROLLBACK_KEPT = 3


@dataclass(frozen=True)
class _Series:
    """Checkpoints in one folder.

    every: batches between two checkpoints. keep: number of newest checkpoints to keep; older ones are kept too while
    they are younger than `keep_hours`.
    """

    folder: Path
    every: int
    keep: int
    keep_hours: float = 0.0


class CheckpointManager(Callback):
    """All checkpoints of one training, in its work folder and on S3.

    As the last callback of a training it writes checkpoints when they are due, and one when the run is cancelled or
    the last batch is done. `resume` loads the newest one, `kept` lists those that stay with the artifact.
    """

    def __init__(
        self,
        stage: str,
        config: TrainerConfig,
        run: Run,
        *,
        data: str,
        batches: int,
        to_batches: Callable[[str], int],
        corrections: Corrections,
        begin: KeptState | None = None,
    ) -> None:
        """Raise StageError if checkpoints cannot be uploaded; every rank must call.

        Args:
            data: fingerprint of the training data; a checkpoint of other data is refused.
            batches: batches of the whole training.
            to_batches: converts a length of the config to batches.
            corrections: the guard's; they are part of the history that a checkpoint belongs to.
            begin: state of another training from which this one starts; its data may differ.
        """
        self._stage, self._run, self._data, self._batches = stage, run, data, batches
        self._corrections = corrections
        self._begin = begin
        work, keep, keep_hours = run.work_dir, config.keep_checkpoints, config.keep_checkpoints_hours
        self._resumable = _Series(work / CHECKPOINTS, to_batches(config.checkpoint_every), keep, keep_hours)
        self._rollback = _Series(work / ROLLBACK, config.guard.rollback_every, _ROLLBACK_KEPT)
        self._guarded = config.guard.enabled
        self._keep_state = config.keep_state
        every = to_batches(config.keep_state.every) if isinstance(config.keep_state, KeepEvery) else 0
        self._states = _Series(work / STATES, every, batches, keep_hours)
        self._uploader: Uploader | None = None
        if remote := run.checkpoint_place:
            check_remote(remote, work, lambda message: run.event("upload_failed", message))
            self._uploader = Uploader(remote, keep, keep_hours, run, [work / CORRECTIONS])
        self.newest = 0
        """Batch of the newest checkpoint that was written or loaded."""
        self._restored: Snapshot | None = None
        """The loaded checkpoint, until its random state is restored."""

    # When checkpoints are written

    def fit_start(self, state: TrainState) -> None:
        self._restore_random_state(state)
        if not state.clock.batch_in_epoch:
            self._restored = None
        if self._guarded and state.clock.batch == 0:
            # A machine that replaces this one must be able to go back to it as well.
            self._upload(self.save(self._rollback, state), must=True)

    def after_dataloader(self, state: TrainState) -> None:
        # Within an epoch the loader is set up again before its first batch, which may draw random numbers.
        self._restore_random_state(state)
        self._restored = None

    def batch_checkpoint(self, state: TrainState) -> None:
        """Write the checkpoints that are due after a batch. Raises Cancelled once the run is cancelled."""
        batch = state.clock.batch
        if self._guarded and batch % self._rollback.every == 0:
            self.save(self._rollback, state)
        if self._states.every and batch % self._states.every == 0:
            # None of them may be missing at the end.
            self._upload(self.save(self._states, state), must=True)
        cancelled = ranks.any_rank(self._run.cancelled)
        # Work after the last batch can fail and be repeated without the training.
        is_last = batch == self._batches
        if cancelled or is_last or batch % self._resumable.every == 0:
            self._upload(self.save(self._resumable, state), must=cancelled or is_last)
        if cancelled:
            raise Cancelled

    # What a checkpoint contains

    def save(self, series: _Series, state: TrainState) -> Path:
        """Write a checkpoint of the current state and remove outdated ones; every rank must call."""
        tensors = tensors_of(state.model, state.optimizer)
        holders = holders_of(tensors)

        def files(folder: Path) -> list[Path]:
            written = write_rank(folder, tensors, holders)
            if ranks.is_first():
                (folder / STATE).write_text(json.dumps(self._state(state)), encoding="utf8")
                written += [folder / STATE, *state.loader.write(folder)]
            return written

        path = write(series.folder, state.clock.batch, files)
        self.newest = state.clock.batch
        if ranks.is_first():
            retain(series.folder, series.keep, series.keep_hours, first=series is self._rollback)
        return path

    def _state(self, state: TrainState) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "batch": state.clock.batch,
            "ranks": ranks.world_size(),
            "versions": _versions(),
            "data": self._data,
            "clock": state.clock.as_json(),
            "dataset": state.loader.state_dict(state.clock.sample_in_epoch),
            "callbacks": state.callbacks.state_dict(),
            # Metrics up to here are kept on a resume; later ones are written again.
            "journal": self._run.place(),
        }

    # Where it goes besides the work folder

    def _upload(self, path: Path, *, must: bool) -> None:
        if self._uploader:
            self._uploader.offer(path, must=must)

    def finish(self, seconds: float) -> None:
        """Wait until everything is uploaded, for at most `seconds`; every rank must call."""
        if self._uploader:
            self._uploader.finish(seconds)

    def close(self) -> None:
        """Stop uploading, even during an upload."""
        if self._uploader:
            self._uploader.stop()

    def kept(self, batch: int) -> list[Path]:
        """Checkpoints to keep with the artifact of a training that ended at `batch`, by `config.keep_state`."""
        if self._keep_state == "none":
            return []
        # A training that ended early may have no checkpoint of its last batch.
        last = self._resumable.folder / state_name(batch)
        paths = (*checkpoints(self._states.folder), last)
        return [*{batch_of(path): path for path in paths if path.exists()}.values()]

    # From which one a training continues

    def resume(self, state: TrainState) -> None:
        """Load the newest whole checkpoint that the guard's corrections leave valid, and discard metrics that were
        written since. Without one, the training begins at its first batch. Every rank must call.

        Raises StageError for a checkpoint of other data or of another architecture, and `no_way_back` if a correction
        has no checkpoint to go back to.
        """
        corrections = self._corrections
        # Checkpoints of batches that the guard's last correction goes back on are void, uploaded ones too.
        if corrections.unfinished:
            batch = corrections.made[-1].back_to
            for series in (self._resumable, self._rollback, self._states):
                drop_after(series.folder, batch)
            if self._uploader:
                self._uploader.drop_after(batch)
            corrections.finish()
        path = next(self._candidates(), None)
        if path is not None:
            self._load(path, state)
        else:
            self._run.rewind(0, 0)
            if state.clock.batch:
                raise stage_error(
                    "no_way_back",
                    str(self._run.work_dir),
                    f"expected a checkpoint from before batch {corrections.made[-1].back_to + 1:,} to go back to",
                    "run again: training starts from the beginning, with the guard's correction",
                )
        if batch := state.clock.batch:
            self._run.event("continued", f"continuing {self._stage} at batch {batch:,} of {self._batches:,}")

    def _candidates(self) -> Iterator[Path]:
        """Yield whole checkpoints from which this training could continue, best first; damaged ones are reported."""

        def report(message: str) -> None:
            self._run.event("passed_over", message)

        # This machine's.
        yield from whole_checkpoints([self._resumable.folder, self._rollback.folder], report)
        # Uploaded ones that match the guard's corrections, each fetched when it is asked for.
        if remote := self._run.checkpoint_place:
            for path in fetch_checkpoints(remote, self._run.work_dir, report):
                batch = batch_of(path)
                if self._corrections.adopt(path / CORRECTIONS, batch):
                    self._run.event("fetched", f"the checkpoint of batch {batch:,} was fetched from {remote}")
                    yield path
                    continue
                report(f"passing over the uploaded checkpoint of batch {batch:,}: it is from before a correction")
                if ranks.is_first():
                    shutil.rmtree(path, ignore_errors=True)
                ranks.wait_for_all()
        # The state of another training, which was checked when it was found.
        if self._begin is not None:
            yield self._begin.folder

    def _load(self, path: Path, state: TrainState) -> None:
        """Load one checkpoint; its random state is restored at the next batch."""
        snapshot = Snapshot.open(path)
        begins = self._begin is not None and path == self._begin.folder
        _check(snapshot, state.model, state.optimizer, None if begins else self._data)
        state.optimizer.state.clear()  # a checkpoint from before the first step has no state to replace it
        snapshot.load(state.model, state.optimizer)
        saved = snapshot.state
        state.clock = Clock.from_json(saved["clock"])
        self.newest = state.clock.batch
        if saved["data"] == self._data:
            state.loader.load_state_dict(saved["dataset"], path)
        else:  # other data are read from their beginning
            state.clock = replace(state.clock, batch_in_epoch=0, sample_in_epoch=0, token_in_epoch=0)
        state.callbacks.load_state_dict(saved["callbacks"])
        if other := _other_versions(saved.get("versions", {})):
            self._run.event(
                "other_versions",
                f"the state after batch {saved['batch']:,} was written by {other}: training continues, but the result "
                "is not bit-identical to a run with the same versions throughout",
            )
        # Checkpoints of earlier versions have no place; the place of another training refers to another journal.
        self._run.rewind(0 if begins else saved.get("journal"), saved["batch"])
        self._restored = snapshot

    def _restore_random_state(self, state: TrainState) -> None:
        if self._restored is None:
            return
        if not self._restored.load_random_state():
            # The number of ranks changed: no state fits, but dropout must not repeat its first draws.
            seed_all(derived_seed(state.seed, state.clock.batch))


def _versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in _PACKAGES}


def _other_versions(versions: Mapping[str, str]) -> str:
    """Versions that differ from the installed ones, such as `torch 2.7.0 (here: 2.15.0)`."""
    here = _versions()
    return ", ".join(
        f"{name} {versions[name]} (here: {here[name]})" for name in here if versions.get(name, here[name]) != here[name]
    )


def _check(snapshot: Snapshot, model: nn.Module, optimizer: Any, data: str | None) -> None:
    """Raise StageError if a checkpoint does not fit.

    Args:
        data: the fingerprint that is required; None for any.
    """
    where = str(snapshot.folder)
    if snapshot.state["format"] != _FORMAT:
        raise stage_error("other_format", where, "the checkpoint is from another version of this program", "remove it")
    if data is not None and snapshot.state["data"] != data:
        raise stage_error(
            "other_data",
            where,
            "the checkpoint was written while training on another data set",
            "restore that data set, or train in an empty work folder",
        )
    saved = {name: shape for name, shape in snapshot.shapes.items() if name.startswith(WEIGHTS)}
    current = {
        name: tuple(value.shape) for name, value in tensors_of(model, optimizer).items() if name.startswith(WEIGHTS)
    }
    if ranks.hold_parts():
        current = {name: shape for part in ranks.gather(current) for name, shape in part.items()}
    if saved == current:
        return
    name = min(name for name in saved.keys() | current.keys() if saved.get(name) != current.get(name))
    in_checkpoint, in_model = (str(list(shapes[name])) if name in shapes else "absent" for shapes in (saved, current))
    raise StageError(
        Problem(
            "other_architecture",
            where,
            f"the checkpoint has another architecture: {name.removeprefix(WEIGHTS)} is {in_checkpoint} there, "
            f"{in_model} in this model",
            "give the config that it was written with, or train in an empty work folder"
            if data is not None
            else "give the step the model of the training that it continues",
        )
    )
