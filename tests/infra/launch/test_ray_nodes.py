"""Nodes of a real Ray cluster: taken, watched, lost, given back. Ranks only meet; tests/flows has trainings."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from pydantic import ValidationError

from infra.launch.config import LaunchConfig
from infra.servers.ports import any_free_port
from tests.infra.launch.cluster_launcher import on_cluster, rank_pids
from tests.support.programs.processes import wait_until
from tests.support.services.ray_cluster import RayCluster, launch_on, ray_cluster

ENDED = "[Ended(rank=0, code=0), Ended(rank=1, code=0)]"


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Three nodes of a CPU each."""
    with ray_cluster(3) as made:
        yield made


def _is_free(cluster: RayCluster) -> bool:
    """Whether Ray holds nothing for anybody."""
    said = cluster.status().stdout
    return " 0.0/" in said and "reserved in placement groups" not in said


def _none_left(cluster: RayCluster, folder: Path) -> None:
    wait_until(lambda: _is_free(cluster), timeout_s=60)
    assert not [pid for pid in rank_pids(folder) if psutil.pid_exists(pid)]


def _at_work(folder: Path) -> None:
    wait_until(lambda: len(list(folder.glob("done.*"))) > 1)


@pytest.mark.parametrize("address", [None, "local"])
def test_a_cluster_must_be_named(address: str | None) -> None:
    with pytest.raises(ValidationError, match="expected the address of a Ray cluster"):
        LaunchConfig(cluster="ray", ray=address)


@pytest.mark.cluster
def test_a_cluster_that_does_not_answer_is_told_by_its_address(tmp_path: Path) -> None:
    address = f"127.0.0.1:{any_free_port()}"
    out, err = on_cluster(tmp_path, 1, cluster="ray", ray=address).communicate(timeout=200)
    assert out.startswith(f"scheduler_unreachable: launch.ray: the Ray cluster at {address} rejected the job"), (
        out,
        err,
    )


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.parametrize("client", [False, True], ids=["on a machine of the cluster", "through Ray's client"])
def test_each_node_has_a_rank_and_what_they_print_is_heard(cluster: RayCluster, tmp_path: Path, client: bool) -> None:
    """The risk: two nodes' ranks on one machine, or a log that stays on the cluster."""
    settings = dict(launch_on(cluster)) | ({"ray": f"ray://127.0.0.2:{cluster.client_port}"} if client else {})
    out, err = on_cluster(tmp_path, 3, environment=cluster.variables, **settings).communicate(timeout=200)
    assert out.splitlines()[-1] == ENDED, (out, err)
    trained = next(line for line in out.splitlines() if line.startswith("nodes: training on"))
    assert len({node for node in cluster.nodes if f"@{node}" in trained}) == 2 and "passed their checks" in trained
    assert {line for line in err.splitlines() if " here " in line} == {"[rank 0] here 0 2 0", "[rank 1] here 1 2 1"}
    _none_left(cluster, tmp_path)


@pytest.mark.cluster
@pytest.mark.long
def test_a_training_that_finds_no_free_nodes_says_what_it_waits_for_and_can_be_cancelled(
    cluster: RayCluster, tmp_path: Path
) -> None:
    """The risk: a run that waits for ever without a word, and leaves its request behind."""
    stage = on_cluster(tmp_path, 3, environment=cluster.variables, **launch_on(cluster), processes=2)
    assert stage.stdout is not None
    said = stage.stdout.readline()
    assert said.startswith("waiting: waiting for 2 nodes of Ray with 2 CPUs free each; it has 1 of 0 CPUs"), said
    stage.terminate()
    assert stage.communicate(timeout=200)[0].strip() == "[]"
    _none_left(cluster, tmp_path)


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL], ids=["cancelled", "killed"])
def test_all_ends_with_the_stage(cluster: RayCluster, tmp_path: Path, end: signal.Signals) -> None:
    """The risk: ranks that train on for nobody, on machines that others wait for."""
    stage = on_cluster(tmp_path, 900, environment=cluster.variables, **launch_on(cluster))
    _at_work(tmp_path)
    stage.send_signal(end)
    stage.communicate(timeout=200)
    wait_until(lambda: not [pid for pid in rank_pids(tmp_path) if psutil.pid_exists(pid)], timeout_s=60)
    _none_left(cluster, tmp_path)


@pytest.mark.cluster
@pytest.mark.long
def test_a_node_whose_agent_dies_is_left_out_and_another_takes_its_place(cluster: RayCluster, tmp_path: Path) -> None:
    """The risk: the job comes back on the machine that failed, or waits for it. A lost machine is in tests/flows."""
    stage = on_cluster(tmp_path, 250, environment=cluster.variables, **launch_on(cluster), lost_s=5)
    _at_work(tmp_path)
    rank = int((tmp_path / "start.0.1").read_text().split()[0])
    os.kill(os.getpgid(rank), signal.SIGKILL)
    out, err = stage.communicate(timeout=300)
    assert out.splitlines()[-1] == ENDED, (out, err)
    first, second = (line.split(": ", 1)[1] for line in out.splitlines() if line.startswith("nodes: "))
    lost = first.split("training on ")[1].split(", which")[0].split(", ")[1]
    assert f"restarted: node {lost} was lost: its agent ended with exit code -9" in out and lost not in second
    assert "0" not in {path.name.split(".")[2] for path in tmp_path.glob("met.1.*")}, "it went on from what was done"
    _none_left(cluster, tmp_path)
