"""The same stages on Ray by one config key: the same bytes, and the same errors."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.conftest import make_model
from tests.support.pipelines import DOCSTRING_RULES, data_config
from tests.support.programs.command import REPOSITORY, Answer, write_config
from tests.support.services.ray_cluster import ray_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

CHAIN: dict[str, Any] = {
    "clean": DOCSTRING_RULES,
    "dedupe": {},
    "decontaminate": {},
    "mix": {},
    "tokenizer": {"vocab_size": 400},
    "shard": {"sequence_length": 64},
    "benchmark_text": {"tasks": ["minimal_pairs"]},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[str, dict[str, str]]]:
    """A Ray cluster with two workers, which knows nothing of this project: its address and what opens it."""
    with ray_cluster(2) as found:
        yield found.address, found.variables


def digests(answer: Answer) -> dict[str, str]:
    assert answer.code == 0, answer.document["errors"]
    return {stage: row["digest"] for stage, row in answer.rows().items()}


@pytest.mark.long
def test_a_pipeline_on_a_cluster_of_two_workers_gives_the_same_bytes_and_errors(
    run: Callable[..., Answer], tmp_path: Path, cluster: tuple[str, dict[str, str]]
) -> None:
    address, token = cluster
    [source] = data_config(tmp_path, documents=100)["ingest"]["read"]
    sources = [{"kind": "docstrings", "packages": [name], "limit_mb": 0.3} for name in ("numpy", "scipy")]
    config: dict[str, Any] = {"name": "chronicle", "ingest": {"read": [*sources, source]}, **CHAIN}
    local = run("run", write_config(tmp_path / "local.yaml", config), "--root", tmp_path / "local")
    on_ray = write_config(tmp_path / "ray.yaml", {**config, "launch": {"ray": address}})

    found = run("run", on_ray, "--root", tmp_path / "ray", **token)

    refused = [on_ray, "--set", "ingest.read.2.text_field=gone"]

    assert digests(found) == digests(local)
    for stage in ("ingest", "clean", "dedupe", "decontaminate", "mix", "shard"):
        log = (Path(found.rows()[stage]["path"]) / "aux" / "stage.log").read_text()
        assert "Connected to Ray cluster" in log, stage

    wrong = run("run", *refused, "--root", tmp_path / "ray", **token)
    [problem] = wrong.document["errors"]
    assert problem["code"] == "wrong_field" and problem["fix"] == "set ingest.read.2.text_field: text"


@pytest.mark.long
def test_on_two_workers_started_on_this_machine_documents_are_cleaned_to_the_same_bytes(
    run: Callable[..., Answer], tmp_path: Path
) -> None:
    sources = []
    for name, documents in (("first", 30), ("second", 40)):
        (tmp_path / name).mkdir()
        sources += data_config(tmp_path / name, documents)["ingest"]["read"]
    config = write_config(tmp_path / "config.yaml", {"name": "chronicle", "ingest": {"read": sources}, "clean": {}})
    root = tmp_path / "store"
    local = run("run", config, "--root", root)
    (ingested,) = (root / "ingest").glob("*/documents")
    assert len(list(ingested.iterdir())) == 2, "a partition for each worker"
    built = Path(local.rows()["clean"]["path"])
    shutil.move(built, tmp_path / "here")
    settings = ("--set", "launch.ray=local", "--set", "launch.workers=2")
    # Ray's processes find each other by this machine's own address, which the guard does not let them ask for.
    on_workers = run("run", config, "--root", root, "--only", "clean", *settings, PYTHONPATH=str(REPOSITORY))
    assert digests(on_workers) == {"clean": digests(local)["clean"]}
    assert on_workers.with_status("built") == {"clean"}
    assert "Started a local Ray instance" in (built / "aux" / "stage.log").read_text()


@pytest.mark.long
def test_on_two_workers_started_on_this_machine_benchmarks_give_the_same_results(
    run: Callable[..., Answer], tmp_path: Path
) -> None:
    """The risk: workers of a cluster score otherwise than one process, since each loads the model itself."""
    config = {
        "name": "asked",
        "base_model": {"path": str(make_model(tmp_path / "model", seed=1))},
        "benchmarks": {"tasks": ["cloze", "minimal_pairs"], "shots": [0, 1], "failure_classes": {"cases": 2}},
    }
    local = run("run", write_config(tmp_path / "local.yaml", config), "--root", tmp_path / "local")
    on_ray = write_config(tmp_path / "ray.yaml", {**config, "launch": {"ray": "local", "workers": 2}})
    # Ray's processes find each other by this machine's own address, which the guard does not let them ask for.
    on_workers = run("run", on_ray, "--root", tmp_path / "ray", PYTHONPATH=str(REPOSITORY))
    assert digests(on_workers) == digests(local)
    here, there = (Path(answer.rows()["benchmarks_base"]["path"]) for answer in (local, on_workers))
    assert "Started a local Ray instance" in (there / "aux" / "stage.log").read_text()
    names = ["lm_eval.json", "samples_cloze.jsonl", "samples_minimal_pairs.jsonl", "failure_cases.jsonl"]
    for name in ["results.json", *(f"aux/{name}" for name in names)]:
        assert (there / name).read_bytes() == (here / name).read_bytes(), name


@pytest.mark.long
def test_a_benchmark_that_cannot_be_asked_is_refused_by_the_same_words_on_a_cluster(
    run: Callable[..., Answer], tmp_path: Path, cluster: tuple[str, dict[str, str]]
) -> None:
    address, token = cluster
    (tmp_path / "mine.jsonl").write_text('{"query": "a", "choices": ["b", "c"]}\n')
    mine = {"name": "mine", "kind": "multiple_choice", "path": str(tmp_path / "mine.jsonl")}
    config = {
        "name": "asked",
        "base_model": {"path": str(make_model(tmp_path / "model", seed=1))},
        "benchmarks": {"tasks": ["cloze", mine], "limit": 4},
    }
    here = run("run", write_config(tmp_path / "here.yaml", config), "--root", tmp_path / "store")
    on_ray = write_config(tmp_path / "there.yaml", {**config, "launch": {"ray": address}})
    there = run("run", on_ray, "--root", tmp_path / "store", **token)
    assert here.document["errors"] == there.document["errors"] != []
