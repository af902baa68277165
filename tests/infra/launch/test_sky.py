"""Managed jobs of SkyPilot: what is rendered, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.launch.config import LaunchConfig
from infra.launch.sky import managed_job
from tests.support.programs.command import REPOSITORY
from tests.support.services.managed_job import problem_of

EVERYTHING: dict[str, Any] = {
    "infra": ["aws/us-east-1", "gcp", "k8s/lab"],
    "accelerators": ["H100:8", "A100-80GB:8"],
    "cpus": 64,
    "memory_gb": 512,
    "image": "docker:registry/stemma:1",
    "restarts_on_errors": 2,
    "secrets": ["AWS_ACCESS_KEY_ID"],
    "envs": {"AWS_ENDPOINT_URL": "https://s3.lab"},
}


@pytest.mark.parametrize("settings", [{}, EVERYTHING])
def test_a_job_has_the_fields_of_skypilot_s_yaml(settings: dict[str, Any]) -> None:
    launch = LaunchConfig.model_validate({"skypilot": settings})
    job = managed_job(launch, "lab-7b", "configs/lab.yaml", "s3://models/lab", ("--until", "sft"))
    assert problem_of(job) == ""
    assert problem_of({**job, "spot": True}) and problem_of({**job, "num_nodes": "two"})
    assert job["run"].endswith("--set launch.checkpoint_remote=s3://models/lab-checkpoints --until sft\n")
    resources = job["resources"]
    assert resources["use_spot"] is True
    if settings:
        assert resources["accelerators"] == {"H100": 8, "A100-80GB": 8}
        assert [candidate["infra"] for candidate in resources["any_of"]] == EVERYTHING["infra"]
        assert job["secrets"] == {"AWS_ACCESS_KEY_ID": None}


@pytest.mark.parametrize(
    ("launch", "root", "expected"),
    [
        ({}, "s3://models/lab", ""),
        ({}, "store", "a folder is lost with its machine"),
        ({}, "s3://models", "a folder is lost with its machine"),
        ({"nodes": 2}, "s3://models/lab", "share no folder"),
        ({"skypilot": {"spots": True}}, "s3://models/lab", "skypilot.spots"),
    ],
)
def test_the_job_of_a_config_is_printed_or_refused(
    launch: dict[str, Any], root: str, expected: str, tmp_path: Path
) -> None:
    (tmp_path / "lab.yaml").write_text(yaml.safe_dump({"name": "lab", "launch": launch}))
    command = [sys.executable, "-m", "infra.launch.sky", "lab.yaml", "--root", root]
    environment = {"PYTHONPATH": str(REPOSITORY)}
    printed = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert expected in printed.stderr and "Traceback" not in printed.stderr
    assert bool(printed.returncode) == bool(expected)
    if not expected:
        assert problem_of(yaml.safe_load(printed.stdout)) == ""
