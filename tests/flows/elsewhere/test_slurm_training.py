"""A pipeline whose pretraining is a job of a real Slurm, with compressed shards that both nodes unpack."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.pipelines import trained_config
from tests.support.programs.command import environment, finish, start, stemma, write_config
from tests.support.programs.processes import progress_of, wait_until
from tests.support.services.slurm import slurm

pytestmark = [pytest.mark.cluster, pytest.mark.long]


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    with slurm() as variables:
        yield environment(**variables)


def _config(folder: Path, batches: int, **launch: Any) -> Path:
    return write_config(folder / "config.yaml", trained_config(folder, batches, **launch))


def _on_slurm(folder: Path, batches: int, **launch: Any) -> Path:
    return _config(folder, batches, cluster="slurm", nodes=2, processes=1, **launch)


def _ask(env: dict[str, str], *words: str) -> str:
    return subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout.strip()


def _told(env: dict[str, str], job: str, field: str) -> str:
    """What Slurm tells of a job."""
    words = _ask(env, "scontrol", "show", "job", "-o", job).split()
    return dict(word.partition("=")[::2] for word in words)[field]


def _running_job(env: dict[str, str], root: Path) -> str:
    """The number of the job that trains, once it has a checkpoint."""
    wait_until(lambda: list(root.glob(".work/pretrain/*/scratch/checkpoints/ba*")))
    return _ask(env, "squeue", "--noheader", "--format=%i")


def test_a_job_of_two_nodes_ends_with_the_weights_of_two_local_ranks(cluster: dict[str, str], tmp_path: Path) -> None:
    """The risk: ranks that are told another place or batch than local ones; nodes that unpack into one folder."""
    root = tmp_path / "store"
    there = stemma("run", _on_slurm(tmp_path, 40), "--root", root, env=cluster)
    assert there.code == 0, (there.document["errors"], there.stderr[-3000:])
    assert "training on n1, n2, which passed their checks" in there.stderr
    here = stemma("run", _config(tmp_path, 40, processes=2), "--root", root, "--force", "pretrain", env=cluster)
    assert here.code == 0, here.document["errors"]
    assert here.rows()["pretrain"]["digest"] == there.rows()["pretrain"]["digest"], "the same bytes"


def test_a_job_that_is_cancelled_from_outside_is_followed_by_another(cluster: dict[str, str], tmp_path: Path) -> None:
    """The risk: a stage that begins anew, or never ends, when a cluster's keeper takes its job away."""
    root = tmp_path / "store"
    command = start("run", _on_slurm(tmp_path, 400), "--root", root, env=cluster)
    job = _running_job(cluster, root)
    _ask(cluster, "scancel", job)
    answer = finish(command)
    assert answer.code == 0, (answer.document["errors"], answer.stderr[-3000:])
    assert f"Slurm job {job} was cancelled from outside" in answer.stderr and "trying again" in answer.stderr
    assert "continuing pretrain at batch" in answer.stderr


def test_without_retries_it_fails_by_name_and_goes_on_when_asked(cluster: dict[str, str], tmp_path: Path) -> None:
    root = tmp_path / "store"
    config = _on_slurm(tmp_path, 400, retries=0)
    command = start("run", config, "--root", root, env=cluster)
    job = _running_job(cluster, root)
    _ask(cluster, "scancel", job)
    answer = finish(command)
    assert [problem["code"] for problem in answer.document["errors"]] == ["job_cancelled"]
    again = stemma("run", config, "--root", root, env=cluster)
    assert again.code == 0 and "continuing pretrain at batch" in again.stderr, again.stderr[-3000:]


def test_cancelling_the_run_cancels_its_job_and_leaves_a_checkpoint(cluster: dict[str, str], tmp_path: Path) -> None:
    root = tmp_path / "store"
    command = start("run", _on_slurm(tmp_path, 20000), "--root", root, env=cluster)
    job = _running_job(cluster, root)
    done = progress_of(root, "pretrain")
    os.kill(command.pid, signal.SIGINT)
    answer = finish(command)
    assert answer.code == 130, answer.stderr[-3000:]
    wait_until(lambda: _told(cluster, job, "JobState") == "CANCELLED", timeout_s=30)
    (newest, *_) = sorted(root.glob(".work/pretrain/*/scratch/checkpoints/ba*"), reverse=True)
    assert int(newest.name[2:]) >= done


def test_a_job_at_its_time_limit_is_followed_by_another(cluster: dict[str, str], tmp_path: Path) -> None:
    """The risk: that Slurm's word before the limit is not heard by all ranks, or is taken for a cancelled run.

    The limit, in whole minutes, is set once there is a checkpoint to go on from, 30 to 90 seconds later."""
    root = tmp_path / "store"
    slurm = {"time_limit_h": 1}
    command = start("run", _on_slurm(tmp_path, 6000, slurm=slurm, grace_s=5, retries=0), "--root", root, env=cluster)
    job = _running_job(cluster, root)
    hours, minutes, seconds = map(int, _told(cluster, job, "RunTime").split(":"))
    limit = hours * 60 + minutes + (seconds + 30) // 60 + 1
    _ask(cluster, "scontrol", "update", f"JobId={job}", f"TimeLimit={limit}")
    answer = finish(command)
    assert answer.code == 0, (answer.document["errors"], answer.stderr[-3000:])
    assert "going on from the newest checkpoint" in answer.stderr and "continuing pretrain at batch" in answer.stderr
