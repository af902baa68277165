"""One build of an artifact, under its lease: the stage in its own process, then the manifest and the commit."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from infra.errors import Cancelled, Problem, StageError, StemmaError, stage_error
from infra.io.sources import Source
from infra.leases.lease import Lease
from infra.ledger.record import TIMES, TimeRecord
from infra.lineage import messages
from infra.lineage.ledger import mlflow_run_id
from infra.project import code_state, lock_hash
from infra.run import read_journal
from infra.store.ancestry import glance_at_ancestry, locate
from infra.store.layout import AUX, RUN_TIMES
from infra.store.manifest import Manifest, SourceRecord, iso_time
from infra.store.store import Store, disk_error
from tasks.building.context import BuildClock, BuildContext
from tasks.building.explain import RECORDED_PACKAGES, BuildRequest, Change, installed_versions
from tasks.building.lineage import end_of, leave_card, shown
from tasks.building.rates import rates_of
from tasks.processes.child import CHECKPOINTS, JOURNAL, ChildOutcome, Job, TrainingMeasurement, note_event
from tasks.processes.supervisor import LOG, lease_lost, run_child
from tasks.stage import STATE, NeedsDisk, Node

LOW_DISK_BYTES = 200_000_000


MEASUREMENT = "measurement"
"""The folder next to an unfinished model for the measurement that its training's process takes of it."""


@dataclass(frozen=True)
class MeasuredModel:
    """The measurement that the process of a training took: its files, and the journal lines written meanwhile."""

    manifest: Manifest
    folder: Path
    outcome: ChildOutcome
    journal: bytes

    @property
    def measured(self) -> TrainingMeasurement:
        assert self.outcome.measured is not None
        return self.outcome.measured


@dataclass
class Build:
    """One build under a lease.

    keep_measurement: called with what was measured of a model, once that is in the store.
    """

    node: Node
    request: BuildRequest
    inputs: Mapping[str, Manifest]
    requires: Mapping[str, Manifest]
    context: BuildContext
    lease: Lease
    clock: BuildClock
    build_id: str = field(default_factory=messages.new_build_id)
    folders: dict[str, Path] = field(default_factory=dict)
    """Folders of the inputs, once they are on this machine."""
    times: TimeRecord | None = None
    """The record of this attempt's time, once it began."""
    keep_measurement: Callable[[MeasuredModel], None] | None = None

    @property
    def store(self) -> Store:
        return self.context.store

    @cached_property
    def work(self) -> Path:
        return self.store.layout.work(self.node.folder, self.request.fingerprint)

    @property
    def scratch(self) -> Path:
        return self.work / "scratch"

    @property
    def unfinished(self) -> Path:
        return self.work / "artifact"

    def run(self, because: Sequence[Change]) -> tuple[Manifest, Path]:
        started = time.time()
        with self._failure_told():
            self._prepare()
            self._send_started(started)
            with self.clock("fetch"):
                self._fetch_inputs()
            self._check_disk()
            queued_at = time.monotonic()
            with self.context.turn(self.node.id):
                self.times = self._begin_times(time.monotonic() - queued_at)
                # A stage that waited for its turn did not work meanwhile. A clock may be set on the way.
                started_at, ticks = time.time(), time.monotonic()
                reasons = "; ".join(map(str, because[:3]))
                self.context.say(self.node.id, {"kind": "building", "time": time.time(), "message": reasons})
                outcome = run_child(
                    self._job(),
                    self.lease,
                    self._pass_on,
                    self.context.is_cancelled,
                    self.context.patience_s,
                    self.context.warm_start,
                )
                self.times.write("kept")
            with self.clock("journal"):
                self._keep_records(self.scratch / JOURNAL)
                shutil.copyfile(self.times.path, self.unfinished / AUX / TIMES)
                TimeRecord(self.unfinished / AUX / TIMES).end("")
                shutil.copyfile(self.scratch / LOG, self.unfinished / AUX / LOG)
            seconds = time.monotonic() - ticks - (outcome.measured.seconds if outcome.measured else 0.0)
            manifest = self._manifest(outcome, started_at, seconds)
            self._check_lease()
            with self.clock("commit"), self.times.waiting("store"):
                manifest, path = self._commit(manifest)
            self._end_times("")
        if outcome.measured and self.keep_measurement:
            journal = (self.scratch / JOURNAL).read_bytes()[outcome.measured.place :]
            self.keep_measurement(MeasuredModel(manifest, self.work / MEASUREMENT, outcome, journal))
        return self._end(manifest, path)

    def take(self, model: MeasuredModel) -> tuple[Manifest, Path]:
        """Commit what the process of the model's training measured, as if a process of this build had."""
        measured = model.measured
        with self._failure_told():
            self._prepare()
            self._send_started(measured.started)
            shutil.copytree(model.folder, self.unfinished, dirs_exist_ok=True)
            (self.scratch / JOURNAL).write_bytes(model.journal)
            self._keep_records(self.scratch / JOURNAL)
            training = f"{model.manifest.stage}/{model.manifest.fingerprint}"
            TimeRecord(self.unfinished / AUX / TIMES).write("within", build=training)
            outcome = replace(model.outcome, figures=measured.figures, headline=measured.headline, measured=None)
            manifest = self._manifest(outcome, measured.started, measured.seconds)
            self._check_lease()
            with self.clock("commit"):
                manifest, path = self._commit(manifest)
        return self._end(manifest, path)

    @contextmanager
    def _failure_told(self) -> Iterator[None]:
        """Report a failure within to the journal and MLflow. Raises StageError for a disk's OSError, which it names."""
        try:
            yield
        except OSError as error:
            disk = disk_error(error, self.node.id, self.work)
            self._end_times(_cause_of(disk))
            self._send_failed(str(disk))
            raise disk from error
        except Exception as error:
            self._end_times(_cause_of(error))
            self._note_end(error)
            self._send_failed(str(error))
            raise

    def _note_end(self, error: Exception) -> None:
        """Records in the journal why this attempt ended. The attempt that continues its work reports all of them."""
        if isinstance(error, StageError) and any(problem.code == "lease_lost" for problem in error.problems):
            return  # another builder writes there now
        name = "cancelled" if isinstance(error, Cancelled) else "failed"
        with suppress(OSError):  # if the disk is full by now, the error itself reports it
            note_event(self.scratch, name, str(error))

    def _begin_times(self, queue_s: float) -> TimeRecord:
        """Begin this attempt in the record of the build's time, which the folder of the run links too: it is kept
        there if the work is removed."""
        times = TimeRecord(self.scratch / TIMES)
        waited = {"lease": self.clock.seconds.get("lease", 0.0), "data": self.clock.seconds.get("fetch", 0.0)}
        attempt = times.begin(
            run=self.context.run_id,
            stage=self.node.id,
            build=f"{self.node.folder}/{self.request.fingerprint}",
            trains=self.node.stage.trains,
            devices=self.context.launch.ranks if self.node.stage.trains else 1,
            waited={**waited, "queue": round(queue_s, 3)},
            rates=rates_of(self.context.launch, self.node.stage),
        )
        times.send_signs()
        run_folder = self.store.layout.runs / self.context.run_id
        if run_folder.is_dir():
            folder = run_folder / RUN_TIMES
            with suppress(OSError):  # a file system without links: the record is that of the artifact alone
                folder.mkdir(exist_ok=True)
                link = folder / f"{self.node.id}.jsonl"
                if link.exists() and not link.samefile(times.path):
                    link = folder / f"{self.node.id}.{attempt}.jsonl"
                if not link.exists():
                    os.link(times.path, link)
        return times

    def _end_times(self, cause: str) -> None:
        """End this attempt in the record, unless another builder writes there by now."""
        if self.times is not None:
            self.times.stop_signs()
            if cause != "lease_lost":
                self.times.end(cause)

    def go_on_with_commit(self) -> tuple[Manifest, Path] | None:
        """End a build that was done but for its upload when it was broken off; None if there is none such."""
        manifest = self.store.unfinished_commit(self.unfinished, self.node.folder, self.request.fingerprint)
        if manifest is None:
            return None
        self.build_id = manifest.build_id
        self.context.event(self.node.id, "upload", f"continuing the upload to {self.store.location(manifest)}")
        self._check_lease()
        return self._end(*self._commit(manifest))

    def _check_lease(self) -> None:
        if not self.lease.still_held():
            raise lease_lost(self.node.id)

    def _check_commit(self) -> None:
        """Check that everything that an artifact descends from still exists: `stemma gc` on another machine may have
        taken this run for dead."""
        self._check_lease()
        self.context.before_commit()
        for needed in (*self.inputs.values(), *self.requires.values()):
            if locate(self.store, needed.as_input()) is None:
                location = self.store.location(needed)
                message = f"{self.node.id} was made from it, but it was removed in the meantime"
                raise stage_error("input_removed", location, message, "run again: only the removed artifact is rebuilt")

    def _commit(self, manifest: Manifest) -> tuple[Manifest, Path]:
        """The artifact in force at the address after the commit. In an object store, another machine may have put it
        there."""
        if self.store.remote is not None:
            size = sum(file.size for file in manifest.files)
            location = self.store.location(manifest)
            self.context.event(self.node.id, "upload", f"uploading {size / 1e6:,.1f} MB to {location}")
        path = self.store.commit(self.unfinished, manifest, self._check_commit, self.context.is_cancelled)
        if self.store.remote is None:
            return manifest, path
        now = self.store.find(manifest.stage, manifest.fingerprint)
        return (manifest if now is None or now.digest == manifest.digest else now), path

    def _end(self, manifest: Manifest, path: Path) -> tuple[Manifest, Path]:
        leave_card(self.node, self.inputs, path, self.context)
        for message in end_of(self.node, self.inputs, manifest, path, self.context):
            self.context.tell(message)
        self._remove_uploads()
        shutil.rmtree(self.work, ignore_errors=True)
        return manifest, path

    def _fetch_inputs(self) -> None:
        """Bring what the stage reads to this machine, where that is on an object store."""
        say, stopped = partial(self.context.event, self.node.id, "download"), self.context.is_cancelled
        told_from = self.node.stage.makes in ("page", "registration")  # of figures and records, without the data
        for name, manifest in self.inputs.items():
            if told_from:
                self.folders[name] = self.store.glance(manifest)
            else:
                state = self.request.inputs[name] if name == STATE else ""
                self.folders[name] = self.store.fetch(manifest, say=say, stopped=stopped, state=state)
        for manifest in self._previous().values():
            self.store.fetch(manifest, say=say, stopped=stopped)
        if registered := self.inputs.get(self.node.stage.registers):  # its card reports where it comes from
            glance_at_ancestry(self.store, (self.store.path(registered), registered))
        if promoted := self.node.promoted:
            record = self.store.read(promoted.paths[0].parent)
            for name, recorded in record.inputs.items() if record else ():
                # The model's own manifest has its figures; it is local once it was looked for.
                if (located := locate(self.store, recorded)) and name != self.node.stage.registers:
                    self.store.fetch(located[1], located[0], say, stopped)

    def _prepare(self) -> None:
        """An empty folder for the result; the scratch folder keeps what an earlier, broken build left."""
        for folder in (self.unfinished, self.work / MEASUREMENT):
            if folder.exists():
                shutil.rmtree(folder)
        (self.unfinished / AUX).mkdir(parents=True)
        if self.keep_measurement:
            (self.work / MEASUREMENT / AUX).mkdir(parents=True)
        self.scratch.mkdir(exist_ok=True)
        self._check_disk()

    def _check_disk(self) -> None:
        """Raise StageError `disk_full` if less is free than the stage needs; what an earlier, broken build left counts
        as written. The stage's config computes the need from its inputs, once they are on this machine."""
        needed = LOW_DISK_BYTES
        if self.folders and isinstance(self.node.config, NeedsDisk):
            written = sum(file.stat().st_size for file in self.scratch.rglob("*") if file.is_file())
            needed += max(0, self.node.config.disk_bytes(self.folders) - written)
        free = shutil.disk_usage(self.work).free
        if free < needed:
            raise StageError(
                Problem(
                    "disk_full",
                    str(self.store.root),
                    f"only {free / 1e6:,.0f} MB are free; {self.node.id} needs at least {needed / 1e6:,.0f} MB",
                    "free some space, or choose another --root",
                )
            )

    def _others(self) -> dict[str, str]:
        """Artifacts that the stage reads in addition to those that the graph gives it."""
        promoted = self.node.promoted
        previous = {name: str(self.store.path(manifest)) for name, manifest in self._previous().items()}
        return {**previous, **({"promoted": str(promoted.paths[0].parent)} if promoted else {})}

    def _previous(self) -> dict[str, Manifest]:
        """The pipeline's last artifact of this step but this one, for a stage that compares itself with it."""
        if not self.node.stage.compares:
            return {}
        others = (
            manifest
            for folder, manifest in self.store.manifests(self.node.folder)
            if folder == self.store.path(manifest)
            and manifest.pipeline == self.context.pipeline
            and manifest.step in ("", self.node.id)
            and manifest.fingerprint != self.request.fingerprint
        )
        newest = max(others, key=lambda manifest: manifest.age_key, default=None)
        return {"previous": newest} if newest else {}

    def _job(self) -> Job:
        return Job(
            node=self.node.id,
            stage=self.node.stage.name,
            config=self.node.config.model_dump(mode="json"),
            launch=self.context.launch.model_dump(mode="json"),
            inputs={**{name: str(folder) for name, folder in self.folders.items()}, **self._others()},
            out=str(self.unfinished),
            scratch=str(self.scratch),
            measurement=str(self.work / MEASUREMENT) if self.keep_measurement else "",
            keeps_memory=self.node.stage.keeps_memory,
            claim=asdict(self.lease.claim),
            checkpoint_place=self._checkpoint_place(),
            answers=str(self.store.layout.answers),
        )

    def _checkpoint_place(self) -> str:
        """The place to which a training's checkpoints are uploaded; empty for none."""
        build = f"{self.node.folder}/{self.request.fingerprint}"
        return self.context.launch.checkpoint_place(build) if self.node.stage.makes_weights else ""

    def _remove_uploads(self) -> None:
        """Remove the uploads of an unfinished training, which are of no use once its artifact exists."""
        location = self._checkpoint_place()
        if not location or not (self.scratch / CHECKPOINTS).exists():
            return
        from infra.io.s3_write import remove_below

        try:
            remove_below(location)
        except StageError as error:
            message = f"the uploaded checkpoints remain in {location}; remove them by hand: {error}"
            self.context.event(self.node.id, "upload_kept", message)

    def _pass_on(self, message: Mapping[str, Any]) -> None:
        if message["kind"] in ("progress", "event", "log"):
            self.context.say(self.node.id, message)

    def _keep_records(self, journal: Path) -> None:
        """Move the journal into aux/, and write its events and metrics to separate files for their readers."""
        aux = self.unfinished / AUX
        aux.mkdir(exist_ok=True)
        lines = read_journal(journal)
        for kind in ("metric", "event"):
            records = [{key: line[key] for key in line if key != "kind"} for line in lines if line["kind"] == kind]
            text = "".join(json.dumps(line) + "\n" for line in records)
            (aux / f"{kind}s.jsonl").write_text(text, encoding="utf8")
        shutil.copyfile(journal, aux / JOURNAL)

    def _manifest(self, outcome: ChildOutcome, started: float, seconds: float) -> Manifest:
        with self.clock("hash"):
            files = self.store.describe_files(self.unfinished)
            records = tuple(self._source_record(source) for source in self.node.sources())
        finished = time.time()
        return Manifest(
            stage=self.node.folder,
            step=self.node.id,
            makes=self.node.stage.makes,
            package=str(self.node.stage.installed or ""),
            version=self.node.stage.version,
            fingerprint=self.request.fingerprint,
            digest=self.store.content_digest(files),
            build_id=self.build_id,
            config=self.node.config.model_dump(mode="json"),
            identity=self.request.identity,
            inputs={
                name: manifest.as_input(self.request.inputs[name] if name == STATE else "")
                for name, manifest in self.inputs.items()
            },
            requires={name: manifest.as_input() for name, manifest in self.requires.items()},
            sources=records,
            files=files,
            result={"figures": outcome.figures, "headline": outcome.headline},
            pipeline=self.context.pipeline,
            run_id=self.context.run_id,
            code=code_state(),
            lock_hash=lock_hash(),
            versions={
                "python": platform.python_version(),
                **installed_versions(RECORDED_PACKAGES),
                **({package.name: package.version} if (package := self.node.stage.installed) else {}),
            },
            host=socket.gethostname(),
            device=outcome.device,
            mlflow_run_id=mlflow_run_id(self.store.root, self.build_id),
            flow_run_id=self.context.flow_run_id or None,
            started=iso_time(started),
            finished=iso_time(finished),
            seconds=round(seconds, 3),
            bookkeeping_s=dict(self.clock.seconds),
        )

    def _source_record(self, source: Source) -> SourceRecord:
        """Raise StageError `source_changed` if the source differs from the one in this build's fingerprint."""
        digest = self.store.hashes.digest(source)
        if digest != self.request.sources.get(source.key):
            raise StageError(
                Problem("source_changed", source.key, "the source changed while it was being read", "run again")
            )
        files = self.store.hashes.source_files(source)
        return SourceRecord(source.key, digest, {str(file): sha for file, sha in files.items()})

    def _send_started(self, started: float) -> None:
        code = code_state()
        self.context.outbox.send(
            messages.StageStarted(
                self.build_id,
                self.context.run_id,
                self.context.pipeline,
                self.node.id,
                self.request.fingerprint,
                started,
                self.node.stage.version,
                self.node.config.model_dump(mode="json"),
                tuple(
                    messages.InputMessage(name, manifest.stage, manifest.digest, manifest.fingerprint)
                    for name, manifest in self.inputs.items()
                ),
                tuple(messages.SourceFile(key, digest) for key, digest in self.request.sources.items()),
                str(code["commit"]),
                bool(code["dirty"]),
                lock_hash(),
                socket.gethostname(),
                self.context.launch.device,
                self.context.flow_run_id,
                self.context.flow_run_url,
            )
        )
        self.context.outbox.send(messages.MetricsFile(self.build_id, str(self.scratch / JOURNAL)))

    def _send_failed(self, error: str) -> None:
        status: messages.Status = "KILLED" if self.context.is_cancelled() else "FAILED"
        finished = messages.StageFinished(
            self.build_id, status, time.time(), artifacts=shown(self.node, self.unfinished), error=error
        )
        self.context.tell(finished)


def _cause_of(error: Exception) -> str:
    """Return the code of an attempt's failure for the record of its time."""
    if isinstance(error, Cancelled):
        return "cancelled"
    problems = error.problems if isinstance(error, StemmaError) else ()
    return problems[0].code if problems else "failed"
