"""Nodes of a real Slurm: submitted, followed, taken back, cancelled. Ranks only meet; tests/flows has trainings."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.infra.launch.cluster_launcher import on_cluster, rank_pids
from tests.support.programs.command import REPOSITORY
from tests.support.programs.processes import wait_until
from tests.support.services.slurm import slurm

pytestmark = pytest.mark.cluster
CLUSTER = {"cluster": "slurm", "grace_s": 5, "lost_s": 20}
ENDED = "[Ended(rank=0, code=0), Ended(rank=1, code=0)]"


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    with slurm() as variables:
        yield variables


@pytest.fixture(autouse=True)
def no_job_is_left(cluster: dict[str, str]) -> Iterator[None]:
    yield
    _ask(cluster, "scancel", "--user=root")


def _ask(cluster: dict[str, str], *words: str) -> str:
    told = subprocess.run(words, env={**os.environ, **cluster}, capture_output=True, text=True, check=True)
    return told.stdout.strip()


def _job(cluster: dict[str, str], folder: Path) -> str:
    """The number of the running job, once its ranks work."""
    wait_until(lambda: len(list(folder.glob("done.*"))) > 1)
    return _ask(cluster, "squeue", "--noheader", "--format=%i")


def _none_left(cluster: dict[str, str], folder: Path) -> None:
    wait_until(lambda: not _ask(cluster, "squeue", "--noheader"), timeout_s=60)
    assert not [pid for pid in rank_pids(folder) if psutil.pid_exists(pid)]


def test_a_job_has_a_rank_on_each_node_and_what_they_print_is_heard(cluster: dict[str, str], tmp_path: Path) -> None:
    out, err = on_cluster(tmp_path, 3, environment=cluster, **CLUSTER).communicate(timeout=200)
    assert out.splitlines()[0].startswith("submitted: submitted as Slurm job")
    assert "training on n1, n2, which passed their checks" in out and out.splitlines()[-1] == ENDED, (out, err)
    assert {line for line in err.splitlines() if " here " in line} == {"[rank 0] here 0 2 0", "[rank 1] here 1 2 1"}
    _none_left(cluster, tmp_path)


def test_a_job_that_is_cancelled_from_outside_fails_by_its_name(cluster: dict[str, str], tmp_path: Path) -> None:
    stage = on_cluster(tmp_path, 900, environment=cluster, **CLUSTER)
    job = _job(cluster, tmp_path)
    _ask(cluster, "scancel", job)
    out, _ = stage.communicate(timeout=200)
    assert out.splitlines()[-1].startswith(f"job_cancelled: pretrain: Slurm job {job} was cancelled from outside")
    _none_left(cluster, tmp_path)


@pytest.mark.long
def test_a_job_that_slurm_queues_again_goes_on(cluster: dict[str, str], tmp_path: Path) -> None:
    """As after a pre-emption: the nodes are taken, and the same job starts anew. The risk: that nodes of its first
    start are taken for those of its second."""
    stage = on_cluster(tmp_path, 60, environment=cluster, **CLUSTER)
    job = _job(cluster, tmp_path)
    _ask(cluster, "scontrol", "requeue", job)
    wait_until(lambda: "JobState=PENDING" in _ask(cluster, "scontrol", "show", "job", "-o", job))
    _ask(cluster, "scontrol", "update", f"JobId={job}", "StartTime=now")  # Slurm waits two minutes by itself
    out, err = stage.communicate(timeout=200)
    assert f"restarted: Slurm took the nodes of job {job}, and queued it again; going on from" in out, (out, err)
    assert out.splitlines()[-1] == ENDED and "(1 of" not in out


def test_a_cancelled_run_cancels_its_job(cluster: dict[str, str], tmp_path: Path) -> None:
    stage = on_cluster(tmp_path, 900, environment=cluster, **CLUSTER)
    job = _job(cluster, tmp_path)
    stage.terminate()
    stage.communicate(timeout=200)
    assert "JobState=CANCELLED" in _ask(cluster, "scontrol", "show", "job", "-o", job)
    _none_left(cluster, tmp_path)


@pytest.mark.long
def test_whoever_continues_a_killed_stage_takes_its_job_away_first(cluster: dict[str, str], tmp_path: Path) -> None:
    """The risk: two jobs that write into one work folder."""
    first = on_cluster(tmp_path, 80, environment=cluster, **CLUSTER)
    job = _job(cluster, tmp_path)
    first.kill()
    first.communicate()
    out, err = on_cluster(tmp_path, 80, environment=cluster, **CLUSTER).communicate(timeout=200)
    assert out.splitlines()[-1] == ENDED, (out, err)
    assert "JobState=RUNNING" not in _ask(cluster, "scontrol", "show", "job", "-o", job)
    starts = {path.name.split(".")[1] for path in tmp_path.glob("met.*")}
    assert starts == {"0", "1"}


def test_a_job_that_slurm_refuses_says_why(cluster: dict[str, str], tmp_path: Path) -> None:
    settings = {**CLUSTER, "slurm": {"partition": "nowhere"}}
    out, _ = on_cluster(tmp_path, 1, environment=cluster, **settings).communicate(timeout=200)
    assert out.startswith("slurm_refused: launch.slurm: sbatch refused the job:") and "nvalid partition" in out


@pytest.mark.long
def test_a_node_that_fails_its_checks_is_in_the_next_job_s_list_of_excluded_ones(tmp_path: Path) -> None:
    """Its clock is a minute and more behind. The risk: Slurm gives the next job the same node, again and again."""
    late = "import os, time\nclock = time.time\nif os.environ.get('SLURMD_NODENAME') == 'n1':\n"
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / "sitecustomize.py").write_text(f"{late}    time.time = lambda: clock() - 100\n")
    with slurm(3) as three:
        environment = three | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "late"), str(REPOSITORY)])}
        out, err = on_cluster(tmp_path, 3, environment=environment, **CLUSTER).communicate(timeout=200)
        first, second = (line.split()[-1] for line in out.splitlines() if line.startswith("submitted:"))
        told = {job: _ask(three, "scontrol", "show", "job", "-o", job) for job in (first, second)}
    assert "node_excluded: node n1 is left out: clock: it is 100 s behind" in out, (out, err)
    assert "ExcNodeList=(null)" in told[first] and "ExcNodeList=n1 " in told[second]
    assert "training on n2, n3, which passed their checks" in out and out.splitlines()[-1] == ENDED
