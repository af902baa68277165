"""The same stages on Ray by one config key: the same bytes, and the same errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.command import Answer, write_config
from tests.pipelines import data_config

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def digests(answer: Answer) -> dict[str, str]:
    assert answer.code == 0, answer.document["errors"]
    return {stage: row["digest"] for stage, row in answer.rows().items()}


def test_a_pipeline_on_two_workers_of_ray_gives_the_same_bytes_and_errors(run, tmp_path: Path):
    [source] = data_config(tmp_path, documents=400)["ingest"]["read"]
    config: dict[str, Any] = {
        "name": "chronicle",
        "ingest": {"read": [source, {**source, "name": "again"}]},
        "clean": {},
    }
    local = run("run", write_config(tmp_path / "local.yaml", config), "--root", tmp_path / "local")
    on_ray = write_config(tmp_path / "ray.yaml", {**config, "launch": {"ray": "local", "workers": 2}})

    cluster = run("run", on_ray, "--root", tmp_path / "ray")

    assert digests(cluster) == digests(local)
    log = (Path(cluster.rows()["ingest"]["path"]) / "aux" / "stage.log").read_text()
    assert "Started a local Ray instance" in log

    wrong = run("run", on_ray, "--root", tmp_path / "ray", "--set", "ingest.read.1.text_field=gone")
    [problem] = wrong.document["errors"]
    assert problem["code"] == "wrong_field" and problem["fix"] == "set ingest.read.1.text_field"
