from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from infra.lineage.delivery import Delivery, UnknownBuild
from infra.lineage.ledger import Ledger, ledger_path, mlflow_run_id
from infra.lineage.messages import (
    Message,
    PipelineFinished,
    PipelineStarted,
    PromoteModel,
    RegisterModel,
    RunForgotten,
    StageFinished,
)
from infra.lineage.registry import artifact_folder
from infra.lineage.tracking import database_uri
from infra.run import Run as StageRun
from infra.run import open_journal


@pytest.fixture
def ledger(root: Path) -> Iterator[Ledger]:
    ledger = Ledger(root)
    yield ledger
    ledger.close()


@pytest.fixture
def delivery(root: Path, ledger: Ledger) -> Delivery:
    return Delivery(root, database_uri(root), ledger)


@pytest.fixture
def client(root: Path) -> MlflowClient:
    return MlflowClient(database_uri(root), database_uri(root))


SENDER = {"host": "elsewhere", "pid": 1, "started": 0.0}


def deliver(delivery: Delivery, messages: list[Message]) -> None:
    for message in messages:
        delivery.deliver(message, SENDER)


def runs(client: MlflowClient) -> dict[str, Run]:
    experiment = client.get_experiment_by_name("quickstart")
    assert experiment is not None
    return {run.data.tags["stemma.build_id"]: run for run in client.search_runs([experiment.experiment_id])}


def test_a_run_that_is_forgotten_is_gone_with_its_children(story, delivery, client, ledger, root: Path) -> None:
    other = PipelineStarted("q", "quickstart", 1_790_000_100.0)
    deliver(delivery, [*story.beginning(), *story.ending(), other])
    folders = [artifact_folder(root, run.info.artifact_uri) for run in runs(client).values()]
    assert any(folder.exists() for folder in folders)
    deliver(delivery, [RunForgotten("p"), RunForgotten("p"), RunForgotten("unknown")])
    assert set(runs(client)) == {"q"}
    with closing(sqlite3.connect(root / "mlflow" / "mlflow.db")) as connection:
        for table in ("metrics", "latest_metrics", "params"):
            assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,), table
        assert connection.execute("SELECT count(*) FROM runs").fetchone() == (1,), "not only hidden"
    assert not any(folder.exists() for folder in folders)
    assert not ledger.rows("p") and ledger.run("s") is None and ledger.run("q") is not None


def test_a_pipeline_run_becomes_a_parent_with_a_child_for_each_build(story, delivery, client) -> None:
    deliver(delivery, story.beginning() + story.ending())
    found = runs(client)
    assert {key: run.info.status for key, run in found.items()} == {
        "p": "FINISHED",
        "s": "FINISHED",
        "t": "FINISHED",
        "e": "FAILED",
    }
    for child in "ste":
        assert found[child].data.tags["mlflow.parentRunId"] == found["p"].info.run_id
    pretrain = found["t"].data
    assert pretrain.params["model.width"] == "256"
    assert pretrain.params["model.layers"] == "null"
    assert len(pretrain.params["notes"]) == 6000
    assert pretrain.metrics["validation_loss"] == 3.2
    expected = {
        "stemma.stage": "pretrain",
        "stemma.stage_version": "1",
        "stemma.fingerprint": "bbbb",
        "stemma.digest": "b" * 64,
        "stemma.input.shards": f"shard@{'a' * 64}",
        "stemma.commit": "c0ffee",
        "stemma.dirty": "true",
        "stemma.lock": "10cc",
        "stemma.host": "box",
        "stemma.device": "cpu",
        "prefect.flow_run_id": "flow",
        "prefect.flow_run_url": "http://127.0.0.1:4200/runs/flow-run/flow",
    }
    assert expected.items() <= pretrain.tags.items()
    assert found["e"].data.tags["stemma.error"] == "the disk is full"


def test_trials_lie_within_their_sweep_which_goes_on_after_a_kill(delivery, client) -> None:
    sweep = PipelineStarted("w", "quickstart", 1_790_000_000.0, name="sweep a1b2c3")
    trial = PipelineStarted("p", "quickstart", 1_790_000_001.0, name="trial 0: learning_rate=0.001", parent_id="w")
    deliver(delivery, [sweep, trial, PipelineFinished("w", "KILLED", 1_790_000_002.0)])
    found = runs(client)
    assert found["p"].data.tags["mlflow.parentRunId"] == found["w"].info.run_id
    assert (found["p"].info.run_name, found["w"].info.status) == ("trial 0: learning_rate=0.001", "KILLED")
    deliver(delivery, [sweep])
    again = runs(client)
    assert (len(again), again["w"].info.status) == (2, "RUNNING")
    deliver(delivery, [PipelineFinished("w", "FINISHED", 1_790_000_003.0, figures={"best.pretrain.loss": 2.0})])
    assert runs(client)["w"].info.status == "FINISHED"


def test_lineage_runs_both_ways_through_datasets_and_models(story, delivery, client) -> None:
    deliver(delivery, story.beginning() + story.ending())
    found = runs(client)

    def datasets(build_id: str) -> set[tuple[str, str, str]]:
        return {
            (item.dataset.name, item.dataset.digest, {tag.key: tag.value for tag in item.tags}["mlflow.data.context"])
            for item in client.get_run(found[build_id].info.run_id).inputs.dataset_inputs
        }

    assert datasets("s") == {("book one.txt", "f" * 32, "source"), ("shard", "a" * 32, "output")}
    assert datasets("t") == {("shard", "a" * 32, "shards")}
    [made] = client.get_run(found["t"].info.run_id).outputs.model_outputs
    [read] = client.get_run(found["e"].info.run_id).inputs.model_inputs
    assert made.model_id == read.model_id
    model = client.get_logged_model(made.model_id)
    assert model.source_run_id == found["t"].info.run_id
    assert model.tags["stemma.digest"] == "b" * 64


def test_a_registered_version_leads_to_its_run_and_its_files(story, delivery, client, root) -> None:
    deliver(delivery, story.beginning() + story.ending())
    [version] = client.search_model_versions("name = 'quickstart-base'")
    assert version.run_id == runs(client)["t"].info.run_id
    assert version.tags["stemma.digest"] == "b" * 64
    model = client.get_logged_model(version.source.removeprefix("models:/"))
    assert json.loads(model.tags["mlflow.modelVersions"]) == [{"name": "quickstart-base", "version": 1}]
    files = list((root / "mlflow" / "artifacts").joinpath(*model.artifact_location.split(":/")[1].split("/")).iterdir())
    weights, card = sorted(files, key=lambda file: file.name, reverse=True)
    assert weights.samefile(story.model / "model.safetensors")
    assert card.name == "README.md" and card.read_text() == story.card.read_text()
    assert client.get_model_version_by_alias("quickstart-base", "newest").version == version.version
    assert version.description.startswith("**the base**\n\n# A model\n\nIt writes.\n\n… The rest is in README.md")


def test_a_rejected_version_says_why_and_has_no_alias_until_one_is_promoted(story, delivery, client) -> None:
    told = {"status": "rejected", "reason": "cloze_accuracy is 0.2, expected at least 0.3"}
    ending = [replace(one, tags=told) if isinstance(one, RegisterModel) else one for one in story.ending()]
    deliver(delivery, story.beginning() + ending)
    [version] = client.search_model_versions("name = 'quickstart-base'")
    assert version.tags.items() >= told.items()
    assert client.get_registered_model("quickstart-base").aliases == {}
    deliver(delivery, [PromoteModel("promotion", "quickstart-base", "c" * 64)])
    assert client.get_registered_model("quickstart-base").aliases == {}, "no version has these bytes"
    deliver(delivery, [PromoteModel("promotion", "quickstart-base", "b" * 64)])
    assert client.get_model_version_by_alias("quickstart-base", "promoted").version == version.version


def test_runs_of_pipelines_are_compared_by_figures_of_their_own(story, delivery, client, root) -> None:
    deliver(delivery, story.beginning() + story.ending())
    run = runs(client)["p"]
    assert run.data.metrics == {"pretrain.validation_loss": 3.2}
    folder = artifact_folder(root, run.info.artifact_uri)
    assert {file.name for file in folder.iterdir()} == {"report.html", "MODEL_CARD.md"}


def test_the_pages_link_to_each_other(story, delivery, client) -> None:
    deliver(delivery, story.beginning() + story.ending())
    found = runs(client)
    pipeline_page = found["p"].data.tags["mlflow.note.content"]
    assert "http://127.0.0.1:4200/runs/flow-run/flow" in pipeline_page
    for stage, build_id in {"pretrain": "t", "tokenizer": "s"}.items():
        row = next(line for line in pipeline_page.splitlines() if line.startswith(f"| [{stage}]"))
        assert found[build_id].info.run_id in row
    assert "| reused |" in next(line for line in pipeline_page.splitlines() if "[tokenizer]" in line)
    stage_page = found["t"].data.tags["mlflow.note.content"]
    assert found["p"].info.run_id in stage_page
    assert "http://127.0.0.1:4200/runs/flow-run/flow" in stage_page


def test_metrics_keep_steps_times_and_values(story, delivery, client, root) -> None:

    deliver(delivery, story.beginning())
    delivery.follow_metrics()
    assert story.loss_history() == story.expected_history(30)
    story.write_metrics(5, first=30)
    deliver(delivery, story.ending())
    assert story.loss_history() == story.expected_history(35)


def test_figures_without_a_number_arrive(story, delivery, client, root) -> None:
    with open(story.journal, "a") as file:
        file.write(
            '{"kind": "metric", "time": 1.0, "step": null, "values": {"a/nan": "nan", "../x": 1, "odd name!": 2}}\n'
        )
        file.write('{"torn\n{"kind": "metric", "time": 2.0, "step": 1, "values": {"after": 7.0}}\n')
    deliver(delivery, story.beginning() + story.ending())
    metrics = runs(client)["t"].data.metrics
    assert metrics["a/nan"] != metrics["a/nan"]
    assert metrics["after"] == 7.0
    assert metrics["odd name_"] == 2.0
    assert "../x" not in metrics


def test_what_a_training_takes_back_is_taken_back_in_mlflow_too(story, client, root, mlflow_server) -> None:
    """While a server works on the same database."""
    ours = Delivery(root, mlflow_server.url, Ledger(root))
    story.journal.write_text("")
    deliver(ours, story.beginning())
    database = root / "mlflow" / "mlflow.db"
    with open_journal(story.journal) as journal:
        run = StageRun(root / "work", journal=journal)
        places = {}
        for step in range(1, 8):
            run.metrics({"train/loss": float(step), **({"late": 1.0} if step > 5 else {})}, step)
            places[step] = run.place()
        ours.follow_metrics()
        assert points(database)["train/loss"] == [(step, float(step)) for step in range(1, 8)], "live"
        run.rewind(places[4], 4)
        for step in range(5, 7):
            run.metrics({"train/loss": 10.0 * step}, step)
        run.place()
        ours.follow_metrics()
        assert points(database) == {"train/loss": [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 50.0), (6, 60.0)]}
        assert runs(client)["t"].data.metrics["train/loss"] == 60.0, "the newest value, of the page's table"
        assert "late" not in runs(client)["t"].data.metrics
        run.metrics({"train/loss": 70.0}, 7)
        run.rewind(places[2], 2)
        for step in range(3, 8):
            run.metrics({"train/loss": 100.0 * step}, step)
    moved = story.model / "aux" / "journal.jsonl"
    story.journal.rename(moved)
    deliver(ours, [StageFinished("t", "FINISHED", 1_790_000_060.0, metrics=str(moved))])
    whole = {"train/loss": [(1, 1.0), (2, 2.0), *((step, 100.0 * step) for step in range(3, 8))]}
    assert points(database) == whole, "also what was told after the file moved"


def points(database: Path) -> dict[str, list[tuple[int, float]]]:
    """All points of each metric of the build `t`, from MLflow's own table."""
    query = """SELECT metrics.key, step, metrics.value FROM metrics JOIN tags USING (run_uuid)
        WHERE tags.key = 'stemma.build_id' AND tags.value = 't' ORDER BY metrics.key, step"""
    found: dict[str, list[tuple[int, float]]] = {}
    with closing(sqlite3.connect(database)) as connection:
        for name, step, value in connection.execute(query):
            found.setdefault(name, []).append((step, value))
    return found


def test_metrics_come_from_the_artifact_when_the_followed_file_is_gone(story, delivery, root) -> None:

    deliver(delivery, story.beginning())
    moved = story.model / "aux" / "metrics.jsonl"
    story.journal.rename(moved)
    deliver(delivery, [StageFinished("t", "FINISHED", 1_790_000_060.0, metrics=str(moved))])
    assert story.loss_history() == story.expected_history(30)


def test_a_version_that_a_frozen_server_made_after_all_goes_again(story, delivery, client) -> None:
    """It comes late: the message was delivered again and made another."""
    messages = story.beginning() + story.ending()
    deliver(delivery, messages)
    [version] = client.search_model_versions("name = 'quickstart-base'")
    for _ in range(2):
        client.create_model_version("quickstart-base", version.source, version.run_id, version.tags)
    client.set_registered_model_alias("quickstart-base", "serving", "3")
    other = client.create_model_version("quickstart-base", version.source, version.run_id, {"made": "by hand"})
    deliver(delivery, messages[-1:])
    left = {one.version for one in client.search_model_versions("name = 'quickstart-base'")}
    assert left == {3, other.version}, "the one that somebody uses, and what is not ours"


def snapshot(client: MlflowClient, root: Path) -> dict[str, object]:
    with sqlite3.connect(root / "mlflow" / "mlflow.db") as connection:
        tables = [
            "runs",
            "metrics",
            "params",
            "tags",
            "datasets",
            "inputs",
            "input_tags",
            "logged_models",
            "model_versions",
        ]
        return {table: connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables}


@pytest.mark.parametrize("ledger_lost", [False, True])
def test_telling_it_all_twice_changes_nothing(story, delivery, ledger, client, root, ledger_lost) -> None:
    messages = story.beginning() + story.ending()
    deliver(delivery, messages)
    once = snapshot(client, root)
    if ledger_lost:
        ledger.close()
        ledger_path(root).unlink()
        ledger = Ledger(root)
        delivery = Delivery(root, database_uri(root), ledger)
    deliver(delivery, messages)
    assert snapshot(client, root) == once
    ledger.close()


def test_a_run_made_by_a_request_that_timed_out_is_removed(story, delivery, ledger, client) -> None:
    beginning = story.beginning()
    # The relay was cut off after asking, and the server made the run after the second look.
    ledger.attempt("p", "", beginning[0].to_json(), SENDER)
    deliver(delivery, beginning[:1])
    run = runs(client)["p"]
    client.create_run(run.info.experiment_id, run.info.start_time + 1, {"stemma.build_id": "p"}, "twin")
    deliver(delivery, [PipelineFinished("p", "FINISHED", 1_790_000_001.0)])
    [left] = client.search_runs([run.info.experiment_id], "tags.`stemma.build_id` = 'p'")
    assert left.info.run_id == run.info.run_id
    assert left.info.status == "FINISHED"


def test_a_deleted_experiment_comes_back(story, delivery, root, ledger, client) -> None:
    deliver(delivery, story.beginning()[:1])
    experiment = client.get_experiment_by_name("quickstart")
    assert experiment is not None
    client.delete_experiment(experiment.experiment_id)
    again = Delivery(root, database_uri(root), ledger)
    again.deliver(story.beginning()[1], SENDER)
    assert "s" in runs(client)


def test_a_store_in_a_folder_of_any_name_knows_its_runs_and_nothing_is_written_beside_it(tmp_path: Path) -> None:
    root = tmp_path / "c# %20 ä?"
    ledger = Ledger(root)
    ledger.attempt("p", "", {}, SENDER)
    ledger.made("p", "run-of-p", "1", "artifacts")
    ledger.close()
    assert mlflow_run_id(root, "p") == "run-of-p"
    assert list(tmp_path.iterdir()) == [root]


def test_a_build_that_nobody_started_is_named(delivery) -> None:
    with pytest.raises(UnknownBuild, match="ghost"):
        delivery.deliver(PipelineFinished("ghost", "FINISHED", 1.0), SENDER)
