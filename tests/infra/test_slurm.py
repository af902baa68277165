"""A worker as a Slurm job takes what `stemma run` hands over."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil
import pytest

from tests.support.pipelines import data_config
from tests.support.programs.command import REPOSITORY, environment, finish, start, stemma, write_config
from tests.support.programs.processes import COLD, gone, running_stage, wait_until
from tests.support.services.slurm import slurm

pytestmark = [pytest.mark.cluster, pytest.mark.long]


def test_a_worker_of_a_slurm_job_runs_pipelines_and_ends_with_its_job(tmp_path: Path) -> None:
    """The risk: what Slurm sets, limits or kills that a shell does not."""
    root = tmp_path / "store"
    with slurm() as cluster:
        env = environment(**cluster, **COLD)
        try:
            up = stemma("up", "--root", root, env=env).document["services"]
            urls = {service["name"]: service["url"] for service in up}
            pids = {service["name"]: service["pid"] for service in up}
            local = psutil.Process(pids["worker"])
            local.terminate()
            wait_until(lambda: gone(local))
            env |= {"STEMMA_PREFECT_URL": urls["prefect"], "STEMMA_MLFLOW_URL": urls["mlflow"]}
            script = REPOSITORY / "infra" / "slurm" / "worker.sbatch"
            asked = ["sbatch", "--parsable", f"--output={tmp_path}/worker.log", str(script), str(root)]
            job = subprocess.run(asked, env=env, check=True, capture_output=True, text=True, cwd=REPOSITORY)
            config = write_config(tmp_path / "config.yaml", data_config(tmp_path))
            command = start("run", config, "--root", root, env=env)
            child = wait_until(lambda: running_stage(root, "clean"))
            assert isinstance(child, psutil.Process)
            assert "slurmstepd" in " ".join(parent.name() for parent in child.parents())
            answer = finish(command)
            assert answer.code == 0, (answer.document["errors"], answer.stderr)
            subprocess.run(["scancel", "--full", job.stdout.strip()], env=env, check=True)
            queue = ["squeue", "--noheader", "--jobs", job.stdout.strip()]
            wait_until(lambda: not subprocess.run(queue, env=env, capture_output=True).stdout, timeout_s=90)
        finally:
            stemma("down", "--root", root, env=env)
