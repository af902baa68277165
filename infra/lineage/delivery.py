"""Turns messages into MLflow runs, metrics, datasets and models. Everything here may be done twice and counts once."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import mlflow
from mlflow import MlflowClient
from mlflow.entities import (
    Dataset,
    DatasetInput,
    Experiment,
    InputTag,
    LoggedModelInput,
    LoggedModelOutput,
    Metric,
    Param,
    RunTag,
    ViewType,
)
from mlflow.exceptions import MlflowException

from infra.lineage import page
from infra.lineage.artifact_files import artifact_folder, put_copies, put_links
from infra.lineage.ledger import DeliveredRun, Ledger
from infra.lineage.messages import (
    Input,
    Message,
    MetricsFile,
    Output,
    PipelineFinished,
    PipelineStarted,
    RegisterModel,
    StageFinished,
    StageReused,
    StageStarted,
)
from infra.lineage.metrics import Line, Point, delete_points, read_lines, undone_lines
from infra.lineage.migrations import prepare
from infra.lineage.tracking import database_uri, exclusive

METRICS_A_BATCH = 1000
PARAMS_A_BATCH = 100
SOURCES_SHOWN = 100
DIGEST_LENGTH = 32
VERSIONS_TAG = "mlflow.modelVersions"

log = logging.getLogger("stemma.relay")


class UnknownBuild(LookupError):
    """A message is about a build whose start was never delivered."""


class Delivery:
    """One connection to a tracking store, through its server or straight on its database.

    Raises what `migrations.prepare` raises where it goes straight.
    """

    def __init__(self, root: Path, uri: str, ledger: Ledger) -> None:
        self._root = root
        self._ledger = ledger
        self._experiments: dict[str, str] = {}
        # The registry looks logged models up at the global address, whatever its client was told.
        mlflow.set_tracking_uri(uri)
        if uri == database_uri(root):
            prepare(root)
            with exclusive(root):
                self._client = MlflowClient(uri, registry_uri=uri)
                self._client.search_experiments(max_results=1)
        else:
            self._client = MlflowClient(uri, registry_uri=uri)

    def deliver(self, message: Message, sender: Mapping[str, Any]) -> None:
        """Raises UnknownBuild, MlflowException, or an OSError for files that cannot be read."""
        match message:
            case PipelineStarted():
                self._pipeline_started(message, sender)
            case StageStarted():
                self._stage_started(message, sender)
            case MetricsFile():
                self._ledger.follow(message.build_id, message.path)
            case StageFinished():
                self._stage_finished(message)
            case StageReused():
                self._stage_reused(message)
            case PipelineFinished():
                self._pipeline_finished(message)
            case RegisterModel():
                self._register(message)
            case _:
                raise TypeError(f"no delivery for {type(message).__name__}")

    def follow_metrics(self) -> None:
        """Sends what was written to the followed files since the last call."""
        for build_id, path, offset in self._ledger.tails():
            run = self._ledger.run(build_id)
            if run and Path(path).exists():
                self._send_lines(run, Path(path), offset, follow=True)

    def end_abandoned(self, run: DeliveredRun) -> None:
        """Marks a run whose process died without a word."""
        now = time.time()
        note = "its process ended without saying so"
        if run.about["kind"] == StageStarted.kind:
            self._stage_finished(StageFinished(run.build_id, "KILLED", now, error=note))
        else:
            self._pipeline_finished(PipelineFinished(run.build_id, "KILLED", now, error=note))

    def _pipeline_started(self, message: PipelineStarted, sender: Mapping[str, Any]) -> None:
        experiment_id = self._experiment(message.pipeline)
        tags = page.pipeline_tags(message)
        run = self._make_run(message, "", experiment_id, page.pipeline_name(message), message.time, tags, sender)
        self._log_params(run.run_id, message.config)
        self._describe_pipeline(run)

    def _stage_started(self, message: StageStarted, sender: Mapping[str, Any]) -> None:
        experiment_id = self._experiment(message.pipeline)
        tags = page.stage_tags(message)
        parent = self._ledger.run(message.parent_id)
        if parent:
            tags["mlflow.parentRunId"] = parent.run_id
        name = page.stage_name(message)
        run = self._make_run(message, message.parent_id, experiment_id, name, message.time, tags, sender)
        self._log_params(run.run_id, message.config)
        self._log_inputs(run, message)
        self._note(run.run_id, page.stage_note(run.about, self._path(parent), None))
        self._ledger.set_row(
            message.parent_id, message.stage, outcome="building", build_id=message.build_id, time=message.time
        )
        self._describe_parent(message.parent_id)

    def _stage_finished(self, message: StageFinished) -> None:
        run = self._known(message.build_id)
        self._send_last_metrics(run, message)
        at_ms = _ms(message.time)
        self._log_metrics(run.run_id, [Metric(name, value, at_ms, 0) for name, value in message.figures.items()])
        if message.output:
            self._log_output(run, message.output)
        put_copies(message.artifacts, self._folder(run))
        if message.error:
            self._client.set_tag(run.run_id, "stemma.error", message.error[: page.MAX_VALUE])
        self._note(run.run_id, page.stage_note(run.about, self._path(self._ledger.run(run.parent_id)), message))
        self._client.set_terminated(run.run_id, message.status, at_ms)
        self._delete_twins(run)
        outcome = {"FINISHED": "built", "FAILED": "failed", "KILLED": "cancelled"}[message.status]
        seconds = message.time - float(run.about["time"])
        headline = message.headline or message.error
        self._ledger.set_row(run.parent_id, run.about["stage"], outcome=outcome, headline=headline, seconds=seconds)
        self._ledger.ended(run.build_id)
        self._describe_parent(run.parent_id)

    def _stage_reused(self, message: StageReused) -> None:
        parent = self._known(message.build_id)
        builder = self._find(message.built_by)
        built_by = f"run {builder.run_id}" if builder else f"build {message.built_by}"
        text = f"{message.fingerprint} of {built_by}, digest {message.digest}"
        self._client.set_tag(parent.run_id, f"stemma.reused.{message.stage}", text)
        self._ledger.set_row(
            message.build_id, message.stage, outcome="reused", build_id=message.built_by, time=message.time
        )
        self._describe_pipeline(parent)

    def _pipeline_finished(self, message: PipelineFinished) -> None:
        run = self._known(message.build_id)
        if message.error:
            self._client.set_tag(run.run_id, "stemma.error", message.error[: page.MAX_VALUE])
        self._client.set_terminated(run.run_id, message.status, _ms(message.time))
        self._delete_twins(run)
        self._delete_twin_versions(run)
        self._ledger.ended(run.build_id)

    def _register(self, message: RegisterModel) -> None:
        run = self._known(message.build_id)
        model_id = self._logged_model(run, message.digest, message.name)
        model = self._client.get_logged_model(model_id)
        put_links(Path(message.path), artifact_folder(self._root, model.artifact_location))
        self._ensure_registered(message.name)
        versions = self._client.search_model_versions(f"name = '{_quoted(message.name)}'")
        known = [version for version in versions if version.tags.get("stemma.digest") == message.digest]
        tags = {
            **message.tags,
            "stemma.digest": message.digest,
            "stemma.build_id": message.build_id,
            "stemma.fingerprint": str(run.about.get("fingerprint", "")),
        }
        version = (
            known[0]
            if known
            else self._client.create_model_version(
                message.name,
                f"models:/{model_id}",
                run.run_id,
                tags=tags,
                description=message.description or None,
                model_id=model_id,
                await_creation_for=0,
            )
        )
        # MLflow's server writes this link by itself; without a server nobody does.
        linked = json.loads(self._client.get_logged_model(model_id).tags.get(VERSIONS_TAG, "[]"))
        if not any(str(link["version"]) == str(version.version) and link["name"] == message.name for link in linked):
            linked.append({"name": message.name, "version": version.version})
            self._client.set_logged_model_tags(model_id, {VERSIONS_TAG: json.dumps(linked)})

    def _make_run(
        self,
        message: Message,
        parent_id: str,
        experiment_id: str,
        name: str,
        started: float,
        tags: Mapping[str, str],
        sender: Mapping[str, Any],
    ) -> DeliveredRun:
        """The run of a build: the one we know, else the one that bears its tag, else a new one."""
        known = self._ledger.run(message.build_id)
        if known:
            return known
        self._ledger.attempt(message.build_id, parent_id, message.to_json(), dict(sender))
        twins = self._runs_of(message.build_id, [experiment_id])
        run = twins[0] if twins else self._client.create_run(experiment_id, _ms(started), dict(tags), name)
        self._ledger.made(message.build_id, run.info.run_id, experiment_id, run.info.artifact_uri)
        return self._known(message.build_id)

    def _delete_twins(self, run: DeliveredRun) -> None:
        """A request that timed out may have made a run after all, later than we looked for it."""
        if run.attempts > 1:
            for twin in self._runs_of(run.build_id, [run.experiment_id]):
                if twin.info.run_id != run.run_id:
                    self._client.delete_run(twin.info.run_id)

    def _delete_twin_versions(self, pipeline: DeliveredRun) -> None:
        """The same for registered versions of the models that a pipeline run made or used: one that has an alias stays,
        else the first."""
        for row in self._ledger.rows(pipeline.build_id).values():
            builder = self._ledger.run(row.get("build_id", ""))
            found = self._client.search_model_versions(f"run_id = '{builder.run_id}'") if builder else []
            alike: dict[tuple[str, str], list[Any]] = {}
            for version in found:
                if digest := version.tags.get("stemma.digest"):
                    alike.setdefault((version.name, digest), []).append(version)
            for (name, _), versions in alike.items():
                if len(versions) > 1:
                    # A number from a database, a text from a server.
                    aliased = {str(number) for number in self._client.get_registered_model(name).aliases.values()}
                    versions.sort(key=lambda version: (str(version.version) not in aliased, int(version.version)))
                    for twin in versions[1:]:
                        if str(twin.version) not in aliased:
                            self._client.delete_model_version(name, twin.version)

    def _runs_of(self, build_id: str, experiment_ids: list[str]) -> list[Any]:
        return list(
            self._client.search_runs(
                experiment_ids,
                f"tags.`stemma.build_id` = '{_quoted(build_id)}'",
                run_view_type=ViewType.ACTIVE_ONLY,
                order_by=["attributes.start_time ASC"],
            )
        )

    def _known(self, build_id: str) -> DeliveredRun:
        run = self._find(build_id)
        if run is None:
            raise UnknownBuild(f"no run was ever started for build {build_id}")
        return run

    def _find(self, build_id: str) -> DeliveredRun | None:
        """From the ledger; if that was lost, from MLflow."""
        known = self._ledger.run(build_id)
        if known or not build_id:
            return known
        experiments = [experiment.experiment_id for experiment in self._client.search_experiments()]
        for run in self._runs_of(build_id, experiments):
            about = {
                "kind": f"{run.data.tags.get('stemma.kind', 'stage')}_started",
                "pipeline": run.data.tags.get("stemma.pipeline", ""),
                "stage": run.data.tags.get("stemma.stage", ""),
                "fingerprint": run.data.tags.get("stemma.fingerprint", ""),
                "flow_run_url": run.data.tags.get("prefect.flow_run_url", ""),
                "time": run.info.start_time / 1000,
            }
            parent_id = run.data.tags.get("stemma.pipeline_build_id", "")
            self._ledger.attempt(build_id, parent_id, about, {"host": "", "pid": 0, "started": 0.0})
            self._ledger.made(build_id, run.info.run_id, run.info.experiment_id, run.info.artifact_uri)
            return self._ledger.run(build_id)
        return None

    def _experiment(self, pipeline: str) -> str:
        """The experiment of a pipeline, made or brought back from the bin if need be."""
        if pipeline not in self._experiments:
            found: Experiment | None = self._client.get_experiment_by_name(pipeline)
            if found is None:
                location = f"mlflow-artifacts:/{page.slug(pipeline)}"
                # The kind tells the page to open on runs and their curves.
                tags = {"mlflow.experimentKind": "custom_model_development"}
                self._experiments[pipeline] = self._client.create_experiment(pipeline, location, tags)
            else:
                if found.lifecycle_stage == "deleted":
                    self._client.restore_experiment(found.experiment_id)
                self._experiments[pipeline] = found.experiment_id
        return self._experiments[pipeline]

    def _log_params(self, run_id: str, config: Mapping[str, Any]) -> None:
        items = iter(page.params(config).items())
        while batch := [Param(key, value) for key, value in islice(items, PARAMS_A_BATCH)]:
            self._client.log_batch(run_id, params=batch)

    def _log_inputs(self, run: DeliveredRun, message: StageStarted) -> None:
        datasets: list[DatasetInput] = []
        models: list[LoggedModelInput] = []
        for item in message.inputs:
            model_id = self._ledger.model_id(item.digest, run.experiment_id)
            if model_id:
                models.append(LoggedModelInput(model_id))
            else:
                datasets.append(_artifact_dataset(item, item.name))
        for source in message.sources[:SOURCES_SHOWN]:
            tags = {"stemma.digest": source.digest, "mlflow.data.context": "source"}
            datasets.append(_dataset(Path(source.path).name or source.path, source.digest, source.path, tags))
        if datasets or models:
            self._client.log_inputs(run.run_id, datasets, models)

    def _log_output(self, run: DeliveredRun, output: Output) -> None:
        self._client.log_batch(
            run.run_id,
            tags=[RunTag("stemma.digest", output.digest), RunTag("stemma.artifact", output.path)],
        )
        if output.kind == "dataset":
            item = Input("output", output.stage, output.digest, output.fingerprint)
            self._client.log_inputs(run.run_id, [_artifact_dataset(item, "output", output.path)])
            return
        model_id = self._logged_model(run, output.digest, f"{output.stage}-{output.fingerprint[:8]}")
        # Unlike inputs, an output that is logged twice is an error.
        logged = self._client.get_run(run.run_id).outputs.model_outputs
        if model_id not in {model.model_id for model in logged}:
            self._client.log_outputs(run.run_id, [LoggedModelOutput(model_id, step=0)])

    def _logged_model(self, run: DeliveredRun, digest: str, name: str) -> str:
        """The logged model of a payload, made without opening a single weight."""
        known = self._ledger.model_id(digest)
        if known:
            return known
        found = self._client.search_logged_models([run.experiment_id], f"tags.`stemma.digest` = '{_quoted(digest)}'")
        if found:
            model = found[0]
        else:
            tags = {"stemma.digest": digest, "stemma.build_id": run.build_id, "stemma.stage": run.about["stage"]}
            model = self._client.create_logged_model(
                run.experiment_id, page.slug(name), run.run_id, tags, model_type="language model"
            )
        self._client.finalize_logged_model(model.model_id, "READY")
        self._ledger.model_made(digest, run.experiment_id, model.model_id)
        return str(model.model_id)

    def _ensure_registered(self, name: str) -> None:
        try:
            self._client.get_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            self._client.create_registered_model(name)

    def _send_last_metrics(self, run: DeliveredRun, message: StageFinished) -> None:
        """The rest of the followed file; if it is gone, of the copy that the artifact keeps, or all of another file."""
        moved = Path(message.metrics) if message.metrics else None
        offset = 0
        for build_id, path, read in self._ledger.tails():
            if build_id == run.build_id:
                if Path(path).exists():
                    self._send_lines(run, Path(path), read, follow=True)
                    return
                offset = read if moved and moved.name == Path(path).name else 0
        if moved and moved.exists():
            self._send_lines(run, moved, offset, follow=False)

    def _send_lines(self, run: DeliveredRun, path: Path, offset: int, *, follow: bool) -> None:
        batch: list[Metric] = []
        end = 0

        def send() -> None:
            self._log_metrics(run.run_id, batch)
            batch.clear()
            if follow and end:
                self._ledger.advance(run.build_id, end)

        for line in read_lines(path, offset):
            if batch and len(batch) + len(line.values) > METRICS_A_BATCH:
                send()
            if line.rewound_to is not None:
                send()
                self._take_back(run, path, line)
            at_ms = _ms(line.time)
            batch += [Metric(name, value, at_ms, line.step) for name, value in line.values.items()]
            end = line.end
        send()

    def _take_back(self, run: DeliveredRun, path: Path, rewind: Line) -> None:
        """Deletes the points that a training took back when it went on from an earlier step."""
        points = [Point(name, line.step, _ms(line.time)) for line in undone_lines(path, rewind) for name in line.values]
        if points and not delete_points(database_uri(self._root), run.run_id, points):
            # The server of another machine, with a database that we do not reach: at least say so.
            first, moment = min(point.step for point in points), max(point.timestamp for point in points)
            message = f"steps from {first} on were taken again; their points up to {moment} ms do not count"
            self._client.set_tag(run.run_id, f"stemma.taken_back.{rewind.end}", message)

    def _log_metrics(self, run_id: str, metrics: list[Metric]) -> None:
        items = iter(metrics)
        while batch := list(islice(items, METRICS_A_BATCH)):
            try:
                self._client.log_batch(run_id, metrics=batch)
            except MlflowException as error:
                if error.error_code != "INVALID_PARAMETER_VALUE":
                    raise
                self._log_one_by_one(run_id, batch)

    def _log_one_by_one(self, run_id: str, metrics: list[Metric]) -> None:
        """Leaves out what MLflow will never take, such as a name that reads like a path."""
        for metric in metrics:
            try:
                self._client.log_batch(run_id, metrics=[metric])
            except MlflowException as error:
                if error.error_code != "INVALID_PARAMETER_VALUE":
                    raise
                log.warning("left out metric %r of run %s: %s", metric.key, run_id, error)

    def _describe_parent(self, parent_id: str) -> None:
        parent = self._ledger.run(parent_id)
        if parent:
            self._describe_pipeline(parent)

    def _describe_pipeline(self, run: DeliveredRun) -> None:
        rows = self._ledger.rows(run.build_id)
        builders = [self._ledger.run(row["build_id"]) for row in rows.values() if row.get("build_id")]
        urls = {builder.build_id: self._path(builder) or "" for builder in builders if builder}
        self._note(run.run_id, page.pipeline_note(run.about, rows, urls))

    def _note(self, run_id: str, text: str) -> None:
        self._client.set_tag(run_id, "mlflow.note.content", text)

    def _path(self, run: DeliveredRun | None) -> str | None:
        return page.run_path(run.experiment_id, run.run_id) if run else None

    def _folder(self, run: DeliveredRun) -> Path:
        return artifact_folder(self._root, run.artifact_uri)


def _artifact_dataset(item: Input, context: str, path: str = "") -> DatasetInput:
    tags = {
        "mlflow.data.context": context,
        "stemma.digest": item.digest,
        "stemma.fingerprint": item.fingerprint,
        "stemma.stage": item.stage,
    }
    return _dataset(item.stage, item.digest, path or f"{item.stage}/{item.fingerprint}", tags)


def _dataset(name: str, digest: str, path: str, tags: Mapping[str, str]) -> DatasetInput:
    profile = json.dumps({key.removeprefix("stemma."): tags[key] for key in tags if key.startswith("stemma.")})
    dataset = Dataset(name[:500], digest[:DIGEST_LENGTH], "local", json.dumps({"uri": path}), profile=profile)
    return DatasetInput(dataset, [InputTag(key, value) for key, value in tags.items()])


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _quoted(text: str) -> str:
    return text.replace("'", "''")
