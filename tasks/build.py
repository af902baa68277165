"""The one binding of a domain function to identity, store, leases and lineage: reuse an artifact, or build it.

Nothing here knows Prefect; `tasks.task` puts a Prefect task around it.
"""

from __future__ import annotations

import json
import platform
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from infra.errors import Cancelled, Problem, StageError, stage_error
from infra.identity import canonical, fingerprint
from infra.launch.config import LaunchConfig
from infra.lineage import messages
from infra.lineage.ledger import ended_unheard, mlflow_run_id
from infra.lineage.outbox import Outbox
from infra.lineage.page import pipeline_figures
from infra.process import GRACE_S
from infra.project import code_state, lock_hash
from infra.run import read_journal
from infra.sources import Source
from infra.store.ancestry import glance_at_ancestry, locate
from infra.store.layout import AUX
from infra.store.lease import Holder, Lease
from infra.store.manifest import Manifest, SourceRecord, iso_time
from infra.store.states import STATES, state_at
from infra.store.store import Store, disk_error, is_full
from tasks.adopted import adopted_artifact
from tasks.child import CHECKPOINTS, JOURNAL, Job, Outcome
from tasks.explain import BuildRequest, Change, changes, find
from tasks.promoted import held_against
from tasks.stage import STATE, Node
from tasks.supervisor import LOG, lease_lost, run_child
from tasks.warm_start import WarmStart

RECORDED_PACKAGES = ("torch", "mosaicml", "mosaicml-streaming", "transformers", "tokenizers", "numpy", "lm-eval")
CARD = "MODEL_CARD.md"
REASON_LENGTH = 4000
"""MLflow takes tags of models of 5,000 characters."""
LOW_DISK_BYTES = 200_000_000


@dataclass(frozen=True)
class BuildContext:
    """What all builds of one pipeline run share.

    say: told of each event and progress line, as (node id, message), see `infra.run`.
    """

    store: Store
    pipeline: str
    run_id: str
    flow_run_id: str = ""
    flow_run_url: str = ""
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    read_all: bool = False
    say: Callable[[str, Mapping[str, Any]], None] = lambda node, message: None
    is_cancelled: Callable[[], bool] = lambda: False
    patience_s: Callable[[], float] = lambda: GRACE_S
    """Seconds that a stage has to save and end, once the run is cancelled."""
    turn: Callable[[str], AbstractContextManager[None]] = lambda node: nullcontext()
    """Held while a node's process runs, so that not too many do at once."""
    before_commit: Callable[[], None] = lambda: None
    """Called on an object store before an artifact is put in force, see `infra.store.at_work`."""
    warm_start: WarmStart | None = None
    """What forks the processes of stages; None starts a new one for each."""

    @property
    def outbox(self) -> Outbox:
        return Outbox(self.store.root)

    def tell(self, message: messages.Message) -> None:
        """Sends the end of something, if the disk has room for it; the relay ends what nobody did."""
        try:
            self.outbox.send(message)
        except OSError as error:
            if not is_full(error):
                raise


@dataclass(frozen=True)
class Done:
    """A stage whose artifact is there. `because` says why it was built, empty for one that was reused."""

    status: Literal["built", "reused"]
    manifest: Manifest
    path: Path
    seconds: float
    because: tuple[Change, ...] = ()


def build_request(node: Node, inputs: Mapping[str, Manifest], store: Store) -> BuildRequest:
    """What this node asks for, given its input artifacts. Raises StageError `missing_source`."""
    identity = canonical(node.config, node.key)
    digests = {name: manifest.digest for name, manifest in inputs.items()}
    if STATE in inputs:
        artifact = store.peek(inputs[STATE], STATES)
        digests[STATE] = state_at(artifact, node.inputs[STATE], node.key, node.continues_at()).digest
    sources = {source.key: store.hashes.digest(source) for source in node.sources()}
    name = fingerprint(node.folder, node.stage.version, identity, digests, sources)
    config = node.config.model_dump(mode="json")
    return BuildRequest(node.folder, node.stage.version, identity, digests, sources, name, config, node.key)


def ensure(
    node: Node,
    inputs: Mapping[str, Manifest],
    requires: Mapping[str, Manifest],
    context: BuildContext,
    *,
    force: bool = False,
) -> Done:
    """The artifact of a node: reused if it is there and whole, else built, by us or by whoever holds its lease.

    Raises StageError and the other errors of `infra.errors`; a failed build leaves no artifact.
    """
    begun = time.monotonic()
    store = context.store
    if node.adopted:
        return _reuse(node, adopted_artifact(node, store, read_all=context.read_all), {}, context, begun)
    clock = _Clock()
    with clock("fingerprint"):
        node = held_against(node, inputs, store)
        request = build_request(node, inputs, store)
    because: list[Change] = [Change("forced", "forced")]
    if not force:
        with clock("verify"):
            found, because = _reusable(node, request, context)
        if found:
            return _reuse(node, found, inputs, context, begun)
    key = f"{node.folder}/{request.fingerprint}"
    with clock("lease"):
        lease = store.leases.acquire(
            key,
            on_wait=lambda holder: _say_waiting(node, holder, context),
            on_away=lambda error: _event(context, node.id, "waiting", f"the leases cannot be read, waiting: {error}"),
            stop_if=context.is_cancelled,
        )
    if lease is None:
        raise Cancelled
    try:
        if lease.taken_from is not None:
            _event(context, node.id, "lease_taken", f"taking over from {lease.taken_from}, which is gone")
        if not force:
            # A second look: the artifact may have been finished while we waited for the lease.
            with clock("verify"):
                found, because = _reusable(node, request, context)
            if found:
                return _reuse(node, found, inputs, context, begun)
        build = _Build(node, request, inputs, requires, context, lease, clock)
        manifest, path = (None if force else build.go_on_with_commit()) or build.run(because)
    finally:
        lease.release()
    return Done("built", manifest, path, manifest.seconds, tuple(because))


def _reusable(node: Node, request: BuildRequest, context: BuildContext) -> tuple[Manifest | None, list[Change]]:
    store = context.store
    manifest = find(node, request, store)
    if manifest is None:
        return None, changes(request, (other for _, other in store.manifests(request.stage)))
    differences = store.differences(store.path(manifest), manifest, read_all=context.read_all)
    if not differences:
        return manifest, []
    damage = f"its artifact is damaged: {differences[0]}"
    if len(differences) > 1:
        damage += f" and {len(differences) - 1} more"
    _event(context, node.id, "damaged", f"{damage}; it will be built again")
    return None, [Change("damaged", damage)]


def _reuse(node: Node, manifest: Manifest, inputs: Mapping[str, Manifest], context: BuildContext, begun: float) -> Done:
    path = context.store.path(manifest)
    _leave_card(node, inputs, path, context)
    if not node.adopted and ended_unheard(context.store.root, manifest.build_id):
        # Its builder was killed between the artifact's last rename and these messages; they count once.
        for message in _end_of(node, inputs, manifest, path, context):
            context.outbox.send(message)
    context.outbox.send(
        messages.StageReused(
            context.run_id,
            node.id,
            manifest.fingerprint,
            manifest.digest,
            manifest.build_id,
            time.time(),
        )
    )
    return Done("reused", manifest, path, time.monotonic() - begun)


def _end_of(
    node: Node, inputs: Mapping[str, Manifest], manifest: Manifest, path: Path, context: BuildContext
) -> Iterator[messages.Message]:
    """What lineage hears of a build once its artifact is there; its end comes last, and so stands for all of it."""
    if node.stage.registers:
        model = inputs[node.stage.registers]
        tags = {"stage": model.stage, "pipeline": context.pipeline}
        gates, broken = (int(manifest.result["figures"].get(key, 0)) for key in ("gates", "gates_refused"))
        tags |= {"status": "rejected" if broken else "registered", "gates": f"{gates - broken} kept"}
        if broken:
            tags |= {"gates": f"{broken} of {gates} broken", "reason": str(manifest.result["headline"])[:REASON_LENGTH]}
        of_model = {one.step or one.stage: one for one in inputs.values() if model.digest in _read_by(one)}
        figures = pipeline_figures({name: one.result.get("figures", {}) for name, one in of_model.items()})
        tags |= {name: f"{value:.4g}" for name, value in figures.items()}
        name, note = str(manifest.config["name"]), str(manifest.result["headline"])
        yield messages.RegisterModel(
            model.build_id,
            name,
            str(context.store.fetch(model)),
            model.digest,
            time.time(),
            note,
            tags,
            str(path / CARD),
        )
    kind: Literal["model", "dataset"] = "model" if node.stage.makes_weights else "dataset"
    yield messages.StageFinished(
        manifest.build_id,
        "FINISHED",
        datetime.fromisoformat(manifest.finished).timestamp(),
        manifest.result["figures"],
        manifest.result["headline"],
        messages.Output(node.folder, manifest.digest, manifest.fingerprint, context.store.location(manifest), kind),
        str(path / AUX / JOURNAL),
        _shown(node, path),
    )


def _leave_card(node: Node, inputs: Mapping[str, Manifest], path: Path, context: BuildContext) -> None:
    """Puts the card of a registered model into that model's folder too."""
    if node.stage.registers and (path / CARD).is_file():
        # A full disk, or one of another user's, must not fail a registration.
        with suppress(OSError):
            context.store.put_beside(inputs[node.stage.registers], path / CARD, CARD)


def _read_by(one: Manifest) -> set[str]:
    """The digest of an artifact, and of those that it was made of."""
    return {one.digest, *(given.digest for given in one.inputs.values())}


def _shown(node: Node, folder: Path) -> tuple[str, ...]:
    """The files that a person wants to open: those of a build that failed lie where it worked."""
    return tuple(str(folder / name) for name in node.stage.shows if (folder / name).exists())


def _event(context: BuildContext, node: str, name: str, message: str) -> None:
    context.say(node, {"kind": "event", "time": time.time(), "name": name, "message": message})


def _say_waiting(node: Node, holder: Holder, context: BuildContext) -> None:
    _event(context, node.id, "waiting", f"{holder} is building the same artifact; waiting for it")


class _Clock:
    """Seconds of our own bookkeeping, by what they were spent on."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] = round(self.seconds.get(what, 0.0) + time.perf_counter() - begun, 4)


@dataclass
class _Build:
    """One build under a lease."""

    node: Node
    request: BuildRequest
    inputs: Mapping[str, Manifest]
    requires: Mapping[str, Manifest]
    context: BuildContext
    lease: Lease
    clock: _Clock
    build_id: str = field(default_factory=messages.new_build_id)
    folders: dict[str, Path] = field(default_factory=dict)
    """Of the inputs, once they are here."""

    def run(self, because: Sequence[Change]) -> tuple[Manifest, Path]:
        self.store = self.context.store
        self.work = self.store.layout.work(self.node.folder, self.request.fingerprint)
        self.scratch, self.unfinished = self.work / "scratch", self.work / "artifact"
        started = time.time()
        try:
            self._prepare()
            self._send_started(started)
            with self.clock("fetch"):
                self._fetch_inputs()
            with self.context.turn(self.node.id):
                # A stage that waited for its turn did not work meanwhile. A clock may be set on the way.
                begun, ticks = time.time(), time.monotonic()
                said = "; ".join(map(str, because[:3]))
                self.context.say(self.node.id, {"kind": "building", "time": time.time(), "message": said})
                outcome = run_child(
                    self._job(),
                    self.lease,
                    self._pass_on,
                    self.context.is_cancelled,
                    self.context.patience_s,
                    self.context.warm_start,
                )
            with self.clock("journal"):
                self._keep_records()
            manifest = self._manifest(outcome, begun, ticks)
            self._check_lease()
            with self.clock("commit"):
                manifest, path = self._commit(manifest)
        except OSError as error:
            disk = disk_error(error, self.node.id, self.work)
            self._send_failed(str(disk))
            raise disk from error
        except Exception as error:
            self._send_failed(str(error))
            raise
        return self._end(manifest, path)

    def go_on_with_commit(self) -> tuple[Manifest, Path] | None:
        """Ends a build that was done but for its upload when it was broken off; None if there is none such."""
        self.store = self.context.store
        self.work = self.store.layout.work(self.node.folder, self.request.fingerprint)
        self.scratch, self.unfinished = self.work / "scratch", self.work / "artifact"
        manifest = self.store.unfinished_commit(self.unfinished, self.node.folder, self.request.fingerprint)
        if manifest is None:
            return None
        self.build_id = manifest.build_id
        _event(self.context, self.node.id, "upload", f"continuing the upload to {self.store.location(manifest)}")
        self._check_lease()
        return self._end(*self._commit(manifest))

    def _check_lease(self) -> None:
        if not self.lease.still_held():
            raise lease_lost(self.node.id)

    def _check_commit(self) -> None:
        """What an artifact descends from is to be there as long as it is: `stemma gc` of another machine may have taken
        this run for dead."""
        self._check_lease()
        self.context.before_commit()
        for wanted in (*self.inputs.values(), *self.requires.values()):
            if locate(self.store, wanted.as_input()) is None:
                place = self.store.location(wanted)
                message = f"{self.node.id} was made from it, and it was removed meanwhile"
                raise stage_error("input_removed", place, message, "run again: it is built again, this stage is not")

    def _commit(self, manifest: Manifest) -> tuple[Manifest, Path]:
        """What is in force at the address afterwards: of an object store that may be what another machine put there."""
        if self.store.remote is not None:
            size = sum(file.size for file in manifest.files)
            place = self.store.location(manifest)
            _event(self.context, self.node.id, "upload", f"uploading {size / 1e6:,.1f} MB to {place}")
        path = self.store.commit(self.unfinished, manifest, self._check_commit, self.context.is_cancelled)
        if self.store.remote is None:
            return manifest, path
        now = self.store.find(manifest.stage, manifest.fingerprint)
        return (manifest if now is None or now.digest == manifest.digest else now), path

    def _end(self, manifest: Manifest, path: Path) -> tuple[Manifest, Path]:
        _leave_card(self.node, self.inputs, path, self.context)
        for message in _end_of(self.node, self.inputs, manifest, path, self.context):
            self.context.tell(message)
        self._remove_uploads()
        shutil.rmtree(self.work, ignore_errors=True)
        return manifest, path

    def _fetch_inputs(self) -> None:
        """Brings what the stage reads to this machine, where that is on an object store."""
        say, stopped = partial(_event, self.context, self.node.id, "download"), self.context.is_cancelled
        told_from = self.node.stage.makes in ("page", "registration")  # of figures and records, without the data
        for name, manifest in self.inputs.items():
            if told_from:
                self.folders[name] = self.store.glance(manifest)
            else:
                state = self.request.inputs[name] if name == STATE else ""
                self.folders[name] = self.store.fetch(manifest, say=say, stopped=stopped, state=state)
        for manifest in self._previous().values():
            self.store.fetch(manifest, say=say, stopped=stopped)
        if registered := self.inputs.get(self.node.stage.registers):  # its card tells where it comes from
            glance_at_ancestry(self.store, (self.store.path(registered), registered))
        if promoted := self.node.promoted:
            record = self.store.read(promoted.paths[0].parent)
            for name, wanted in record.inputs.items() if record else ():
                # Of the model itself its manifest tells the figures; it is known here once it was looked for.
                if (found := locate(self.store, wanted)) and name != self.node.stage.registers:
                    self.store.fetch(found[1], found[0], say, stopped)

    def _prepare(self) -> None:
        """An empty folder for the result; the scratch folder keeps what an earlier, broken build left."""
        if self.unfinished.exists():
            shutil.rmtree(self.unfinished)
        (self.unfinished / AUX).mkdir(parents=True)
        self.scratch.mkdir(exist_ok=True)
        free = shutil.disk_usage(self.work).free
        if free < LOW_DISK_BYTES:
            raise StageError(
                Problem(
                    "disk_full",
                    str(self.store.root),
                    f"only {free / 1e6:.0f} MB are free; {self.node.id} needs at least {LOW_DISK_BYTES / 1e6:.0f} MB",
                    "free some space, or choose another --root",
                )
            )

    def _others(self) -> dict[str, str]:
        """Artifacts that the stage reads beside those that the graph gives it."""
        promoted = self.node.promoted
        previous = {name: str(self.store.path(one)) for name, one in self._previous().items()}
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
        newest = max(others, key=lambda one: one.finished, default=None)
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
            keeps_memory=self.node.stage.keeps_memory,
            claim=asdict(self.lease.claim),
            checkpoint_place=self._checkpoint_place(),
        )

    def _checkpoint_place(self) -> str:
        """Where a training's checkpoints are uploaded to; empty for none."""
        build = f"{self.node.folder}/{self.request.fingerprint}"
        return self.context.launch.checkpoint_place(build) if self.node.stage.makes_weights else ""

    def _remove_uploads(self) -> None:
        """What was uploaded of an unfinished training is of no use once its artifact is there."""
        place = self._checkpoint_place()
        if not place or not (self.scratch / CHECKPOINTS).exists():
            return
        from infra.s3_write import remove_below

        try:
            remove_below(place)
        except StageError as error:
            message = f"the uploaded checkpoints stay in {place}; remove them by hand: {error}"
            _event(self.context, self.node.id, "upload_kept", message)

    def _pass_on(self, message: Mapping[str, Any]) -> None:
        if message["kind"] in ("progress", "event", "log"):
            self.context.say(self.node.id, message)

    def _keep_records(self) -> None:
        """What the stage said and printed goes into aux/; events and metrics also apart, for whoever reads them."""
        aux = self.unfinished / AUX
        aux.mkdir(exist_ok=True)
        lines = read_journal(self.scratch / JOURNAL)
        for kind in ("metric", "event"):
            said = [{key: line[key] for key in line if key != "kind"} for line in lines if line["kind"] == kind]
            text = "".join(json.dumps(line) + "\n" for line in said)
            (aux / f"{kind}s.jsonl").write_text(text, encoding="utf8")
        shutil.copyfile(self.scratch / JOURNAL, aux / JOURNAL)
        shutil.copyfile(self.scratch / LOG, aux / LOG)

    def _manifest(self, outcome: Outcome, started: float, ticks: float) -> Manifest:
        with self.clock("hash"):
            files = self.store.describe_files(self.unfinished)
            records = tuple(self._source_record(source) for source in self.node.sources())
        finished = time.time()
        return Manifest(
            stage=self.node.folder,
            step=self.node.id,
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
            versions=_versions(),
            host=socket.gethostname(),
            device=outcome.device,
            mlflow_run_id=mlflow_run_id(self.store.root, self.build_id),
            flow_run_id=self.context.flow_run_id or None,
            started=iso_time(started),
            finished=iso_time(finished),
            seconds=round(time.monotonic() - ticks, 3),
            bookkeeping_s=dict(self.clock.seconds),
        )

    def _source_record(self, source: Source) -> SourceRecord:
        """Raises StageError `source_changed` if it is another than the one that this build is named by."""
        digest = self.store.hashes.digest(source)
        if digest != self.request.sources.get(source.key):
            raise StageError(
                Problem("source_changed", source.key, "the source was changed while it was read", "run again")
            )
        files = self.store.hashes.source_files(source)
        return SourceRecord(source.key, digest, {str(place): sha for place, sha in files.items()})

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
                    messages.Input(name, manifest.stage, manifest.digest, manifest.fingerprint)
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
        shown = _shown(self.node, self.unfinished)
        finished = messages.StageFinished(self.build_id, status, time.time(), artifacts=shown, error=error)
        self.context.tell(finished)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in RECORDED_PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
