"""Progress of a pipeline run, in a folder of the store, for its followers: <root>/runs/<run id>/.

journal.jsonl   a line for each change of a stage's status, each progress line and each event
times/          the record of each stage that it builds, see `infra.ledger`
ledger.json     what it cost, once it ended, see `flows.runs.ledger`
picture.json    the boxes and arrows of its pipeline, see `evaluation.pages.pipeline.Drawing`
result.json     how it ended; the document that `stemma run --json` prints
trial.json      of which sweep it is a trial; not there for other runs
keep            a person asked it to save what its stages have and to end; not there otherwise
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Literal

from flows.runs.journal_forms import READS, fault_of_result, is_line
from infra.errors import Problem
from infra.io.json import parse_own_json, read_own_json
from infra.io.tables import damaged, read_state
from infra.process.lifetime import start_ticks, this_machine
from infra.run import read_journal
from infra.store.manifest import Manifest
from infra.store.store import is_of_the_disk

PICTURE = "picture.json"

PIPELINE = "pipeline"
"""The deployment of a whole pipeline: `<pipeline>/pipeline`."""

PRIVATE = "STEMMA_PRIVATE_SERVER"
"""Set in the environment of a run whose Prefect server goes when it ends, and so has no page to link to."""

_LOST = "delete its folder: the run is then forgotten, and `stemma gc` may remove artifacts that only it used"

Status = Literal["waiting", "running", "built", "reused", "failed", "skipped", "cancelled"]


@dataclass(frozen=True)
class JournalRow:
    """One stage of a run, as `stages` in the command contract shows it."""

    stage: str
    status: Status
    fingerprint: str | None = None
    digest: str | None = None
    path: str | None = None
    seconds: float | None = None
    headline: str = ""
    because: tuple[str, ...] = ()
    build_id: str | None = None
    mlflow_run_id: str | None = None
    bookkeeping_s: Mapping[str, float] = field(default_factory=dict)


RESERVED_BYTES = 1_000_000


class ReservedSpace:
    """A file of RESERVED_BYTES that is removed when the disk is full, so that the failure can still be recorded."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def take(self) -> None:
        """Raise OSError if there is no room for it."""
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, RESERVED_BYTES)
        finally:
            os.close(descriptor)

    def release(self) -> None:
        self._path.unlink(missing_ok=True)


class RunJournal:
    """The folder of one pipeline run. Writing is safe from several threads."""

    _unwritten: ClassVar[dict[Path, dict[str, Any]]] = {}
    """Results that could not be written, by the folder of their run. All journals of this process return them."""

    def __init__(self, runs: Path, run_id: str) -> None:
        self.run_id = run_id
        self.folder = runs / run_id
        self.path = self.folder / "journal.jsonl"
        self.rows: dict[str, JournalRow] = {}
        self._lock = threading.Lock()
        self._keep = self.folder / "keep"
        self._reserved = ReservedSpace(self.folder / "reserved")

    def make_trial(self, **facts: str) -> None:
        """Record that a run that is about to begin is a trial of a sweep: `pipeline` is its name in the journal,
        so that it is taken for no run of the config's own; `name` and `sweep_build_id` are for MLflow."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "trial.json").write_text(json.dumps(facts), encoding="utf8")

    def trial(self) -> dict[str, str] | None:
        """The facts that `make_trial` wrote; None for a run that is no trial."""
        try:
            trial: dict[str, str] = read_own_json(self.folder / "trial.json")
        except FileNotFoundError:
            return None
        return trial

    def begin(self, **facts: Any) -> None:
        """A new run, or a retry of one: what it is about."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "result.json").unlink(missing_ok=True)
        self._keep.unlink(missing_ok=True)
        self._unwritten.pop(self.folder.absolute(), None)
        self._reserved.take()
        process = {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid()), "machine": this_machine()}
        self._write({"kind": "begin", **process, **facts})

    def ask_to_keep(self) -> None:
        """Ask the run to save what its stages have, and to end."""
        self._keep.touch()

    def is_to_keep(self) -> bool:
        """True once that was asked of this attempt."""
        return self._keep.exists()

    def row(self, row: JournalRow) -> None:
        """The new status of a stage."""
        self.rows[row.stage] = row
        self._write({"kind": "stage", **asdict(row)})

    def reads(self, artifacts: Iterable[Manifest]) -> None:
        """Record the artifacts of earlier runs that a run of a part of its pipeline reads: `stemma gc` spares them
        while the run goes on."""
        inputs = [asdict(manifest.as_input()) for manifest in artifacts]
        if inputs:
            self._write({"kind": READS, "artifacts": inputs})

    def message(self, stage: str, message: Mapping[str, Any]) -> None:
        """A progress line or an event of a stage, see `infra.run`."""
        self._write({**message, "stage": stage})

    def traceback(self, stage: str, text: str) -> None:
        """The traceback of an unexpected exception, for `--debug` and for debugging."""
        self._write({"kind": "traceback", "stage": stage, "text": text})

    def end(self, document: Mapping[str, Any]) -> bool:
        """Write the run's end: whole, and last. Return False if it cannot be written: only this process knows it."""
        with suppress(OSError):
            self._reserved.release()
        hidden = self.folder / ".result.json"
        try:
            hidden.write_text(json.dumps(document, indent=1), encoding="utf8")
            hidden.rename(self.folder / "result.json")
        except OSError:
            self._unwritten[self.folder.absolute()] = dict(document)
            return False
        self._unwritten.pop(self.folder.absolute(), None)
        self._write({"kind": "end", "status": document["status"]})
        return True

    def start_record(self) -> dict[str, Any]:
        """The facts of the run's beginning: its first line, empty if there is none."""
        try:
            with open(self.path, "rb") as file:
                line = parse_own_json(file.readline())
        except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
            return {}
        return line if isinstance(line, dict) and is_line(line) else {}

    def lost_beginning(self) -> Problem | None:
        """The problem of a run that produced something but whose owner cannot be read, as after a power cut. A run that
        was killed while it wrote its first line produced nothing."""
        if "pipeline" in self.start_record():
            return None
        try:
            with open(self.path, "rb") as file:
                line = file.readline()
        except (FileNotFoundError, NotADirectoryError):
            line = b""
        if not (line.endswith(b"\n") or b"\0" in line or (self.folder / "result.json").is_file()):
            return None
        message = (
            "its first line cannot be read, so the artifacts that the newest run of its pipeline needs are unknown"
        )
        return Problem("damaged_state", str(self.path), message, _LOST)

    def works(self) -> bool:
        """True while the process that runs it lives on this machine; processes of other machines are unknown."""
        return self.process() is not None

    def has_died(self) -> bool:
        """True where it began on this machine, and the process that ran it is gone."""
        return self._begun_here() is not None and not self.works()

    def process(self) -> int | None:
        """The process that runs it, while that lives on this machine."""
        last = self._begun_here() or {"pid": 0}
        started = start_ticks(last.get("pid", 0))
        return last["pid"] if started is not None and last.get("start_ticks", started) == started else None

    def living_process(self) -> tuple[int, int] | None:
        """The number and the start of that process, by which `start_ticks` recognises it."""
        pid = self.process()
        started = start_ticks(pid) if pid is not None else None
        return (pid, started) if pid is not None and started is not None else None

    def _begun_here(self) -> dict[str, Any] | None:
        """The record of its last beginning, if that was on this machine."""
        last = next((line for line in reversed(self.read()) if line["kind"] == "begin"), None)
        return last if last and last.get("machine", this_machine()) == this_machine() else None

    def result(self) -> dict[str, Any] | None:
        """The run's final document, None while it goes on. Raises StageError `damaged_state`."""
        path = self.folder / "result.json"
        unwritten = self._unwritten.get(self.folder.absolute())
        result = unwritten or read_state(path, _LOST, None)
        if result is not None and (fault := fault_of_result(result)):
            raise damaged(path, fault, _LOST)
        return result

    def read(self) -> list[dict[str, Any]]:
        """The lines of the run, without those that a crash cut short or that no run writes; none of a forgotten one."""
        try:
            return [line for line in read_journal(self.path) if is_line(line)]
        except FileNotFoundError:
            return []

    def _write(self, line: Mapping[str, Any]) -> None:
        stamp = {"time": round(time.time(), 3), "ticks": round(time.monotonic(), 3)}  # a clock may be set
        text = json.dumps({**stamp, **line}) + "\n"
        with self._lock:
            try:
                self._append(text)
            except OSError as error:
                if not is_of_the_disk(error):
                    raise
                # Lines that still cannot be written are kept by this process, and reported at the end.
                with suppress(OSError):
                    self._reserved.release()
                    self._append(text)

    def _append(self, text: str) -> None:
        """Add a whole line or nothing."""
        before = self.path.stat().st_size if self.path.exists() else 0
        try:
            with open(self.path, "a", encoding="utf8") as file:
                file.write(text)
        except OSError:
            if self.path.exists():
                os.truncate(self.path, before)
            raise


def new_run_id() -> str:
    """Return a unique id, sortable by time to the microsecond: 20261121-071500-123456-1f2e3d."""
    now = datetime.now(UTC)
    return f"{now:%Y%m%d-%H%M%S-%f}-{uuid.uuid4().hex[:6]}"


def latest(runs: Path, pipeline: str) -> Iterator[RunJournal]:
    """The runs of a pipeline, newest first."""
    folders = sorted(runs.iterdir(), reverse=True) if runs.is_dir() else []
    for folder in folders:
        journal = RunJournal(runs, folder.name)
        if any(line["kind"] == "begin" and line.get("pipeline") == pipeline for line in journal.read()[:1]):
            yield journal
