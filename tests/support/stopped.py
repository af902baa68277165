"""Runs that receive a stop request at a given batch."""

from typing import Any

from infra.run import Run


class StoppedAt(Run):
    """Receives a stop request at a batch."""

    def __init__(self, batch: int, run: Run) -> None:
        super().__init__(run.work_dir, run.launch)
        self._batch, self._done = batch, 0

    def metrics(self, values: Any, step: int | None = None) -> None:
        self._done = step or 0

    @property
    def cancelled(self) -> bool:
        return self._done >= self._batch
