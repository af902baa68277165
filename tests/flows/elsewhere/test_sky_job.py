"""A pipeline as a managed job of SkyPilot, whose machine is lost while it trains."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.launch.config import LaunchConfig
from infra.launch.sky import managed_job
from tests.support.lab import ROOT, Lab, opened_lab
from tests.support.pipelines import trained_config
from tests.support.programs.command import stemma, write_config
from tests.support.programs.processes import COLD, wait_until
from tests.support.services.managed_job import ManagedJob
from tests.support.services.postgres import postgres

pytestmark = [pytest.mark.cluster, pytest.mark.long]


@pytest.fixture
def lab(
    s3_port: int, proxy: Any, env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Lab]:
    with postgres() as database, opened_lab(s3_port, proxy, env, database, tmp_path, monkeypatch) as opened:
        yield opened


def saved_checkpoints(lab: Lab) -> list[str]:
    """Those of a training that has begun; the weights before its first batch lie elsewhere."""
    saved = (key for key in lab.objects("manifest.json") if key.startswith("lab-checkpoints/pretrain/"))
    return [key for key in saved if "/checkpoints/" in key]


def test_a_job_that_loses_its_machine_ends_with_the_bits_of_an_undisturbed_run(lab: Lab, tmp_path: Path) -> None:
    """The risk: the next machine has nothing of the last one, since all of that was on a disk that is gone."""
    config = write_config(tmp_path / "config.yaml", trained_config(tmp_path, 300))
    undisturbed = stemma("run", config, "--root", tmp_path / "store", env=lab.env)
    assert undisturbed.code == 0, undisturbed.document["errors"]

    variables = {**lab.env, **COLD}
    secrets = sorted(name for name in variables if name.startswith("AWS_SECRET"))
    machine = {name: value for name, value in variables.items() if name.isupper() and name not in ("HOME", "PATH")}
    settings = {
        "setup": "true",
        "program": f"{sys.executable} -m cli.main",
        "secrets": secrets,
        "envs": {name: value for name, value in machine.items() if name not in secrets and name != "STEMMA_CACHE"},
    }
    launch = LaunchConfig.model_validate({"skypilot": settings})
    job = ManagedJob(managed_job(launch, "lab", str(config), ROOT), tmp_path / "machines", variables)
    try:
        wait_until(lambda: job.has_ended or saved_checkpoints(lab), timeout_s=400)
        assert not job.has_ended, job.log()
        job.lose_machine()
        assert job.wait(400) == 0, job.log()
    finally:
        job.close()
    assert "continuing pretrain at batch" in job.log()
    (model,) = (key for key in lab.objects("/manifest.json") if key.startswith("lab/pretrain/"))
    manifest = json.loads(lab.client.get_object(Bucket="models", Key=model)["Body"].read())
    assert manifest["digest"] == undisturbed.rows()["pretrain"]["digest"], "the same bytes"
    assert [key for key in lab.objects() if key.startswith("lab-checkpoints/")] == [], "none remains"
