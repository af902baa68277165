from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient

from infra.errors import StageError
from infra.lineage.rebuild import rebuild
from infra.lineage.relay_lock import RelayLock
from infra.lineage.tracking import database_uri
from infra.servers.environment import server_environ
from infra.store.layout import Layout
from infra.store.manifest import File, InputArtifact, Manifest, SourceRecord


def write_artifact(
    root: Path, stage: str, fingerprint: str, envelope: str, inputs: dict[str, InputArtifact], **more
) -> Manifest:
    folder = root / stage / fingerprint
    (folder / "aux").mkdir(parents=True)
    with open(folder / "aux" / "metrics.jsonl", "w") as file:
        for step in range(10):
            values = {f"{stage}/loss": 10.0 - step}
            file.write(json.dumps({"time": 1_790_000_000.0 + step, "step": step, "values": values}) + "\n")
    manifest = Manifest(
        stage=stage,
        version=3,
        fingerprint=fingerprint,
        digest=envelope * 64,
        build_id=f"build-{stage}",
        config={"seed": 17},
        identity={},
        inputs=inputs,
        requires={},
        sources=more.get("sources", ()),
        files=(File("x", 1, "0" * 64),),
        result={"figures": {"score": 2.5}, "headline": "score 2.5"},
        pipeline="quickstart",
        flow_run_id="flow",
        code={"commit": "c0ffee", "dirty": False},
        started=more["started"],
        finished="2026-11-21T07:00:00+00:00",
    )
    manifest.write(folder)
    return manifest


@pytest.fixture
def store(root: Path) -> Path:
    Layout(root).create()
    source = SourceRecord("ingest.sources.0", "e" * 64, {"/data/book.txt": "f" * 64})
    ingest = write_artifact(root, "ingest", "aaaa", "a", {}, sources=(source,), started="2026-11-21T06:00:00+00:00")
    write_artifact(root, "pretrain", "bbbb", "b", {"documents": ingest.as_input()}, started="2026-11-21T06:30:00+00:00")
    (root / "pretrain" / "bbbb" / "model.safetensors").write_bytes(b"weights")
    (root / "pretrain" / "unfinished").mkdir()
    return root


def test_a_lost_tracking_store_is_written_anew_from_the_manifests(store: Path) -> None:
    assert rebuild(store) == 2
    client = MlflowClient(database_uri(store), database_uri(store))
    experiment = client.get_experiment_by_name("quickstart")
    assert experiment is not None
    runs = {
        run.data.tags.get("stemma.stage", "pipeline"): run for run in client.search_runs([experiment.experiment_id])
    }
    assert set(runs) == {"pipeline", "ingest", "pretrain"}
    pretrain = runs["pretrain"]
    assert pretrain.data.tags["mlflow.parentRunId"] == runs["pipeline"].info.run_id
    assert pretrain.data.tags["stemma.commit"] == "c0ffee"
    assert pretrain.data.metrics["score"] == 2.5
    history = client.get_metric_history(pretrain.info.run_id, "pretrain/loss")
    assert [(m.step, m.value, m.timestamp) for m in history] == [
        (step, 10.0 - step, (1_790_000_000 + step) * 1000) for step in range(10)
    ]
    [documents] = pretrain.inputs.dataset_inputs
    assert documents.dataset.digest == "a" * 32
    assert len(pretrain.outputs.model_outputs) == 1
    names = {item.dataset.name for item in runs["ingest"].inputs.dataset_inputs}
    assert names == {"book.txt", "ingest"}


def test_rebuilding_twice_leaves_one_history_and_keeps_the_old_database_beside_it(store: Path) -> None:
    for _ in range(2):
        # In one process MLflow would hold on to the first database.
        code = "import sys; from infra.lineage.rebuild import rebuild; rebuild(sys.argv[1])"
        subprocess.run([sys.executable, "-c", code, str(store)], env=server_environ({}), check=True)
    client = MlflowClient(database_uri(store), database_uri(store))
    experiment = client.get_experiment_by_name("quickstart")
    assert experiment is not None
    assert len(client.search_runs([experiment.experiment_id])) == 3
    assert len(list((store / "mlflow").glob("mlflow.db.*"))) >= 1


def test_rebuilding_under_a_working_relay_is_refused(store: Path) -> None:
    lock = RelayLock(store)
    assert lock.acquire()
    with pytest.raises(StageError, match="stemma down"):
        rebuild(store)
    lock.release()


@pytest.mark.parametrize("content", [b"", b"\0" * 200, b'{"stage": "ingest"'])
def test_with_a_damaged_manifest_the_old_tracking_store_stays(store: Path, content: bytes) -> None:
    database = store / "mlflow" / "mlflow.db"
    database.parent.mkdir(parents=True, exist_ok=True)
    database.write_bytes(b"all runs, failed ones too")
    damaged = store / "ingest" / "aaaa" / "manifest.json"
    damaged.write_bytes(content)
    with pytest.raises(StageError) as caught:
        rebuild(store)
    (problem,) = caught.value.problems
    assert (problem.code, problem.path) == ("unreadable_manifest", str(damaged))
    assert [path.name for path in database.parent.glob("mlflow.db*")] == ["mlflow.db"]
    assert database.read_bytes() == b"all runs, failed ones too"
