"""Environment of a stage function, besides its config and inputs: a work folder, and the journal that it writes to.

All messages of a stage are appended to one JSON-lines file, one object per line. They survive a crash, cost the
training thread microseconds, and can be followed by another process:

    {"kind": "metric", "time": 1763700000.1, "step": 20, "values": {"train/loss": 3.1}}
    {"kind": "progress", "time": …, "done": 20, "total": 500, "unit": "batches", "note": "loss 3.10"}
    {"kind": "event", "time": …, "name": "resumed", "message": "continuing pretrain at batch 1,200 of 5,000", …}

Work that goes back to a checkpoint takes back the metrics that it recorded since, and records them again. Their lines
are changed in place, so that a reader's position in the file stays valid, and a line after them gives the first byte:

    {"kind": "undone", "time": …, "step": 1220, "undone": {"train/loss": 3.1}}
    {"kind": "rewind", "time": …, "place": 81920, "step": 1200}

So every metric has one value per step, and the undone ones can still be read; only samples of the machine, such as
`gpu/0/power_w`, may be taken more than once during a step. Events are never taken back.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from infra.errors import Cancelled
from infra.io.json import parse_own_json
from infra.launch.config import LaunchConfig
from infra.ledger.record import TimeRecord
from infra.process.workers import Mapper
from infra.secrets import Hider

FLUSH_EVERY_S = 0.5
# Of the same length, so that no byte behind them moves.
_UNDONE = ((b'{"kind": "metric"', b'{"kind": "undone"'), (b'"values": {', b'"undone": {'))


@dataclass(frozen=True)
class Result:
    """Result of a stage function.

    figures: named numbers that go into the manifest, MLflow and the report, e.g. {"validation_loss": 3.2}.
    headline: the key figure of the stage for the final table, e.g. "validation loss 3.20 (bigram 4.87)".
    measure: for a training, measures the model while it is in memory: called with an empty folder and the run, in every
        rank. Its figures and files are those of the separate stage that measures such a model.
    """

    figures: Mapping[str, float] = field(default_factory=dict)
    headline: str = ""
    measure: Callable[[Path, Run], Result] | None = None

    def with_measurement(self, out_dir: Path, run: Run) -> Result:
        """Measure the model and return the figures of both; for a training that no pipeline runs."""
        if self.measure is None:
            return self
        measured = self.measure(out_dir, run)
        return Result({**measured.figures, **self.figures}, measured.headline)


class Run:
    """The surroundings of one build of one stage.

    work_dir: a folder that survives crashes; checkpoints and other unfinished work belong there, and a later build of
        the same fingerprint finds them again.
    launch: where and how to run; never part of identity.
    listen: reinstalls the signal handlers behind `cancelled`, for a library that replaced them when it was imported.
    mapper: distributes partitions to workers (see `infra.process.partitions`); None for processes of this machine.
    checkpoint_place: the folder on S3 to which checkpoints of this build are uploaded, and in which they are looked
        up; empty for none.
    times: the record of where the time goes (see `infra.ledger`); None in ranks but the first, and without a pipeline.
    answers_dir: a folder for the answers of endpoints, which all builds of a store share; by default in work_dir.
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
        checkpoint_place: str = "",
        answers_dir: Path | None = None,
        times: TimeRecord | None = None,
    ) -> None:
        self.work_dir = work_dir
        self.times = times
        self.answers_dir = answers_dir or work_dir / "answers"
        self.checkpoint_place = checkpoint_place
        self.mapper = mapper
        self.launch = launch or LaunchConfig()
        self.listen = listen
        self._journal = journal
        self._is_cancelled = is_cancelled
        self._lock = threading.Lock()
        self._flushed_at = 0.0
        self._told = False
        self._step: int | None = None
        self._hider = Hider()
        work_dir.mkdir(parents=True, exist_ok=True)

    @property
    def cancelled(self) -> bool:
        """True once the run was asked to stop; long loops check it and call `stop_if_cancelled`."""
        return self._is_cancelled()

    @property
    def step(self) -> int:
        """The newest step that metrics were recorded for; 0 before the first."""
        return self._step or 0

    def stop_if_cancelled(self) -> None:
        """Raise `infra.errors.Cancelled` once the run was asked to stop."""
        if self.cancelled:
            raise Cancelled

    def metrics(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Record figures of a step, e.g. {"train/loss": 3.1, "train/lr": 6e-4}; `step` counts batches or documents."""
        self._told = True
        self._step = step if step is not None else self._step
        self._write("metric", step=step, values={name: json_number(value) for name, value in values.items()})

    def metric(self, name: str, value: float, step: int | None = None) -> None:
        self.metrics({name: value}, step)

    def progress(self, done: float, total: float | None, unit: str, note: str = "") -> None:
        """Record the progress of the work: `progress(20, 500, "batches", "loss 3.10")`; total None if it is unknown."""
        self._write("progress", done=done, total=total, unit=unit, note=note)

    def event(self, name: str, message: str, **fields: Any) -> None:
        """Record an event of interest to users: a resume, a correction, a warning. `message` is one plain sentence."""
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

    def place(self) -> int | None:
        """Return the bytes of the journal so far, all synced to disk, for a checkpoint to keep; None for a stream."""
        if self._journal is None:
            return None
        with self._lock:
            self._journal.flush()
            if _path_of(self._journal) is None:
                return None
            os.fsync(self._journal.fileno())
            return os.fstat(self._journal.fileno()).st_size

    def rewind(self, position: int | None, step: int) -> None:
        """Take back the metrics recorded after `position`: the work continues from `step`, and will record them again.

        Args:
            position: None takes back those of later steps than `step`, as does a place that is not of this journal.
        """
        if self._journal is None:
            return
        path = _path_of(self._journal)
        if path is not None:
            with self._lock:
                self._journal.flush()
            position = position if position is not None and _is_between_lines(path, position) else None
            self._told = _undo(path, position, step)
        self._step = step
        if self._told:
            self._write("rewind", flush=True, place=position or 0, step=step)
            self._told = False

    def close(self) -> None:
        if self._journal is not None:
            self._journal.flush()


def _path_of(journal: TextIO) -> Path | None:
    """Return the path of a journal's file; None for a stream, such as a terminal's or a log's."""
    try:
        return Path(journal.name) if journal.readable() and journal.seekable() else None
    except (AttributeError, TypeError):
        return None


def _is_between_lines(path: Path, offset: int) -> bool:
    with open(path, "rb") as file:
        file.seek(max(0, offset - 1))
        return offset == 0 or file.read(1) == b"\n"


def _undo(path: Path, start: int | None, step: int) -> bool:
    """Mark the metric lines after `start`, or of later steps, as undone; return True if there were any."""
    changed = False
    with open(path, "r+b") as file:
        offset = file.seek(start or 0)
        for line in file:
            if line.startswith(_UNDONE[0][0]) and _is_undone(line, None if start is not None else step):
                undone = line
                for message, instead in _UNDONE:
                    undone = undone.replace(message, instead, 1)
                os.pwrite(file.fileno(), undone, offset)
                changed = True
            offset += len(line)
        os.fsync(file.fileno())
    return changed


def _is_undone(line: bytes, step: int | None) -> bool:
    try:
        message = parse_own_json(line)["step"]
    except (ValueError, KeyError):
        return False  # a crash cut it short
    return message is not None and (step is None or message > step)


def json_number(value: float) -> float | str:
    """Return a number for JSON. JSON has no NaN or infinity: they become the strings that float() reads back."""
    value = float(value)
    return value if math.isfinite(value) else str(value)


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Return all whole lines of a journal, see `messages_in`."""
    return messages_in(path.read_text(encoding="utf8", errors="replace").splitlines())


def messages_in(lines: Iterable[str | bytes]) -> list[dict[str, Any]]:
    """Return the messages in lines of a journal, without lines that a crash cut short or that are not a journal's."""
    messages = []
    for text in lines:
        try:
            line = parse_own_json(text)
        except ValueError:
            continue
        if isinstance(line, dict) and "kind" in line:
            messages.append(line)
    return messages


def open_journal(path: Path) -> TextIO:
    """Open a journal to append to; a line that a crash cut short is ended first."""
    journal = open(path, "a+", encoding="utf8")  # noqa: SIM115 - the caller closes it
    if journal.tell():
        with open(path, "rb") as written:
            written.seek(-1, 2)
            if written.read(1) != b"\n":
                journal.write("\n")
    return journal
