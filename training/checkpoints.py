"""Checkpoints in the work folder: whole or absent, the newest two kept."""

from __future__ import annotations

import os
import re
from pathlib import Path

from composer.core import Callback, Event, State, TimeUnit
from composer.loggers import Logger
from composer.utils import checkpoint, reproducibility

_NAME = re.compile(r"ba(\d+)\.pt")
_KEPT = 2


def newest(folder: Path) -> Path | None:
    """The newest whole checkpoint; what a killed writer left half done has another name."""
    found = [path for path in folder.glob("*.pt") if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    return max(found, key=batch_of, default=None)


def batch_of(path: Path) -> int:
    """Batches that were done when a checkpoint was written."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


class Checkpointer(Callback):
    """Writes a checkpoint every so many batches: to the side, then renamed.

    unit: epochs where the loader can only continue at an epoch's start.
    """

    def __init__(self, folder: Path, every: int, unit: TimeUnit = TimeUnit.BATCH) -> None:
        self._folder = folder
        self._every = every
        self._unit = unit
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob("*.tmp*"):
            leftover.unlink()

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        wanted = Event.BATCH_CHECKPOINT if self._unit == TimeUnit.BATCH else Event.EPOCH_CHECKPOINT
        if event == wanted and state.timestamp.get(self._unit).value % self._every == 0:
            self._write(state)

    def _write(self, state: State) -> None:
        batch = state.timestamp.batch.value
        unfinished = self._folder / "unfinished.tmp.pt"
        checkpoint.save_checkpoint(state, str(unfinished))
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(self._folder / f"ba{batch:09}.pt")
        for old in sorted(self._folder.glob("ba*.pt"), key=batch_of)[:-_KEPT]:
            old.unlink()


class RandomStateAfterResume(Callback):
    """Puts back the random state of a checkpoint taken within an epoch, which Composer 0.32 forgets.

    Composer restores it at an epoch's first batch, or in a branch that it skips for datasets that resume themselves
    (`Trainer._train_loop`). `saved` is what it loaded and did not use.
    """

    def __init__(self) -> None:
        self.saved: list[dict[str, object]] | None = None

    def after_dataloader(self, state: State, logger: Logger) -> None:
        if self.saved is not None:
            reproducibility.load_rng_state(self.saved)
            self.saved = None
