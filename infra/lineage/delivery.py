"""Conversion of messages into MLflow runs, metrics, datasets and models. Every step is idempotent."""

from __future__ import annotations

import json
import shutil
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

from infra.lineage import page
from infra.lineage.also.copies import Copies
from infra.lineage.ledger import DeliveredRun, Ledger
from infra.lineage.messages import (
    InputMessage,
    Message,
    MetricsFile,
    Output,
    PipelineFinished,
    PipelineStarted,
    PromoteModel,
    RegisterModel,
    RunForgotten,
    StageFinished,
    StageReused,
    StageStarted,
)
from infra.lineage.metrics import MetricsDelivery, milliseconds, remove_run
from infra.lineage.migrations import prepare
from infra.lineage.registry import Registry, artifact_folder, put_copies, quoted
from infra.lineage.tracking import database_uri, exclusive

PARAMS_A_BATCH = 100
SOURCES_SHOWN = 100
DIGEST_LENGTH = 32


class UnknownBuild(LookupError):
    """A message is about a build whose start was never delivered."""


class Delivery:
    """One connection to a tracking store, through its server or straight on its database.

    Raises what `migrations.prepare` raises where it goes straight.
    """

    def __init__(self, root: Path, uri: str, ledger: Ledger, copies: Copies | None = None) -> None:
        self._root = root
        self._ledger = ledger
        self._experiments: dict[str, str] = {}
        # The registry looks logged models up at the global address, regardless of its client's settings.
        mlflow.set_tracking_uri(uri)
        if uri == database_uri(root):
            prepare(root)
            with exclusive(root):
                self._client = MlflowClient(uri, registry_uri=uri)
                self._client.search_experiments(max_results=1)
        else:
            self._client = MlflowClient(uri, registry_uri=uri)
        self._metrics = MetricsDelivery(root, self._client, ledger, copies)
        self._registry = Registry(root, self._client, ledger)

    def deliver(self, message: Message, sender: Mapping[str, Any]) -> None:
        """Raise UnknownBuild, MlflowException, or an OSError for files that cannot be read."""
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
            case RunForgotten():
                self._run_forgotten(message)
            case RegisterModel():
                self._registry.register(self._delivered_run(message.build_id), message)
            case PromoteModel():
                self._registry.promote(message)
            case _:
                raise TypeError(f"no delivery for {type(message).__name__}")

    def follow_metrics(self) -> None:
        """Send the lines that were written to the followed files since the last call."""
        self._metrics.follow()

    def end_abandoned(self, run: DeliveredRun) -> None:
        """Mark a run whose process died without reporting its end."""
        now = time.time()
        note = "its process ended without reporting it"
        if run.about["kind"] == StageStarted.kind:
            self._stage_finished(StageFinished(run.build_id, "KILLED", now, error=note))
        else:
            self._pipeline_finished(PipelineFinished(run.build_id, "KILLED", now, error=note))

    def _pipeline_started(self, message: PipelineStarted, sender: Mapping[str, Any]) -> None:
        experiment_id = self._experiment(message.pipeline)
        tags = page.pipeline_tags(message)
        if sweep := self._ledger.run(message.parent_id):
            tags["mlflow.parentRunId"] = sweep.run_id
        run = self._make_run(message, "", experiment_id, page.pipeline_name(message), message.time, tags, sender)
        if not run.open:  # a sweep that goes on after it was ended
            self._client.update_run(run.run_id, status="RUNNING")
            self._ledger.goes_on(run.build_id, dict(sender))
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
        run = self._delivered_run(message.build_id)
        self._metrics.send_last(run, message.metrics)
        at_ms = milliseconds(message.time)
        self._metrics.log(run.run_id, [Metric(name, value, at_ms, 0) for name, value in message.figures.items()])
        if message.output:
            self._log_output(run, message.output)
        for key, value in message.tags.items():
            self._client.set_tag(run.run_id, key, value)
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
        parent = self._delivered_run(message.build_id)
        builder = self._find(message.built_by)
        built_by = f"run {builder.run_id}" if builder else f"build {message.built_by}"
        text = f"{message.fingerprint} of {built_by}, digest {message.digest}"
        self._client.set_tag(parent.run_id, f"stemma.reused.{message.stage}", text)
        self._ledger.set_row(
            message.build_id, message.stage, outcome="reused", build_id=message.built_by, time=message.time
        )
        self._describe_pipeline(parent)

    def _pipeline_finished(self, message: PipelineFinished) -> None:
        run = self._delivered_run(message.build_id)
        if message.error:
            self._client.set_tag(run.run_id, "stemma.error", message.error[: page.MAX_VALUE])
        at_ms = milliseconds(message.time)
        self._metrics.log(run.run_id, [Metric(name, value, at_ms, 0) for name, value in message.figures.items()])
        for key, value in message.tags.items():
            self._client.set_tag(run.run_id, key, value)
        put_copies(message.artifacts, self._folder(run))
        self._client.set_terminated(run.run_id, message.status, at_ms)
        self._delete_twins(run)
        self._registry.delete_twin_versions(run)
        self._ledger.ended(run.build_id)

    def _run_forgotten(self, message: RunForgotten) -> None:
        for run in self._ledger.family(message.build_id):
            remove_run(database_uri(self._root), run.run_id)
            shutil.rmtree(self._folder(run), ignore_errors=True)
        self._ledger.forget(message.build_id)

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
        """Return the run of a build: the known one, else the one with its tag, else a new one."""
        existing = self._ledger.run(message.build_id)
        if existing:
            return existing
        self._ledger.attempt(message.build_id, parent_id, message.to_json(), dict(sender))
        twins = self._runs_of(message.build_id, [experiment_id])
        run = twins[0] if twins else self._client.create_run(experiment_id, milliseconds(started), dict(tags), name)
        self._ledger.made(message.build_id, run.info.run_id, experiment_id, run.info.artifact_uri)
        return self._delivered_run(message.build_id)

    def _delete_twins(self, run: DeliveredRun) -> None:
        """Delete further runs of a build: a request that timed out may have made one after we looked for it."""
        if run.attempts > 1:
            for twin in self._runs_of(run.build_id, [run.experiment_id]):
                if twin.info.run_id != run.run_id:
                    self._client.delete_run(twin.info.run_id)

    def _runs_of(self, build_id: str, experiment_ids: list[str]) -> list[Any]:
        return list(
            self._client.search_runs(
                experiment_ids,
                f"tags.`stemma.build_id` = '{quoted(build_id)}'",
                run_view_type=ViewType.ACTIVE_ONLY,
                order_by=["attributes.start_time ASC"],
            )
        )

    def _delivered_run(self, build_id: str) -> DeliveredRun:
        run = self._find(build_id)
        if run is None:
            raise UnknownBuild(f"no run was ever started for build {build_id}")
        return run

    def _find(self, build_id: str) -> DeliveredRun | None:
        """Find a run in the ledger; if that was lost, in MLflow."""
        existing = self._ledger.run(build_id)
        if existing or not build_id:
            return existing
        experiments = [experiment.experiment_id for experiment in self._client.search_experiments()]
        for run in self._runs_of(build_id, experiments):
            attributes = {
                "kind": f"{run.data.tags.get('stemma.kind', 'stage')}_started",
                "pipeline": run.data.tags.get("stemma.pipeline", ""),
                "stage": run.data.tags.get("stemma.stage", ""),
                "fingerprint": run.data.tags.get("stemma.fingerprint", ""),
                "flow_run_url": run.data.tags.get("prefect.flow_run_url", ""),
                "time": run.info.start_time / 1000,
            }
            parent_id = run.data.tags.get("stemma.pipeline_build_id", "")
            self._ledger.attempt(build_id, parent_id, attributes, {"host": "", "pid": 0, "started": 0.0})
            self._ledger.made(build_id, run.info.run_id, run.info.experiment_id, run.info.artifact_uri)
            return self._ledger.run(build_id)
        return None

    def _experiment(self, pipeline: str) -> str:
        """Return the experiment of a pipeline, which is created or restored from the bin if necessary."""
        if pipeline not in self._experiments:
            experiment: Experiment | None = self._client.get_experiment_by_name(pipeline)
            if experiment is None:
                location = f"mlflow-artifacts:/{page.slug(pipeline)}"
                # With this kind the page opens on runs and their curves.
                tags = {"mlflow.experimentKind": "custom_model_development"}
                self._experiments[pipeline] = self._client.create_experiment(pipeline, location, tags)
            else:
                if experiment.lifecycle_stage == "deleted":
                    self._client.restore_experiment(experiment.experiment_id)
                self._experiments[pipeline] = experiment.experiment_id
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
            item = InputMessage("output", output.stage, output.digest, output.fingerprint)
            self._client.log_inputs(run.run_id, [_artifact_dataset(item, "output", output.path)])
            return
        model_id = self._registry.logged_model(run, output.digest, f"{output.stage}-{output.fingerprint[:8]}")
        # Unlike inputs, an output that is logged twice is an error.
        logged = self._client.get_run(run.run_id).outputs.model_outputs
        if model_id not in {model.model_id for model in logged}:
            self._client.log_outputs(run.run_id, [LoggedModelOutput(model_id, step=0)])

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


def _artifact_dataset(item: InputMessage, context: str, path: str = "") -> DatasetInput:
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
