"""What a stage function gets besides its config and inputs: a place to work, and a voice.

Everything a stage says is appended to one JSON-lines file, one object a line, so that it survives a crash, costs the
training thread microseconds, and can be followed by another process:

    {"kind": "metric", "time": 1763700000.1, "step": 20, "values": {"train/loss": 3.1}}
    {"kind": "progress", "time": …, "done": 20, "total": 500, "unit": "batches", "note": "loss 3.10"}
    {"kind": "event", "time": …, "name": "resumed", "message": "continuing pretrain at batch 1,200 of 5,000", …}
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from infra.errors import Cancelled
from infra.launch.config import LaunchConfig
from infra.secrets import Hider
from infra.workers import Mapper

FLUSH_EVERY_S = 0.5


@dataclass(frozen=True)
class Result:
    """What a stage function returns.

    figures: named numbers that go into the manifest, MLflow and the report, e.g. {"validation_loss": 3.2}.
    headline: the key figure of the stage for the final table, e.g. "validation loss 3.20 (bigram 4.87)".
    """

    figures: Mapping[str, float] = field(default_factory=dict)
    headline: str = ""


class Run:
    """The surroundings of one build of one stage.

    work_dir: a folder that survives crashes; checkpoints and other unfinished work belong there, and a later build of
        the same fingerprint finds them again.
    launch: where and how to run; never part of identity.
    listen: installs the signal handlers behind `cancelled` again, for a library that took them when it was imported.
    mapper: what brings partitions to workers (see `infra.partitions`); None for processes of this machine.
    """

    def __init__(
        self,
        work_dir: Path,
        launch: LaunchConfig | None = None,
        *,
        journal: TextIO | None = None,
        is_cancelled: Callable[[], bool] = lambda: False,
        listen: Callable[[], None] = lambda: None,
        mapper: Mapper | None = None,
    ) -> None:
        self.work_dir = work_dir
        self.mapper = mapper
        self.launch = launch or LaunchConfig()
        self.listen = listen
        self._journal = journal
        self._is_cancelled = is_cancelled
        self._lock = threading.Lock()
        self._flushed_at = 0.0
        self._hider = Hider()
        work_dir.mkdir(parents=True, exist_ok=True)

    @property
    def cancelled(self) -> bool:
        """True once somebody asked the run to stop; long loops look at it and call `stop_if_cancelled`."""
        return self._is_cancelled()

    def stop_if_cancelled(self) -> None:
        """Raises `infra.errors.Cancelled` once somebody asked the run to stop."""
        if self.cancelled:
            raise Cancelled

    def metrics(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Figures of one step, e.g. {"train/loss": 3.1, "train/lr": 6e-4}; `step` counts batches or documents."""
        self._write("metric", step=step, values={name: json_number(value) for name, value in values.items()})

    def metric(self, name: str, value: float, step: int | None = None) -> None:
        self.metrics({name: value}, step)

    def progress(self, done: float, total: float | None, unit: str, note: str = "") -> None:
        """How far the work is: `progress(20, 500, "batches", "loss 3.10")`; total None when it cannot be known."""
        self._write("progress", done=done, total=total, unit=unit, note=note)

    def event(self, name: str, message: str, **fields: Any) -> None:
        """Something a person wants to know: a resume, a correction, a warning. `message` is one plain sentence."""
        self._write("event", flush=True, name=name, message=message, **fields)

    def _write(self, kind: str, *, flush: bool = False, **fields: Any) -> None:
        if self._journal is None:
            return
        now = time.time()
        line = json.dumps({"kind": kind, "time": round(now, 3), **self._hider.hide_in(fields)}, allow_nan=False)
        with self._lock:
            self._journal.write(line + "\n")
            if flush or now - self._flushed_at > FLUSH_EVERY_S:
                self._journal.flush()
                self._flushed_at = now

    def close(self) -> None:
        if self._journal is not None:
            self._journal.flush()


def json_number(value: float) -> float | str:
    """JSON has no NaN or infinity: they are written as the strings that float() reads back."""
    value = float(value)
    return value if math.isfinite(value) else str(value)


def read_journal(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a journal; one that a crash cut short is left out."""
    lines = []
    for line in path.read_text(encoding="utf8").splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return lines


def open_journal(path: Path) -> TextIO:
    """A journal to append to; a line that a crash cut short is ended first."""
    journal = open(path, "a+", encoding="utf8")  # noqa: SIM115 - the caller closes it
    if journal.tell():
        with open(path, "rb") as written:
            written.seek(-1, 2)
            if written.read(1) != b"\n":
                journal.write("\n")
    return journal
